"""Followers note in the store which version they serve, and a trainer waits for these notes.

A follower notes which version it has staged and which one it serves. It repeats the note as long as
it lives (``backends/announcement.py``). So a trainer can wait until engines serve its new weights.
The number of the root that published a version identifies the version.

The clocks of hosts need not be equal, so the waiting process watches the notes. If a note does not
change for three beats (90 seconds by default), its follower counts as dead. If the time in a note
looks old or lies in the future, the note counts only once it has changed
(``docs/decisions/0089-who-serves-what.md``).
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import msgspec
from msgspec import Struct

from casnap.backends.announcement import Note
from casnap.errors import (
    PLACE_ERRORS,
    BackendError,
    CasnapError,
    DamagedError,
    NotServedError,
    SnapshotNotFoundError,
    UnavailableError,
    UnsupportedFormatError,
)
from casnap.format.decoding import json_decoder
from casnap.format.records import CONFIG_KEY, Root
from casnap.runtime.backoff import Backoff
from casnap.runtime.fork import in_child, new_lock, new_rlock
from casnap.runtime.threads import mapped
from casnap.storage import Repository, Tags

if TYPE_CHECKING:
    import casnap

_log = logging.getLogger("casnap")
PHASES = ("published", "fetched", "staged", "paused", "applied")
"""The phases of a version at a follower, in their order."""
# The name of a note has the id of the follower, then a number: later notes have greater ones.
_NOTE = re.compile("follower-([0-9a-f]{12})-([0-9a-f]{12})")
# The seconds between two notes of a follower; and how many of these beats without a new note mean
# that the follower is dead.
_BEAT, _BEATS = 30.0, 3
_LEAST_BEAT, _MOST_BEAT = 0.01, 600.0
_MOST_NOTE_BYTES = 16 << 10
# How many times at most a look lists the notes, if followers replace some before it reads them.
_LISTS = 5
_MOST_CHARS = 200
# The seconds between two looks of a waiting process, at a store on this machine and at a remote
# one. A look is one request, and one more for each note that has changed.
_LOOKS = (0.1, 0.5)
# The seconds after which a waiting process looks again whether the version is still published.
_ROOT_LOOKS = 5.0
# How many seconds the end of a follower waits for its note to be deleted.
_GOODBYE = 5.0
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class FollowedVersion(Struct, frozen=True):
    """A version that a follower has staged, or serves.

    Attributes:
        number: The number of the root that published it by the tag, or else committed it.
        name: The full name of its snapshot.
        commit: The commit id of the snapshot.
        phases: Each known phase of the version → when it was reached, in seconds since the epoch.
            The phases are ``published``, by the clock of the host that published the version, and
            ``fetched``, ``staged``, ``paused`` and ``applied``, by the follower's clock.
    """

    number: int
    name: str
    commit: str
    phases: dict[str, float] = {}


class _NoteContent(Struct, frozen=True):
    """The content of a note. :class:`FollowerState` describes most fields.

    The note names the store: a follower of a deleted store may still write where a new store is
    now.
    """

    store_id: str
    host: str
    pid: int
    tag: str
    folder: str
    began_time: float
    noted_time: float
    beat_seconds: float
    staged: FollowedVersion | None = None
    serving: FollowedVersion | None = None


@dataclass(frozen=True)
class FollowerState:
    """The state of a follower, by its last note.

    Attributes:
        host: Its host.
        pid: Its process id.
        tag: The tag that it follows; empty for the newest snapshot.
        folder: The folder of the store that it follows; empty for all.
        began_time: When it began to follow, in seconds since the epoch, by the clock of its host.
        noted_time: When it wrote the note, by the same clock.
        staged: The last version that it has staged.
        serving: The version that it serves.
        is_silent: Whether it seems to be dead: it has not changed its note for three beats (90
            seconds by default).
        is_doubtful: Whether the time of its note looks old, or lies in the future. Either the
            follower is dead or its clock is wrong; only watching its notes tells which.
    """

    host: str
    pid: int
    tag: str
    folder: str
    began_time: float
    noted_time: float
    staged: FollowedVersion | None
    serving: FollowedVersion | None
    is_silent: bool = False
    is_doubtful: bool = False

    @property
    def label(self) -> str:
        """The follower's host and process, for messages."""
        return f"{self.host}:{self.pid}"

    def follows(self, tag: str, name: str) -> bool:
        """Whether this follower is to serve a snapshot.

        Args:
            tag: The tag that the snapshot has.
            name: Its full name.
        """
        below = name == self.folder or name.startswith(f"{self.folder}/")
        return self.tag == tag and (not self.folder or below)

    def serves(self, number: int) -> bool:
        """Whether this follower serves the version with this number, or a later one."""
        return self.serving is not None and self.serving.number >= number


