"""Notes: small objects in ``tmp/`` by which a running process tells other processes something.

An object store has no locks that would show which processes are alive. So a process puts its note
again from time to time, each time under a new name, and deletes the note that it put before. A
single listing of ``tmp/`` shows all current notes, on any server. Notes of dead processes are
deleted later. If a note is lost, this costs work, never data.

A take announces itself by a note. The name of this note says on which root the take is based, and
when the note was put, by the clock of the writer's host. Such a note counts for an hour at most.
The name of any other note begins with the kind of the note; the note counts for a day.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from casnap.errors import PLACE_ERRORS, CasnapError

if TYPE_CHECKING:
    from casnap.backends.base import BackendCore

_log = logging.getLogger("casnap")
_NAME = re.compile("take-([0-9a-f]{12})-([0-9a-f]{10})-[0-9a-f]{12}")
NOTE = re.compile("[a-z]+-[0-9a-f]{12}-[0-9a-f]{12}")
"""The form of a note's name: its kind, the id of the process, and a number that grows."""
NOTE_LASTS = 86400.0
"""How many seconds a note is kept. Older notes are deleted with other garbage."""
# A take announces itself after _AFTER seconds, since that costs two requests; then again every
# _AGAIN seconds.
_AFTER, _AGAIN = 30.0, 600.0
# An announcement that is older, in seconds, is that of a dead process; or a clock is very wrong.
_LASTS = 3600.0


class Note:
    """A note of this process in ``tmp/``. Putting it again replaces it.

    Args:
        backend: The place where the note is put.
    """

    def __init__(self, backend: BackendCore) -> None:
        self._backend = backend
        self._pid = os.getpid()
        self._key: str | None = None

    def put(self, name: str, content: bytes) -> None:
        """Put the note under a new name, and delete the note that was put before.

        Args:
            name: The name, which no note may have had before.
            content: The content of the note.

        Raises:
            PlaceError: The note cannot be put. The earlier note is still there.
        """
        self._backend.write(f"tmp/{name}", content)
        before, self._key = self._key, f"tmp/{name}"
        self._delete(before)

    def withdraw(self) -> None:
        """Delete the note."""
        self._delete(self._key)
        self._key = None

    def _delete(self, key: str | None) -> None:
        # Not in a forked child: the note is its parent's.
        if key is not None and os.getpid() == self._pid:
            # Errors do not matter: a note that stays expires, and the store may be gone by now.
            with suppress(CasnapError):
                self._backend.delete(key)


class Announcement:
    """The note by which one take announces itself.

    Args:
        backend: The place where the note is put.
        base: The number of the root that the take is based on.
        at_once: Whether to put the note now. Otherwise it is put once the take has gone on for a
            while, since each note costs two requests.
    """

    def __init__(self, backend: BackendCore, base: int, *, at_once: bool) -> None:
        self._note = Note(backend)
        self._base = base
        self._due = time.monotonic() + _AFTER
        self._lock = threading.Lock()
        if at_once:
            self._put()

    def renew(self) -> None:
        """Put the note if it is due. Threads of the take call this from time to time."""
        if time.monotonic() >= self._due and self._lock.acquire(blocking=False):
            try:
                self._put()
            finally:
                self._lock.release()

    def _put(self) -> None:
        self._due = time.monotonic() + _AGAIN
        name = f"take-{self._base:012x}-{int(time.time()):010x}-{os.urandom(6).hex()}"
        try:
            self._note.put(name, b"a take is under way")
        except PLACE_ERRORS as e:
            # A collector may be faster than the take, which then starts again.
            _log.debug("the take is not announced: %s", e)

    def withdraw(self) -> None:
        """Delete the note, since the take has ended."""
        with self._lock:
            self._due = math.inf
            self._note.withdraw()


def bases_announced_at(backend: BackendCore, max_age: float) -> list[int]:
    """Return which roots the announced takes are based on; delete notes of dead processes.

    Args:
        backend: The place where the notes are.
        max_age: How old a note may be to count, in seconds.
    """
    bases, dead = list[int](), list[str]()
    for name in backend.names("tmp"):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        age = time.time() - int(match[2], 16)
        if abs(age) < min(max_age, _LASTS):
            bases.append(int(match[1], 16))
        elif age > _LASTS:
            dead.append(f"tmp/{name}")
    if dead:
        with suppress(*PLACE_ERRORS):
            backend.delete_all(dead)
    return bases
