"""Who serves which version: notes of followers in the store, and waiting for what they say.

A follower notes in the store which version it has staged and which one it serves, and puts its note
anew as long as it lives (``backends/announcement.py``). So a trainer can wait until its new weights
serve. Versions are told apart by the number of the root that published them.

Nothing rests on the clocks of hosts being equal. Who waits sees for itself whether a note changes:
one that has not for three beats is of a dead follower. A time in a note can only cast doubt: one
that looks old, or of the future, counts from its first change on (decision 89).
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
from casnap.extending import Backoff, in_child, mapped, new_lock, new_rlock
from casnap.format.decoding import json_decoder
from casnap.format.records import CONFIG_KEY, Root
from casnap.storage import Repository, Tags

if TYPE_CHECKING:
    import casnap

_log = logging.getLogger("casnap")
PHASES = ("published", "fetched", "staged", "paused", "applied")
"""The phases of a version at a follower, in their order."""
# The names of notes: which follower, and its note: the later, the greater.
_NOTE = re.compile("follower-([0-9a-f]{12})-([0-9a-f]{12})")
# A note is put anew so often, in seconds. After so many times that it is of a dead follower.
_BEAT, _BEATS = 30.0, 3
_LEAST_BEAT, _MOST_BEAT = 0.01, 600.0
_MOST_NOTE_BYTES = 16 << 10
# So often notes are listed in a look at most, while some are replaced before they are read.
_LISTS = 5
_MOST_CHARS = 200
# How often who waits looks, on this machine and at a remote store; each look is one request, and
# one more for each note that has changed.
_LOOKS = (0.1, 0.5)
# How often who waits looks whether the version is still there, in seconds.
_ROOT_LOOKS = 5.0
# How long the end of a follower waits for its note to be deleted, in seconds.
_GOODBYE = 5.0
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class FollowedVersion(Struct, frozen=True):
    """A version that a follower has staged, or serves.

    Attributes:
        number: The number of the root that published it by the tag, or else committed it.
        name: The full name of its snapshot.
        commit: The commit id of that.
        phases: When it came to each of ``published``, ``fetched``, ``staged``, ``paused`` and
            ``applied``, as far as that is known, in seconds since the epoch: the first by the clock
            of who published it, the others by that of the follower's host.
    """

    number: int
    name: str
    commit: str
    phases: dict[str, float] = {}


class _NoteContent(Struct, frozen=True):
    """What a note says; see :class:`FollowerState`.

    The store is named too: what follows one that was deleted may still write to its place.
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
    """What a follower has last said of itself.

    Attributes:
        host: Its host.
        pid: Its process.
        tag: The tag that it follows; empty for the newest snapshot.
        folder: The folder of the store that it follows; empty for all.
        began_time: When it began to follow, in seconds since the epoch, by the clock of its host.
        noted_time: When it said this, by that clock.
        staged: The last version that it has staged.
        serving: The version that it serves.
        is_silent: Whether it seems to be dead: it has not changed its note for three beats.
        is_doubtful: Whether its note looks old, or of the future, so that it may be dead, or its
            clock wrong: which of both shows only while it is watched.
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
        """Its host and process, for messages."""
        return f"{self.host}:{self.pid}"

    def follows(self, tag: str, name: str) -> bool:
        """Whether it is to serve a snapshot that a tag is published on."""
        below = name == self.folder or name.startswith(f"{self.folder}/")
        return self.tag == tag and (not self.folder or below)

    def serves(self, number: int) -> bool:
        """Whether it serves a version, or a later one."""
        return self.serving is not None and self.serving.number >= number


# --- at the follower --------------------------------------------------------------------------


class Handshake:
    """What a follower says of itself: which version it has staged, and which one it serves.

    Each of its methods returns at once, and none fails or waits because of the store: a thread puts
    the note. ``paused`` puts none at all. Where this user may not write, that is said once, and
    nothing is noted any more; any other failure is tried again.

    Args:
        store: The store.
        tag: The tag that is followed; None for the newest snapshot.
        folder: The folder of the store that is followed; empty for all.
    """

    def __init__(self, store: Repository, tag: str | None = None, folder: str = "") -> None:
        self._store = store
        self._followed = (tag or "", folder)
        self._began_time = time.time()
        # It can be taken again by a signal handler of the thread that has it, which ends this.
        self._lock = new_rlock()
        self._versions: dict[int, FollowedVersion] = {}
        # By phase, of the phases that are told at once: the last version that came to it.
        self._last: dict[str, FollowedVersion] = {}
        self._is_closed = False
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        """Begin as a follower of this process: a forked child is another one."""
        self._ident = os.urandom(6).hex()
        self._millis = 0
        # What wakes the thread; also in a signal handler.
        self._wakes = SimpleQueue[None]()
        self._thread: threading.Thread | None = None

    def fetched(self, number: int, name: str, commit: str, published_time: float) -> None:
        """Note that a version is on this host, verified; the other methods name it by its number.

        Args:
            number: The number of the root that published it.
            name: The full name of its snapshot.
            commit: The commit id of that.
            published_time: When it was published.
        """
        phases = {"published": published_time, "fetched": time.time()}
        with self._lock:
            kept = {number, *(version.number for version in self._last.values())}
            self._versions = {n: v for n, v in self._versions.items() if n in kept}
            self._versions.setdefault(number, FollowedVersion(number, name, commit, phases))

    def staged(self, number: int) -> None:
        """Note that a version is ready to be applied, without a request to the store."""
        self._tell(number, "staged")

    def paused(self, number: int) -> None:
        """Note that the engine has paused for a version. It is told with what comes next."""
        with self._lock:
            self._in_phase(number, "paused")

    def serving(self, number: int) -> None:
        """Note that a version serves now."""
        self._tell(number, "applied")

    def _tell(self, number: int, phase: str) -> None:
        with self._lock:
            if phase in self._last and self._last[phase].number == number:
                return
            self._last[phase] = self._in_phase(number, phase)
        self._wake()

    def _in_phase(self, number: int, phase: str) -> FollowedVersion:
        version = self._versions.get(number) or FollowedVersion(number, "", "")
        # Of a pause that was given up and tried again, the last time counts.
        version = msgspec.structs.replace(version, phases={**version.phases, phase: time.time()})
        self._versions[number] = version
        return version

    def wake(self) -> None:
        """Go on in a forked child, where what the parent served is served too."""
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
                # Without a thread nothing is noted; following goes on.
                with suppress(RuntimeError):
                    self._thread.start()
        self._wakes.put(None)

    def close(self, patience: float | None = _GOODBYE) -> None:
        """Say no more, and delete the note.

        Args:
            patience: For how many seconds to wait for that at most; None for as long as it takes.
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
            # The later note has the greater name, whatever the clock does.
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
    """Puts the notes of one follower.

    Args:
        store: The store.
    """

    def __init__(self, store: Repository) -> None:
        self._store = store
        self._note = Note(store.backend)
        self._backoff = Backoff(f"noting in {store.backend.uri} which version is served here")

    @property
    def delay(self) -> float:
        """In how many seconds to put the note again."""
        return _BEAT if self._backoff.error is None else max(0.01, self._backoff.delay)

    def put(self, name: str, content: bytes) -> bool:
        """Put the note; return whether to go on."""
        store = self._store
        try:
            store.check_writable("note who follows it", dry_run=True)
            # Of a store that was deleted, no folder is to come back by this.
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
    """Whether the next try fails as well, until this user gets a right, or another casnap."""
    if isinstance(error, UnavailableError):
        return error.reason == "denied"
    if isinstance(error, BackendError):
        cause = error.__cause__
        return isinstance(cause, OSError) and cause.errno in _REFUSED
    # Anything else may pass, such as a store that is put back.
    return isinstance(error, UnsupportedFormatError)


