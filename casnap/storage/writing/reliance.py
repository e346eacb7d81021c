"""The reliance of a change: the chunks and nodes of earlier commits that the change needs.

A change announces itself to collectors before it first looks at the index. The index says what was
written, not what still exists: somebody may have deleted a pack, or a backup that was restored in
part may have left it too short. So the change looks at each pack when it first relies on it, while
it can still store missing chunks again.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, KeysView
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain

from casnap.errors import FencedError
from casnap.format.codec import Codec
from casnap.format.digest import Digest, split_digests
from casnap.format.records import PackId, Place, Root, pack_key
from casnap.storage.lookup.chains import chains_below
from casnap.storage.lookup.index import IndexView
from casnap.storage.lookup.pack_lengths import GONE
from casnap.storage.reading.repository import Repository

_log = logging.getLogger("casnap")
_DELTA = int(Codec.DELTA)


class Reliance:
    """The chunks and nodes of earlier commits that a change needs, and their packs.

    Until the reliance ends, the change is announced to collectors.

    Each session has a reliance. To learn earlier which chunks the store has, a caller makes another
    reliance before its session, and passes it to the session, which takes it over.

    Args:
        store: The store.
        base_root: The root that rank 0 has just read for all ranks; by default a recent one.
        announced: The root number to announce to collectors, no greater than that of the base; None
            to announce nothing.
        at_once: Whether to announce the change right away, even if that costs requests.

    Attributes:
        base: The index according to the root that the change began from.
        renew: Keeps the change announced. Threads call it from time to time.
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
        self._lock = threading.Lock()
        # Pack → the digests relied on there, one behind the other.
        self._digests: defaultdict[PackId, bytearray] = defaultdict(bytearray)
        # The lengths of packs that were looked at; and the packs that were missing or too short.
        self._lengths: dict[PackId, int] = {}
        self._lost: set[PackId] = set()
        self.renew = _do_nothing
        with ExitStack() as stack:
            # Announce before reading the base, so that no collector frees its packs in between.
            if announced is not None:
                at_once = at_once or store.announces_at_once
                self.renew = stack.enter_context(
                    store.backend.announced(announced, at_once=at_once)
                )
            self.base: IndexView = store.recent_view(base_root)
            self._view = self.base
            self._end = stack.pop_all()

    @property
    def packs(self) -> KeysView[PackId]:
        """The ids of the packs that the change relies on."""
        return self._digests.keys()

    def rely_on(self, digests: list[Digest]) -> list[Place | None]:
        """Find chunks and nodes in live packs that exist and are long enough, and rely on them.

        To *rely on* a pack means that the commit checks whether it still exists. If a chunk is
        stored as a delta, the change also relies on all bases of its chain.

        Returns:
            For each digest a place, or None if no such pack holds it.
        """
        self.renew()
        places = self._find(digests)
        found = list(zip(digests, places, strict=True))
        # Most places are no deltas, and making chains of them would take ten times as long.
        deltas = [d for d, place in found if place is not None and place.codec == _DELTA]
        if deltas:
            chains = chains_below(deltas, self._find)
            for i, digest in enumerate(digests):
                if digest in chains:
                    places[i] = next((place for _, place in chains[digest]), None)
            found = [*zip(digests, places, strict=True), *chain.from_iterable(chains.values())]
        self._note(found)
        return places

    def adopt(self, earlier: Reliance) -> None:
        """Take over an earlier reliance. The caller must then call :meth:`confirm`."""
        with self._lock:
            for pack, digests in earlier._digests.items():
                self._digests[pack] += digests
            self._lost |= earlier._lost

    def _note(self, records: Iterable[tuple[Digest, Place | None]]) -> None:
        with self._lock:
            for digest, place in records:
                if place is not None:
                    self._digests[place.pack] += digest

    def _find(self, digests: list[Digest]) -> list[Place | None]:
        """Find digests in packs that exist.

        Missing and short packs are no longer considered live.
        """
        while True:
            view = self._view
            places = self._store.index.find(view, digests, only_live=True)
            bad = self._bad(places)
            if not bad:
                return places
            if self._store.newest() == view.root:
                gone = {pack for pack in bad if self._lengths[pack] == GONE}
                if gone and self._has_appeared(min(gone), view.root):
                    for pack in gone:
                        del self._lengths[pack]
                    continue
                _log.warning(
                    "%s: %d packs are gone or cut off, such as %s; the needed chunks are "
                    "stored anew; `casnap check` says what else is hurt",
                    self._store.backend.uri,
                    len(bad),
                    pack_key(min(bad)),
                )
            with self._lock:
                self._lost |= bad
                self._view = replace(self._view, live=self._view.live.without(bad))

    def _has_appeared(self, pack: PackId, root: Root) -> bool:
        """Wait for a pack that the newest root names; return whether this host sees it now."""
        newest = self._store.newest
        return self._store.backend.appears(pack_key(pack), lambda: newest() == root)

    def _bad(self, places: Iterable[Place | None]) -> set[PackId]:
        """Return which packs of some places are missing or too short.

        Each pack is looked at only once.
        """
        ends: dict[PackId, int] = {}
        for place in places:
            if place is not None:
                end = place.offset + place.stored_size
                if end > ends.get(place.pack, -1):
                    ends[place.pack] = end
        unseen = [pack for pack in ends if pack not in self._lengths]
        self._lengths |= self._store.index.pack_lengths.of(unseen, self._view.packs.at_most)
        return {pack for pack, end in ends.items() if self._lengths[pack] < end}

    def confirm(self, latest: IndexView) -> None:
        """Check that a newer root still has the packs that the change relies on.

        If live packs hold everything for which the change needs a condemned or missing pack, the
        change relies on the live packs instead. Otherwise it goes on relying on a condemned pack,
        and the commit rescues this pack.

        Args:
            latest: The index according to the newer root.

        Raises:
            FencedError: No pack that the root names holds a needed chunk or node.
        """
        self._view = replace(latest, live=latest.live.without(self._lost))
        for pack in latest.live.lacking(self._digests):
            digests = list(dict.fromkeys(split_digests(bytes(self._digests[pack]))))
            if None not in self.rely_on(digests):
                del self._digests[pack]
            elif pack not in latest.packs:
                raise FencedError

    def stands(self) -> bool:
        """Whether packs of the newest root still hold all chunks and nodes that were relied on."""
        try:
            self.confirm(self._store.view())
        except FencedError:
            return False
        return True

    def end(self) -> None:
        """Withdraw the announcement to collectors."""
        self.renew = _do_nothing
        self._end.close()


def _do_nothing() -> None:
    """Do nothing: there is no announcement to renew."""
