"""A take in the background, as its caller sees it.

This module imports ``take/pending.py`` and lower layers; ``snapshot.py`` imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from casnap.errors import CasnapError
from casnap.runtime.lazy_imports import ModuleLater
from casnap.take.pending import PendingTake

if TYPE_CHECKING:
    import casnap
    from casnap.take import commit
else:
    casnap, commit = ModuleLater("casnap"), ModuleLater("casnap.take.commit")


class PendingSnapshot:
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
    def not_begun(cls, path: str, error: CasnapError) -> PendingSnapshot:
        """Return a pending snapshot whose take failed before its background part began.

        Args:
            path: The path that the snapshot would have.
            error: The error of the take.
        """

        def stored(_: commit.TakeResult) -> casnap.Snapshot:
            raise error

        return PendingSnapshot(path, PendingTake.not_begun(error), stored)

    @property
    def path(self) -> str:
        """The path that the snapshot will have."""
        return self._path

    def __repr__(self) -> str:
        return _shown(self)

    def done(self) -> bool:
        """Whether the take has ended, with success or with an error."""
        return self._take.done()

    @property
    def error(self) -> BaseException | None:
        """The error that the take has ended with; None while it is pending, and if it succeeded.

        Even if you have read it here, ``wait()`` or a later take raises it.
        """
        return self._take.error

    def wait(self) -> casnap.Snapshot:
        """Wait until the snapshot is durable, and return it.

        Raises:
            CasnapError: The take failed, and nothing was committed, unless the error is an
                :class:`casnap.errors.UnclearCommitError`. Or this snapshot is durable, but an
                earlier take of the store failed, and no call has raised its error yet: call
                ``wait()`` again.
        """
        return self._stored(self._take.wait())

    def _tried(self) -> casnap.Snapshot | None:
        """Wait for the end; return the snapshot, or None after an error that the run tolerates."""
        self._take.wait_for_end()
        return None if self._take.tolerated else self._stored(self._take.wait_for_result())


class PendingTry:
    """A snapshot that is being stored in the background, by :meth:`casnap.Store.try_async_take`."""

    def __init__(self, pending: PendingSnapshot) -> None:
        self._pending = pending

    @property
    def path(self) -> str:
        """The path that the snapshot will have."""
        return self._pending.path

    def __repr__(self) -> str:
        return _shown(self)

    def done(self) -> bool:
        """Whether the take has ended, with success or with an error."""
        return self._pending.done()

    @property
    def error(self) -> BaseException | None:
        """The error that the take has ended with; None while it is pending, and if it succeeded."""
        return self._pending.error

    def wait(self) -> casnap.Snapshot | None:
        """Wait for the end of the take; return the snapshot, or None if the storage failed.

        If it failed, :attr:`error` says why.

        Raises:
            CasnapError: The take failed for a reason other than the storage.
        """
        return self._pending._tried()


def _shown(pending: PendingSnapshot | PendingTry) -> str:
    state = "stored" if pending.done() else "pending"
    if (error := pending.error) is not None:
        state = f"failed: {type(error).__name__}"
    return f"<{type(pending).__name__} {pending.path!r}: {state}>"