# --- at the follower --------------------------------------------------------------------------


class Handshake:
    """The notes of one follower: which version it has staged, and which one it serves.

    A thread writes the notes, so each method returns at once, and none fails because of the store.
    ``paused`` causes no note of its own; the next note includes the pause. If this user may not
    write to the store, one warning says so and the thread ends. Any other failure is tried again.

    Args:
        store: The store.
        tag: The tag that is followed; None for the newest snapshot.
        folder: The folder of the store that is followed; empty for all.
    """

    def __init__(self, store: Repository, tag: str | None = None, folder: str = "") -> None:
        self._store = store
        self._followed = (tag or "", folder)
        self._began_time = time.time()
        # Reentrant: a signal handler may call close() in the thread that holds it.
        self._lock = new_rlock()
        self._versions: dict[int, FollowedVersion] = {}
        # For each phase that is noted at once: the last version that reached it.
        self._last: dict[str, FollowedVersion] = {}
        self._is_closed = False
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        """Begin with a new identity; a forked child does so too, as a follower of its own."""
        self._ident = os.urandom(6).hex()
        self._millis = 0
        # Wakes the thread. A signal handler may put into this kind of queue.
        self._wakes = SimpleQueue[None]()
        self._thread: threading.Thread | None = None

    def fetched(self, number: int, name: str, commit: str, published_time: float) -> None:
        """Note that this host has a version, verified. Other methods name it by its number.

        Args:
            number: The number of the root that published it.
            name: The full name of its snapshot.
            commit: The commit id of the snapshot.
            published_time: When it was published, in seconds since the epoch.
        """
        phases = {"published": published_time, "fetched": time.time()}
        with self._lock:
            kept = {number, *(version.number for version in self._last.values())}
            self._versions = {n: v for n, v in self._versions.items() if n in kept}
            self._versions.setdefault(number, FollowedVersion(number, name, commit, phases))

    def staged(self, number: int) -> None:
        """Note that a version can now be applied without another request to the store."""
        self._tell(number, "staged")

    def paused(self, number: int) -> None:
        """Note that the engine has paused for a version. The next note to the store includes it."""
        with self._lock:
            self._in_phase(number, "paused")

    def serving(self, number: int) -> None:
        """Note that the engine serves a version now."""
        self._tell(number, "applied")

    def _tell(self, number: int, phase: str) -> None:
        with self._lock:
            if phase in self._last and self._last[phase].number == number:
                return
            self._last[phase] = self._in_phase(number, phase)
        self._wake()

    def _in_phase(self, number: int, phase: str) -> FollowedVersion:
        version = self._versions.get(number) or FollowedVersion(number, "", "")
        # A pause may be given up and tried again: its last time counts.
        version = msgspec.structs.replace(version, phases={**version.phases, phase: time.time()})
        self._versions[number] = version
        return version

    def wake(self) -> None:
        """Start the thread again in a forked child, which serves the versions of its parent."""
        if self._last:
            self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_keep,
                    args=(ref(self), _Keeper(self._store), self._wakes),
                    name="casnap-handshake",
                    daemon=True,
                )
                # If no thread can start, nothing is noted, and following goes on.
                with suppress(RuntimeError):
                    self._thread.start()
        self._wakes.put(None)

    def close(self, patience: float | None = _GOODBYE) -> None:
        """Stop writing notes, and delete the last one.

        Args:
            patience: How many seconds to wait at most for the deletion; None: as long as it takes.
        """
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._wakes.put(None)
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(patience)

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._is_closed

    def content(self) -> tuple[str, bytes]:
        """Return the name and the content of the next note."""
        with self._lock:
            now = time.time()
            # A later note has a greater name, even if the clock was set back.
            self._millis = max(self._millis + 1, int(now * 1000))
            content = _NoteContent(
                self._store.config.store_id,
                socket.gethostname()[:_MOST_CHARS],
                os.getpid(),
                *self._followed,
                self._began_time,
                now,
                _BEAT,
                self._last.get("staged"),
                self._last.get("applied"),
            )
            name = f"follower-{self._ident}-{self._millis:012x}"
        return name, msgspec.json.encode(content)