def _keep(handshake_ref: ref[Handshake], keeper: _Keeper, wakes: SimpleQueue[None]) -> None:
    """Put the note of a follower, as long as there is one."""
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
    """A note that was seen.

    Attributes:
        name: Its name.
        content: What it says.
        since: When it was first seen, by the monotonic clock.
        was_other: Whether another note of this follower was seen before.
    """

    name: str
    content: _NoteContent
    since: float
    was_other: bool


class FollowerWatch:
    """What a process has seen of the followers of a store.

    Each look is one request, and one more for each note that has changed.

    Args:
        store: The store.
    """

    def __init__(self, store: Repository) -> None:
        self._backend, self._store_id = store.backend, store.config.store_id
        self._seen: dict[str, _Seen] = {}
        # By follower, its last note that does not count; and notes that could not be deleted.
        self._ignored: dict[str, str] = {}
        self._unreadable: set[str] = set()
        self._kept: set[str] = set()
        self._lock = new_lock()

    def look(self, *, forget: bool = False) -> list[FollowerState]:
        """Return the followers, by their hosts.

        Args:
            forget: Delete the notes of those that are dead, as far as this user may.
        """
        with self._lock:
            # Who lives puts a new note before the old one goes, so another list has it.
            for _ in range(_LISTS):
                if self._look():
                    break
            if forget:
                self._forget()
            states = [_state(seen) for seen in self._seen.values()]
        return sorted(states, key=lambda state: (state.host, state.pid, state.began_time))

    def _look(self) -> bool:
        """Look at all notes; return whether each was still there."""
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
        """Return what a note says; None if it does not count, and is not read again.

        It is of another store, makes no sense, or cannot be read.

        Raises:
            FileNotFoundError: It was replaced, or deleted.
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

    def _forget(self) -> None:
        silent = {i: seen.name for i, seen in self._seen.items() if _is_silent(seen)}
        for ident, name in silent.items():
            if name in self._kept:
                continue
            try:
                # If it lives after all, it puts another one.
                self._backend.delete(f"tmp/{name}")
                del self._seen[ident]
            except PLACE_ERRORS:
                self._kept.add(name)


def _lasts(content: _NoteContent) -> float:
    """Return after how many seconds without another note a follower counts as dead."""
    beat = content.beat_seconds
    # Also not a number is none.
    return _BEATS * (min(beat, _MOST_BEAT) if beat >= _LEAST_BEAT else _LEAST_BEAT)


def _is_silent(seen: _Seen) -> bool:
    return time.monotonic() - seen.since > _lasts(seen.content)


def _state(seen: _Seen) -> FollowerState:
    content = seen.content
    fields: dict[str, Any] = msgspec.structs.asdict(content)
    del fields["beat_seconds"], fields["store_id"]
    age = abs(time.time() - content.noted_time)
    is_silent = _is_silent(seen)
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
    """Wait until followers serve a version. :meth:`casnap.Store.wait_served` describes the rest."""
    published = _published(store, tag, number)
    number = published.number if number is None else number
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        followers = watch.look(forget=True)
        # It may be withdrawn while nobody serves it. And no follower serves what is not there yet.
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
    """What a root says of a tag.

    Attributes:
        name: The snapshot that the tag is published on.
        number: The number of that.
        root: The number of the root.
        since: When it was looked at, by the monotonic clock.
    """

    name: str
    number: int
    root: int
    since: float


def _published(store: Repository, tag: str, number: int | None) -> _Published:
    """Return what is published by a tag.

    Raises:
        SnapshotNotFoundError: It was never published, or not with this number; or the snapshot was
            deleted, or has lost the tag, so that no follower comes to it any more.
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
