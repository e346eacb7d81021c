"""Following a store: each new version is pulled, and a callback is called for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from casnap.errors import CasnapError, NotAStoreError, SnapshotNotFoundError, UnavailableError
from casnap.runtime.progress import Progress
from casnap.serving.folder import ServedFolder
from casnap.serving.options import FollowEvent, PullOptions, PullReport
from casnap.serving.pull import Source, update
from casnap.transfer.follow import Backoff

OnVersion = Callable[[Path, list[str]], object]
"""Called with the folder of a version, and the tensors that are new since the last call."""


class Following:
    """Keeps a folder at the newest version.

    Args:
        open_source: Opens the store.
        out: The folder.
        options: Which snapshots, and how.
        interval: How often to look, in seconds.
        on_version: Called after each switch, until it raises nothing.
        progress: As for a pull.
    """

    def __init__(
        self,
        open_source: Callable[[], Source],
        out: Path,
        options: PullOptions,
        interval: float,
        on_version: OnVersion | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._open_source = open_source
        self._served = ServedFolder(out)
        self._options = options
        self._interval = interval
        self._on_version = on_version
        self._progress = progress
        self._source: Source | None = None
        self._seen_root = b""
        self._report: PullReport | None = None
        self._pulls = Backoff(f"the pull into {self._served.link}")
        self._calls = Backoff(f"the callback for {self._served.link}")

    def events(self) -> Iterator[FollowEvent]:
        """Follow, and yield what happens; for ever.

        Raises:
            CasnapError: It cannot begin; or another process follows into this folder.
        """
        with self._served.locked():
            while True:
                if not self._pulls.delay:
                    yield from self._look()
                if self._on_version is not None and not self._calls.delay:
                    yield from self._call(self._on_version)
                pauses = [b.delay for b in (self._pulls, self._calls) if b.error is not None]
                time.sleep(max(0.0, min([self._interval, *pauses])))

    def _look(self) -> Iterator[FollowEvent]:
        began = self._report is not None
        try:
            if self._source is None:
                self._source = self._open_source()
            root = self._source.store.newest().commit
            current = self._served.current()
            if root != self._seen_root or current is None or not current.is_whole():
                report = update(self._served, self._source, self._options, self._progress)
                self._report, self._seen_root = report, root
                if report.switched or not began:
                    self._calls.hurry()
                    yield FollowEvent("switched", report)
        except SnapshotNotFoundError as e:
            # There is nothing yet, or it was deleted meanwhile.
            yield from self._failed(e)
        except (CasnapError, OSError) as e:
            # At the beginning, only what may pass is tried again: it may be a wrong argument.
            passes = isinstance(e, UnavailableError) or not isinstance(e, CasnapError)
            if not (began or passes) or isinstance(e, NotAStoreError):
                raise
            yield from self._failed(e)
        else:
            self._pulls.note_success()

    def _failed(self, error: Exception) -> Iterator[FollowEvent]:
        self._pulls.note_failure(error)
        yield FollowEvent("failed", self._report, str(error))

    def _call(self, on_version: OnVersion) -> Iterator[FollowEvent]:
        """Call the callback, unless it was called for the current version."""
        version = self._served.current()
        if version is None:
            return
        last = self._served.called()
        if last is not None and (last.commit, last.mapping) == (
            version.record.commit,
            version.record.mapping,
        ):
            return
        try:
            on_version(version.folder.resolve(), version.record.changed_since(last))
        except Exception as e:  # noqa: BLE001 - whatever it is, the callback is tried again
            self._calls.note_failure(e)
            yield FollowEvent("call_failed", self._report, f"{type(e).__name__}: {e}")
        else:
            self._served.note_called(version)
            self._calls.note_success()
            yield FollowEvent("called", self._report)