class _Keeper:
    """Writes the notes of one follower to the store.

    Args:
        store: The store.
    """

    def __init__(self, store: Repository) -> None:
        self._store = store
        self._note = Note(store.backend)
        self._backoff = Backoff(f"noting in {store.backend.uri} which version is served here")

    @property
    def delay(self) -> float:
        """After how many seconds to write the note again."""
        return _BEAT if self._backoff.error is None else max(0.01, self._backoff.delay)

    def put(self, name: str, content: bytes) -> bool:
        """Write the note; return False if this user may not, so that no try will succeed."""
        store = self._store
        try:
            store.check_writable("note who follows it", dry_run=True)
            # A note must not bring back the folder of a store that was deleted.
            is_cheap = store.backend.costs.free_looks
            if is_cheap and store.backend.size_if_there(CONFIG_KEY) is None:
                raise UnavailableError(f"{store.backend.uri}: there is no store just now")
            self._note.put(name, content)
        except CasnapError as e:
            if _is_refused(e):
                _log.warning(
                    "%s is followed, but this user may not note there which version is served "
                    "here, so wait_served() and `casnap followers` do not know of it: %.1000s",
                    store.backend.uri,
                    e,
                )
                return False
            self._backoff.note_failure(e)
        except OSError as e:
            self._backoff.note_failure(e)
        else:
            self._backoff.note_success()
        return True

    def withdraw(self) -> None:
        """Delete the note."""
        self._note.withdraw()


def _is_refused(error: CasnapError) -> bool:
    """Whether an error will last until this user gets a right or another version of casnap."""
    if isinstance(error, UnavailableError):
        return error.reason == "denied"
    if isinstance(error, BackendError):
        cause = error.__cause__
        return isinstance(cause, OSError) and cause.errno in _REFUSED
    # Any other error may pass, such as that of a store that is moved back.
    return isinstance(error, UnsupportedFormatError)


def _keep(handshake_ref: ref[Handshake], keeper: _Keeper, wakes: SimpleQueue[None]) -> None:
    """Write the notes of a follower until the follower is closed or freed. The thread runs this.

    Args:
        handshake_ref: The follower's notes; the thread does not keep them alive.
        keeper: Writes the notes.
        wakes: Gets an item whenever there is news to note at once.
    """
    while True:
        while not wakes.empty():
            wakes.get()
        handshake = handshake_ref()
        if handshake is None or handshake.is_closed:
            keeper.withdraw()
            return
        name, content = handshake.content()
        del handshake
        if not keeper.put(name, content):
            return
        with suppress(Empty):
            wakes.get(timeout=keeper.delay)


# --- for who waits ----------------------------------------------------------------------------


class _Seen(NamedTuple):
    """A note that this process has seen.

    Attributes:
        name: Its name.
        content: Its content.
        since: When this process saw it first, by the monotonic clock.
        was_other: Whether this process has seen an earlier note of the same follower.
    """

    name: str
    content: _NoteContent
    since: float
    was_other: bool


