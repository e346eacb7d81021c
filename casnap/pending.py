"""A take in the background, as its caller sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, cast

from casnap.errors import CasnapError
from casnap.runtime.later import ModuleLater
from casnap.runtime.typing import TypeVar
from casnap.take.pending import PendingTake

if TYPE_CHECKING:
    import casnap
    from casnap.take import commit
else:
    casnap, commit = ModuleLater("casnap"), ModuleLater("casnap.take.commit")

# With on_error="warn", a take that failed leaves None.
Outcome = TypeVar(
    "Outcome", bound="casnap.Snapshot | None", covariant=True, default="casnap.Snapshot"
)


class PendingSnapshot(Generic[Outcome]):
    """A snapshot that is being stored in the background."""

    def __init__(
        self,
        path: str,
        take: PendingTake,
        stored: Callable[[commit.TakeResult], casnap.Snapshot],
    ) -> None:
        self._path = path
        self._take = take
        self._stored = stored

    @classmethod
    def not_begun(cls, path: str, error: CasnapError) -> PendingSnapshot[casnap.Snapshot | None]:
        """Return what ``async_take`` returns if it failed before it went on in the background."""

        def stored(_: commit.TakeResult) -> casnap.Snapshot:
            raise error

        return PendingSnapshot(path, PendingTake.not_begun(error), stored)

    @property
    def path(self) -> str:
        """The path that the snapshot will have."""
        return self._path

    def done(self) -> bool:
        """Whether the take has ended, with success or with an error."""
        return self._take.done()

    @property
    def error(self) -> BaseException | None:
        """The error that the take has ended with; None while it is pending, and if it succeeded.

        Looking at it does not count as raising it: without ``on_error="warn"``, ``wait()`` or a
        later take still does.
        """
        return self._take.error

    def wait(self) -> Outcome:
        """Wait until the snapshot is durable, and return it.

        If the take was called with ``on_error="warn"``, and the storage failed, this returns None,
        and :attr:`error` says why.

        Raises:
            CasnapError: The take failed; nothing was committed, unless it is an
                :class:`casnap.errors.UnclearCommitError`. Or this snapshot is durable, but an
                earlier take of the store failed, and no call has raised that yet: call again.
        """
        self._take.wait_for_end()
        # Only what a take with on_error="warn" returns may be None.
        outcome = None if self._take.tolerated else self._stored(self._take.wait())
        return cast("Outcome", outcome)
