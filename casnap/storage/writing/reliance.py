"""What a change relies on, announced to collectors before the first look at the index."""

from __future__ import annotations

from contextlib import ExitStack

from casnap.errors import FencedError
from casnap.format.digest import Digest
from casnap.format.records import Place, Root
from casnap.storage.lookup.index import View
from casnap.storage.reading.repository import Repository
from casnap.storage.writing.reused_packs import ReusedPacks


class Reliance:
    """The chunks of earlier commits that a change relies on; collectors see it until the end.

    Each session has one. Who asks before its session begins what the store holds makes another one,
    which that session relies on too.

    Args:
        store: The store.
        base_root: The root that rank 0 has just read for all ranks; by default a recent one.
        announced: The number of a root that is no newer, for collectors to see; None to hide.
        at_once: Whether they are to see it at once, also where that costs requests.

    Attributes:
        base: The index as the root sees it that the change is based on.
        reused: What it relies on.
        renew: To be called now and then while the change goes on.
    """

    def __init__(
        self,
        store: Repository,
        base_root: Root | None = None,
        *,
        announced: int | None,
        at_once: bool = False,
    ) -> None:
        self._store = store
        self.renew = _do_nothing
        with ExitStack() as stack:
            # Before the base is read, so that no collector frees in between what the base names.
            if announced is not None:
                at_once = at_once or store.announces_at_once
                self.renew = stack.enter_context(
                    store.backend.announced(announced, at_once=at_once)
                )
            self.base: View = store.recent_view(base_root)
            self.reused = ReusedPacks(store, self.base)
            self._end = stack.pop_all()

    def rely_on(self, digests: list[Digest]) -> list[Place | None]:
        """Rely on the digests that live packs hold; return a place of each, or None."""
        self.renew()
        return self.reused.reuse(digests)

    def stands(self) -> bool:
        """Whether packs that the newest root names have all of it."""
        reused = ReusedPacks(self._store, self.base)
        reused.add(self.reused)
        try:
            reused.confirm(self._store.view())
        except FencedError:
            return False
        return True

    def end(self) -> None:
        """Have collectors see it no more."""
        self.renew = _do_nothing
        self._end.close()


def _do_nothing() -> None:
    """Stand for the renewal of what is not announced."""
