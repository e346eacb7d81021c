"""Two processes on two hosts try one place at once, and find out more than each could alone.

They meet at the place itself. Each process is one *half*, and has a folder of keys, ``half-`` and
its id. After each step it puts a key there. It learns of the other half's steps by listing the
other's folder. Some clients cache a listing, others cache that a name is absent. So a half that has
listed for a while also looks at the key itself. No step relies on a clock.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from casnap.backends.local_files import lock
from casnap.diagnosis.report import CLOCK, DoctorRow, time_text
from casnap.diagnosis.site import Site
from casnap.format.digest import digest_of
from casnap.runtime.descriptors import opened

HALF = "half-"
"""The prefix of the keys of a half, before its id."""
# How many seconds all steps may take; and how many to wait until cached facts are renewed.
_TALK, _WATCH = 35.0, 12.0
# For how many seconds a half that waits for a step looks at listings alone.
_LISTED = 1.0
# The seconds between two looks at first: on a disk, and by requests. Later the pause is the time
# since the first look, divided by the share.
_LOOK, _ASK, _SHARE = 0.01, 0.25, 20
# How many seconds are left for the probes of speed.
_SPEED = 8.0
_PINGS = 3
# The halves race for this many names, for at most this many seconds.
_RACES, _RACING = 64, 3.0
# A lag of this many seconds or more makes the verdict "fair".
_LATE = 0.5
_DATA_BYTES = 1 << 20
_HARMLESS = "harmless: until then a reader sees the store as it was, and a writer tries again"


class _SilentError(Exception):
    """The other half does not answer any more."""


class Meeting:
    """This process's half of the trial: it waits for the other half, then does all steps with it.

    Args:
        site: The site at which this process works.

    Attributes:
        other_host: The host of the other half; None if no other half has come.
    """

    def __init__(self, site: Site) -> None:
        self.other_host: str | None = None
        self.mine = f"{HALF}{site.me}"
        self._other = ""
        self._site = site
        self._backend = site.backend
        self._is_remote = site.backend.folder is None
        self._pause = _ASK if self._is_remote else _LOOK
        self._until = self._end = 0.0

    def announce(self, patience: float) -> None:
        """Put a key by which the other half finds this one.

        Args:
            patience: How many seconds to wait for the other half.
        """
        self._until = time.monotonic() + patience
        self._end = min(self._until + _TALK, self._site.end - _SPEED)
        self._put("hello", socket.gethostname())

    def rows(self) -> Iterator[DoctorRow]:
        """Meet the other half, and yield the rows of the steps that both do together."""
        if not self._is_met():
            yield DoctorRow(
                "other hosts",
                "no other half came, so nothing was tried between hosts",
                "unknown",
                "run `casnap doctor` with this place on two hosts at once",
            )
            return
        try:
            self.other_host = str(json.loads(self._wait("hello")))
            yield DoctorRow("other half", f"runs on {self.other_host}")
            yield self._races()
            yield from self._seen_changes()
            try:
                yield self._lag()
            except _SilentError:
                yield DoctorRow(
                    "names of others", "were not seen in the time that was left", "fair", _HARMLESS
                )
                return
            self._put("done")
            self._wait("done")
        except _SilentError as e:
            yield DoctorRow(
                "other half",
                f"did not go on: its step {str(e)!r} was not seen",
                "unknown",
                "run both once more; if it happens again, hosts see late what others did",
            )

    # --- how they talk ---

    def _is_met(self) -> bool:
        """Look for another half; return whether this host and the other one see each other.

        Return False if no other half has come in time.
        """
        met: set[str] = set()
        started = time.monotonic()
        while True:
            for name in self._backend.names(""):
                if not name.startswith(HALF) or name == self.mine:
                    continue
                if name not in met:
                    # The other half may still be busy with its first probes, so wait longer.
                    self._until = self._end
                    met.add(name)
                    self._put(f"meets-{name}")
                if f"meets-{self.mine}" in self._backend.names(name):
                    self._other = name
                    return True
            if time.monotonic() > self._until:
                return False
            self._rest(started)

    def _rest(self, started: float) -> None:
        """Pause before looking again. The pause grows with the time since ``started``."""
        lasted = time.monotonic() - started
        time.sleep(min(max(self._pause, lasted / _SHARE), _ASK))

    def _put(self, step: str, content: Any = None) -> None:
        self._backend.write(f"{self.mine}/{step}", json.dumps(content).encode())

    def _wait(self, step: str) -> bytes:
        """Wait until the other half has done a step; return the content of its key."""
        key, pause = f"{self._other}/{step}", self._pause
        started = time.monotonic()
        look = started + _LISTED
        while True:
            now = time.monotonic()
            if step in self._backend.names(self._other) or now > look:
                with suppress(FileNotFoundError):
                    return self._backend.read(key)
                # Looks become rarer: after each one the client may cache that the key is absent.
                look, pause = now + 2 * pause, min(2 * pause, 4.0)
            if now > self._end:
                raise _SilentError(step)
            self._rest(started)

    def _both(self, step: str, content: Any = None) -> Any:
        """Say that this half has done a step, and wait for the other; return the other's content.

        Args:
            step: The name of the step.
            content: What to tell the other half.
        """
        self._put(step, content)
        return json.loads(self._wait(step))

    # --- what they find out ---

    def _seen_changes(self) -> Iterator[DoctorRow]:
        """Find out how late each half sees the other one's changes to files that it has looked at.

        Both halves call this at the same time. It yields the rows about what this half sees.
        """
        mine, other = self.mine, self._other
        with ExitStack() as held:
            data = os.urandom(_DATA_BYTES)
            self._backend.write(f"{mine}/data", data)
            self._backend.write(f"{mine}/goes", b"1")
            if not self._is_remote:
                held.enter_context(self._locked(f"{mine}/locked"))
                self._path(f"{mine}/grows").write_bytes(b"1")
            digest = self._both("made", digest_of(data).hex())
            content = self._backend.read(f"{other}/data")
            yield _row_if(
                digest_of(content).hex() == digest,
                DoctorRow("data of others", "are whole once their name is seen"),
                DoctorRow(
                    "data of others",
                    "were not whole when their name was seen",
                    "bad",
                    "a host would read a damaged store: have it elsewhere",
                ),
            )
            # The client caches these sizes, and that "comes" is absent.
            sizes = {name: self._size(f"{other}/{name}") for name in ("goes", "grows", "comes")}
            if not self._is_remote:
                yield self._lock_row(f"{other}/locked")
            self._both("looked")
        self._backend.delete(f"{mine}/goes")
        self._backend.write(f"{mine}/comes", b"1")
        if not self._is_remote:
            with self._path(f"{mine}/grows").open("ab") as file:
                file.write(b"2")
        self._both("changed")
        yield from self._watched(sizes)

    def _watched(self, before: dict[str, int | None]) -> Iterator[DoctorRow]:
        """Wait until this host sees all changes of the other half's files; yield a row for each.

        A row says how many seconds passed until this host saw the change.

        Args:
            before: Key of each file → its size before the change.
        """
        texts = {
            "grows": "attributes",
            "goes": "deleted names",
            "comes": "absent names",
            "list": "listings",
        }
        if self._is_remote:
            del texts["grows"]
        started = time.monotonic()
        late: dict[str, float] = {}
        end = min(started + _WATCH, self._end)
        while len(late) < len(texts) and time.monotonic() < end:
            for name in texts.keys() - late.keys():
                if name == "list":
                    is_seen = "comes" in self._backend.names(self._other)
                else:
                    is_seen = self._size(f"{self._other}/{name}") != before[name]
                if is_seen:
                    late[name] = time.monotonic() - started
            self._rest(started)
        watched = time.monotonic() - started
        for name, text in texts.items():
            seconds = late.get(name, watched)
            found = time_text(seconds) if name in late else f"more than {seconds:.0f} s"
            is_late = seconds >= _LATE
            yield DoctorRow(
                text,
                f"of others are cached for {found}" if is_late else "of others are not cached",
                "fair" if is_late else "good",
                "harmless: casnap looks again; options of the mount can shorten it" * is_late,
            )

    def _lag(self) -> DoctorRow:
        """Measure how late a host sees the new names of the other one.

        One half puts a name; the other one puts another name as soon as it sees the first. Then the
        halves change places.
        """
        lags: list[float] = []
        ahead = 0.0
        for leader in sorted((self.mine, self._other)):
            for number in range(_PINGS):
                ping, pong = f"ping-{leader}-{number}", f"pong-{leader}-{number}"
                if leader != self.mine:
                    self._wait(ping)
                    self._put(pong, time.time())
                    continue
                started, at = time.monotonic(), time.time()
                self._put(ping)
                told = json.loads(self._wait(pong))
                lags.append((time.monotonic() - started) / 2)
                ahead = told - (at + lags[-1])
        median, most = statistics.median(lags), max(lags)
        found = f"are seen after {time_text(median)}, at most {time_text(most)}"
        if abs(ahead) > CLOCK + most:
            return DoctorRow(
                "names of others",
                f"{found}; the clock of {self.other_host} is {abs(ahead):.0f} s "
                f"{'ahead' if ahead > 0 else 'behind'}",
                "fair",
                "set the clocks: a collector tells by them how old a file is",
            )
        if most < _LATE:
            return DoctorRow("names of others", found)
        return DoctorRow(
            "names of others",
            found,
            "fair",
            _HARMLESS,
        )

    def _races(self) -> DoctorRow:
        """Put the same keys at the same time as the other half: one half may win each key."""
        folder = min(self.mine, self._other)
        self._both("starts")
        started = time.monotonic()
        won: list[bool] = []
        while len(won) < _RACES and time.monotonic() - started < _RACING:
            key = f"{folder}/race-{len(won)}"
            won.append(self._backend.put_if_absent(key, self.mine.encode()))
        theirs = self._both("raced", won)
        both = list(zip(won, theirs, strict=False))
        return _row_if(
            all(mine != their for mine, their in both),
            DoctorRow("between hosts", f"of {len(both)} names raced for, each was made once"),
            DoctorRow(
                "between hosts",
                f"of {len(both)} names raced for, {sum(a == b for a, b in both)} were made by "
                "both or by neither",
                "bad",
                "of two writers at once one can overwrite the other's commit: have the store "
                "elsewhere",
            ),
        )

    def _lock_row(self, key: str) -> DoctorRow:
        with opened(self._path(key), os.O_RDWR | os.O_CLOEXEC) as fd:
            is_seen = lock(fd) is False
        return _row_if(
            is_seen,
            DoctorRow("locks of others", "are seen"),
            DoctorRow(
                "locks of others",
                "are not seen",
                "fair",
                "a collector waits up to a day for a take that was killed; nothing is lost",
            ),
        )

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        with opened(self._path(key), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600) as fd:
            lock(fd)
            yield

    def _path(self, key: str) -> Path:
        return Path(self._backend.where(key))

    def _size(self, key: str) -> int | None:
        """Return the size of an object; None if this host does not see it now. Do not wait."""
        if self._is_remote:
            return self._backend.size_if_there(key)
        try:
            return self._path(key).stat().st_size
        except OSError:
            return None


def _row_if(is_good: bool, good: DoctorRow, other: DoctorRow) -> DoctorRow:
    return good if is_good else other