class FollowerWatch:
    """The followers of a store, as far as this process has seen their notes.

    Each look is one request, and one more for each note that has changed.

    Args:
        store: The store.
    """

    def __init__(self, store: Repository) -> None:
        self._backend, self._store_id = store.backend, store.config.store_id
        self._seen: dict[str, _Seen] = {}
        # By follower, the name of its last note that does not count; followers whose unreadable
        # note was warned of; and the names of notes that could not be deleted.
        self._ignored: dict[str, str] = {}
        self._unreadable: set[str] = set()
        self._kept: set[str] = set()
        self._lock = new_lock()

    def look(self, *, forget: bool = False) -> list[FollowerState]:
        """Return the followers, sorted by host.

        Args:
            forget: Delete the notes of dead followers, as far as this user may.
        """
        with self._lock:
            # A live follower puts its new note before it deletes the old one, so the next list has
            # that note.
            for _ in range(_LISTS):
                if self._look():
                    break
            # One time for both, so a follower that counts as dead is one whose note is deleted.
            now = time.monotonic()
            if forget:
                self._forget(now)
            states = [_state(seen, now) for seen in self._seen.values()]
        return sorted(states, key=lambda state: (state.host, state.pid, state.began_time))

    def _look(self) -> bool:
        """Read the notes that are new; return False if one was gone before it was read."""
        newest: dict[str, str] = {}
        for name in self._backend.names("tmp"):
            match = _NOTE.fullmatch(name)
            if match is not None:
                newest[match[1]] = max(name, newest.get(match[1], ""))
        self._seen = {ident: seen for ident, seen in self._seen.items() if ident in newest}
        self._ignored = {i: name for i, name in self._ignored.items() if newest.get(i) == name}
        self._unreadable &= newest.keys()
        self._kept &= set(newest.values())
        new = [
            name
            for ident, name in newest.items()
            if ident not in self._ignored
            and (ident not in self._seen or self._seen[ident].name < name)
        ]
        at_once = max(1, self._backend.in_flight)
        gone = set[str]()

        def read(name: str) -> _NoteContent | None:
            try:
                return self._read(name)
            except FileNotFoundError:
                gone.add(name)
                return None

        for name, content in mapped(read, new, at_once):
            ident = name.split("-")[1]
            if content is not None:
                was_other = ident in self._seen
                self._seen[ident] = _Seen(name, content, time.monotonic(), was_other)
        return not gone

    def _read(self, name: str) -> _NoteContent | None:
        """Return the content of a note; None if the note does not count.

        That is so if it belongs to another store, or is malformed or unreadable. Such a note is not
        read again.

        Raises:
            FileNotFoundError: The note was replaced or deleted.
        """
        ident = name.split("-")[1]
        try:
            raw = self._backend.read(f"tmp/{name}", _MOST_NOTE_BYTES)
            content = json_decoder(_NoteContent).decode(raw)
            if content.store_id == self._store_id:
                return content
        except (DamagedError, ValueError, RecursionError):
            pass
        except CasnapError as e:
            if not _is_refused(e) and not isinstance(e, BackendError):
                raise
            if ident not in self._unreadable:
                self._unreadable.add(ident)
                _log.warning(
                    "a follower of %s is not known of, since its note cannot be read: %s",
                    self._backend.uri,
                    e,
                )
        self._ignored[ident] = name
        return None

    def _forget(self, now: float) -> None:
        silent = {i: seen.name for i, seen in self._seen.items() if _is_silent(seen, now)}
        for ident, name in silent.items():
            if name in self._kept:
                continue
            try:
                # If the follower lives after all, it puts another note.
                self._backend.delete(f"tmp/{name}")
                del self._seen[ident]
            except PLACE_ERRORS:
                self._kept.add(name)


def _lasts(content: _NoteContent) -> float:
    """Return after how many seconds without a new note the follower counts as dead."""
    beat = content.beat_seconds
    # NaN fails the comparison too, and counts as the least.
    return _BEATS * (min(beat, _MOST_BEAT) if beat >= _LEAST_BEAT else _LEAST_BEAT)


def _is_silent(seen: _Seen, now: float) -> bool:
    return now - seen.since > _lasts(seen.content)


def _state(seen: _Seen, now: float) -> FollowerState:
    content = seen.content
    fields: dict[str, Any] = msgspec.structs.asdict(content)
    del fields["beat_seconds"], fields["store_id"]
    age = abs(time.time() - content.noted_time)
    is_silent = _is_silent(seen, now)
    is_doubtful = not (is_silent or seen.was_other or age <= _lasts(content))
    return FollowerState(**fields, is_silent=is_silent, is_doubtful=is_doubtful)


