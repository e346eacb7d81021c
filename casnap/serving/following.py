"""Follow a store: pull each new version, and call a callback for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from casnap.errors import CasnapError, DamagedError, SnapshotNotFoundError, UnavailableError
from casnap.runtime.backoff import Backoff
from casnap.runtime.progress import Progress
from casnap.serving.callback import call_plain, check_plain
from casnap.serving.handshake import Handshake
from casnap.serving.options import FollowEvent, PullOptions, PullReport
from casnap.serving.pull import Source, folder_for, update
from casnap.serving.version import Version, verify

_log = logging.getLogger("casnap")
OnVersion = Callable[[Path, list[str]], object]
"""Called with the folder of a version, and the names of tensors that changed since the last call.

If a call fails, the next one names its tensors again: the failed call may have loaded them or not.
"""


class Following:
    """Keeps a folder at the newest version.

    Args:
        open_source: Opens the store.
        out: The folder.
        options: Which snapshots are pulled, and how.
        interval: The seconds between two looks.
        on_version: Called after each switch, and again until it succeeds.
        progress: Called with the phase of a pull, the bytes done, and the total.
        notes: Whether to note in the store which version is served here.
    """

    def __init__(
        self,
        open_source: Callable[[], Source],
        out: Path,
        options: PullOptions,
        interval: float,
        on_version: OnVersion | None = None,
        progress: Progress | None = None,
        *,
        notes: bool = True,
    ) -> None:
        check_plain(on_version)
        self._open_source = open_source
        self._served = folder_for(out, options)
        self._options = options
        self._interval = interval
        self._on_version = on_version
        self._progress = progress
        self._source: Source | None = None
        self._seen_root = b""
        self._report: PullReport | None = None
        self._notes = notes
        self._handshake: Handshake | None = None
        # Whether the last root that was seen had no snapshot to pull; and whether the callback was
        # called for the current version.
        self._is_waiting = self._is_called = False
        self._pulls = Backoff(f"the pull into {self._served.link}")
        self._calls = Backoff(f"the callback for {self._served.link}")

    def events(self) -> Iterator[FollowEvent]:
        """Follow for ever, and yield an event for each pull and call that succeeds or fails.

        Raises:
            CasnapError: Following cannot begin, or another process follows into this folder.
        """
        with self._served.locked(), ExitStack() as at_end:
            at_end.callback(self._close)
            while True:
                if not self._pulls.delay:
                    yield from self._look()
                if self._on_version and not (self._is_called or self._calls.delay):
                    yield from self._call(self._on_version)
                pauses = [b.delay for b in (self._pulls, self._calls) if b.error is not None]
                time.sleep(max(0.0, min([self._interval, *pauses])))

    def _close(self) -> None:
        if self._handshake is not None:
            self._handshake.close()

    def _note_staged(self, source: Source, report: PullReport) -> None:
        """Note in the store that the version of a pull is in the folder."""
        if self._handshake is None and self._notes:
            self._handshake = Handshake(source.store, self._options.tag, source.name)
        if self._handshake is not None:
            about = (report.snapshot, report.commit, report.published_time)
            self._handshake.fetched(report.number, *about)
            self._handshake.staged(report.number)
            if self._on_version is None:
                self._note_serving()

    def _note_serving(self) -> None:
        if self._handshake is not None and self._report is not None:
            self._handshake.serving(self._report.number)

    def _look(self) -> Iterator[FollowEvent]:
        began = self._report is not None or self._is_waiting
        try:
            # This locks the folder again if DIR.versions was removed.
            self._served.hold()
            if self._source is None:
                self._source = self._open_source()
            root = self._source.store.newest().commit
            if root == self._seen_root and (self._is_waiting or self._served.is_whole()):
                return
            self._seen_root, self._is_waiting = root, False
            # Set before the switch: if a later step fails, the callback is called for the version.
            self._is_called = False
            last = self._report
            report = update(self._served, self._source, self._options, self._progress)
            if self._on_version is None:
                self._served.clean_up(self._options.keep)
            self._report = report
            self._note_staged(self._source, report)
            before = None if last is None else (last.folder, last.commit)
            if report.switched or before != (report.folder, report.commit):
                self._calls.hurry()
                yield FollowEvent("switched", report)
        except SnapshotNotFoundError as e:
            # No snapshot exists yet, or it was deleted meanwhile. The next look needs another root.
            self._is_waiting = True
            _log.warning("nothing is pulled into %s yet: %s", self._served.link, e)
            yield FollowEvent("failed", self._report, str(e))
        except (CasnapError, OSError) as e:
            self._seen_root = b""
            # The first pull retries only errors that may pass: others may come from an argument.
            passes = isinstance(e, UnavailableError) or not isinstance(e, CasnapError)
            if not (began or passes):
                raise
            self._pulls.note_failure(e)
            yield FollowEvent("failed", self._report, str(e))
        else:
            self._pulls.note_success()

    def _call(self, on_version: OnVersion) -> Iterator[FollowEvent]:
        """Call the callback, unless this version was passed to it before; then delete old versions.

        Versions are deleted after the call, so that an engine does not wait for the deletion.
        Deleting takes long if a version lies in memory.
        """
        event = self._event_of_call(on_version)
        self._served.clean_up(self._options.keep, is_announced=True)
        if event is not None:
            yield event

    def _is_pulled(self, version: Version) -> bool:
        """Whether a version is from the last pull. A later pull in place may have failed."""
        return self._report is None or version.record.commit == self._report.commit

    def _event_of_call(self, on_version: OnVersion) -> FollowEvent | None:
        try:
            version, last = self._served.current(), self._served.called()
            if version is None or not self._is_pulled(version):
                return None
            self._is_called = version.record == last
            if self._is_called:
                self._note_serving()
                return None
            changed = version.record.changed_since(last)
            self._served.note_calling(version)
            try:
                call_plain(on_version, version.folder.resolve(), changed)
            except DamagedError:
                # This marks the damaged files, so that the next look writes them again.
                verify(version.folder)
                raise
        except Exception as e:  # noqa: BLE001 - whatever it is, it is tried again
            self._calls.note_failure(e)
            return FollowEvent("call_failed", self._report, f"{type(e).__name__}: {e}")
        self._is_called = True
        self._note_serving()
        self._calls.note_success()
        try:
            self._served.note_called(version)
        except (CasnapError, OSError) as e:
            _log.warning(
                "the callback for %s is called again after a restart: %s", version.folder, e
            )
        return FollowEvent("called", self._report)