def wait_served(
    store: Repository,
    watch: FollowerWatch,
    tag: str,
    number: int | None,
    quorum: int | None,
    timeout: float | None,
) -> list[FollowerState]:
    """Wait until followers serve a version, as :meth:`casnap.Store.wait_served` describes."""
    published = _published(store, tag, number)
    number = published.number if number is None else number
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        followers = watch.look(forget=True)
        # Look again: the version may be withdrawn while nobody serves it. And if a follower serves
        # a later one than this process has seen, the root that was looked at is old.
        is_old = time.monotonic() - published.since > _ROOT_LOOKS
        if is_old or any(f.serving and f.serving.number > published.root for f in followers):
            published = _published(store, tag, number)
        followers = [f for f in followers if f.follows(tag, published.name)]
        serving = [
            f
            for f in followers
            if f.serves(number)
            and not f.serves(published.root + 1)
            and not (f.is_silent or f.is_doubtful)
        ]
        lagging = [f for f in followers if f not in serving and not f.is_silent]
        if len(serving) >= (len(serving) + len(lagging) or 1 if quorum is None else quorum):
            return serving
        seconds_left = None if deadline is None else deadline - time.monotonic()
        if seconds_left is not None and seconds_left <= 0:
            raise NotServedError(
                f"{store.backend.uri}: after {timeout:g} s, "
                + _lag_text(tag, number, quorum, serving, followers),
                tuple(f.label for f in followers if f not in serving),
            )
        look = _LOOKS[not store.backend.costs.free_looks]
        time.sleep(look if seconds_left is None else min(look, seconds_left))


class _Published(NamedTuple):
    """The last publish of a tag, by one root.

    Attributes:
        name: The snapshot that the tag is published on.
        number: The number of the root that published it.
        root: The number of the root that was read.
        since: When that root was read, by the monotonic clock.
    """

    name: str
    number: int
    root: int
    since: float


def _published(store: Repository, tag: str, number: int | None) -> _Published:
    """Return the last publish of a tag, by the newest root.

    Args:
        store: The store.
        tag: The tag.
        number: The number of a publish that must have been made; None for any.

    Raises:
        SnapshotNotFoundError: The tag was never published, or not with this number; or the snapshot
            was deleted, or has lost the tag, so no follower will serve it.
    """
    since = time.monotonic()

    def look(root: Root) -> tuple[int, casnap.TagMove | None, str | None]:
        found = Tags.row_in(root, store.table(root), tag)
        return root.seq, Tags.move_in(root, tag), None if found is None else found[0]

    root, move, name = store.read_at_newest(look)
    if move is None or (number is not None and number > move.root):
        last = "it was never published" if move is None else f"its last number is {move.root}"
        raise SnapshotNotFoundError(
            f"{store.backend.uri}: the tag {tag!r} was not published"
            + ("" if number is None else f" with the number {number}")
            + f"; {last}"
        )
    if name is None:
        raise SnapshotNotFoundError(
            f"{store.backend.uri}: {move.name}, which the tag {tag!r} was published on with the "
            f"number {move.root}, was deleted, or has lost the tag, so no follower comes to it. "
            "Publish another snapshot, and wait for that"
        )
    return _Published(name, move.root, root, since)


def _lag_text(
    tag: str,
    number: int,
    quorum: int | None,
    serving: Sequence[FollowerState],
    followers: Sequence[FollowerState],
) -> str:
    wanted = f"{len(followers) or 'any'}" if quorum is None else f"the {quorum} that were asked for"
    text = f"version {number} of {tag!r} is served by {len(serving)} of {wanted}"
    others = [f for f in followers if f not in serving]
    if not others:
        return (
            f"{text}; no other follower of that tag has noted itself there: none runs, or they may "
            "not write there"
        )
    more = f", and {len(others) - 8} more" if len(others) > 8 else ""
    return f"{text}; " + "; ".join(map(_lag_of, others[:8])) + more


def _lag_of(follower: FollowerState) -> str:
    serves, staged = follower.serving, follower.staged
    text = f"{follower.label} serves " + (f"{serves.number} ({serves.name})" if serves else "none")
    if staged is not None and (serves is None or staged.number > serves.number):
        text += f" and has staged {staged.number}"
    if follower.is_silent:
        return f"{text}, and is silent: it seems to be dead"
    return f"{text}, but may be dead, or its clock wrong" if follower.is_doubtful else text
