"""Tests whether a place honours put-if-absent, which keeps writers apart, by racing puts.

Some servers say that they know ``If-None-Match``, and ignore it. Then two writers at once put the
same root, the second over the first, and a committed snapshot is lost.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

from casnap.backends.base import Backend, as_exclusive
from casnap.errors import PLACE_ERRORS, StoreError
from casnap.format.digest import digest_of
from casnap.format.records import StoreConfig
from casnap.runtime.environment import cache_folder
from casnap.runtime.threads import Crew, SharedItems

_log = logging.getLogger("casnap")
_ALONE = (
    "or make sure that no other process takes, deletes, prunes, tags, repairs or collects there "
    "meanwhile, and pass --exclusive, or Store(..., exclusive=True)"
)
# How long a host believes what it found, in seconds.
_BELIEVED = 30 * 86400.0
# The endpoints, each in a state, that this process knows to honour it.
_proven_places: set[str] = set()


def no_put_if_absent_error(backend: Backend) -> StoreError:
    """Return the error for a writer at a place without put-if-absent."""
    if not backend.can_put_if_absent:
        scheme = backend.uri.partition("://")[0]
        return StoreError(
            f"{backend.uri}: casnap does not know how to put an object only if it is absent on "
            f"{scheme}:// (it does on s3://, gs:// and az://), so of two writers at once one can "
            f"overwrite the other's commit, and snapshots are lost. Use one of those, {_ALONE}"
        )
    state = backend.versioning
    advice = (
        f", or a bucket that never kept versions (here versioning is {state}; some servers honour "
        "it only without)"
        if state
        else ""
    )
    return StoreError(
        f"{backend.uri} lies on a server that does not honour put-if-absent (If-None-Match), so of "
        "two writers at once one can overwrite the other's commit, and snapshots are lost. Use a "
        f"server that honours it{advice}; {_ALONE}"
    )


def check_put_if_absent(backend: Backend, config: StoreConfig) -> None:
    """Check that other writers cannot harm this one, nor this one them.

    Args:
        backend: Where the store lives.
        config: Its record, which says what was found when the store was made. That may have been
            at another endpoint, so this host finds out for itself before it first writes.

    Raises:
        StoreError: The place does not honour put-if-absent, and the user does not vouch that there
            is no other writer.
    """
    if backend.exclusive:
        return
    if not config.put_if_absent or (backend.needs_probe and not honours_put_if_absent(backend)):
        raise no_put_if_absent_error(backend)


def recheck_put_if_absent(backend: Backend) -> None:
    """Check, right before a root is put, what :func:`check_put_if_absent` has checked.

    It costs nothing unless the last put told that the bucket begins, or ceases, to keep versions.

    Raises:
        StoreError: The place does not honour put-if-absent as it is now.
    """
    if backend.needs_probe and not backend.exclusive and not honours_put_if_absent(backend):
        raise no_put_if_absent_error(backend)


def put_if_absent_warnings(backend: Backend) -> list[str]:
    """Return, in words, why writers may not be kept apart, as far as this host knows.

    Nothing is put: this is for readers, too.
    """
    if not backend.can_put_if_absent or not backend.versioning:
        return []
    place = _place(backend)
    if not place or place in _proven_places or _is_fresh(_note(place)):
        return []
    return [
        f"versioning of the bucket is {backend.versioning}, and this host has not found that the "
        "server honours put-if-absent then. Some servers, such as Ceph RGW, do not: of two writers "
        "at once one overwrites the other's commit. `casnap init` with this store tests it"
    ]


def honours_put_if_absent(backend: Backend) -> bool:
    """Whether a place honours put-if-absent. A host asks each endpoint once a month.

    What it found holds for the state that the bucket was in, by whether it keeps versions.

    Raises:
        PlaceError: The place cannot be written to.
    """
    if not backend.can_put_if_absent:
        return False
    while (place := _place(backend)) and place not in _proven_places:
        note = _note(place)
        if not _is_fresh(note):
            if not (
                has_one_winner(backend, 2, threads=1) and has_one_winner(backend, 4, threads=4)
            ):
                return False
            _take_note(note)
        # The puts may have told of another state: then that is looked at, too.
        _proven_places.add(place)
    return True


def _place(backend: Backend) -> str:
    """Return what a verdict is about; empty where none is needed."""
    endpoint = backend.endpoint
    versioning = backend.versioning if endpoint else ""
    return f"{endpoint} versioning {versioning}" if versioning else endpoint


def has_one_winner(backend: Backend, puts: int, threads: int) -> bool:
    """Put one fresh key several times; return whether exactly one put won, and is stored.

    A race is only for servers that refuse a second put. Where all puts win, racing ones can leave a
    server with more than one view of a folder: `rclone serve s3` then lists what was deleted.
    """
    key = f"tmp/{os.urandom(12).hex()}"
    won: list[bytes] = []
    start = threading.Event()
    try:
        with as_exclusive(backend, False), Crew() as crew:
            contents = SharedItems([os.urandom(16) for _ in range(puts)], crew)

            def attempt() -> None:
                start.wait()
                mine = [content for content in contents if backend.put_if_absent(key, content)]
                won.extend(mine)

            try:
                crew.start(attempt, threads - 1)
            finally:
                # Also after Ctrl-C: the crew waits for its threads.
                start.set()
            attempt()
        return len(won) == 1 and backend.read(key) == won[0]
    except FileNotFoundError:
        return False
    finally:
        _delete(backend, key)


def _delete(backend: Backend, key: str) -> None:
    try:
        backend.delete(key)
    except PLACE_ERRORS as e:
        # A collector that frees something deletes it, once it is an hour old.
        _log.debug("%s/%s stays: %s", backend.uri, key, e)


def _note(endpoint: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "probed" / digest_of(endpoint.encode()).hex()[:32]


def _is_fresh(note: Path | None) -> bool:
    """Whether this host has probed lately: the server at an address may be replaced."""
    try:
        return note is not None and abs(time.time() - note.stat().st_mtime) < _BELIEVED
    except OSError:
        return False


def _take_note(note: Path | None) -> None:
    if note is None:
        return
    try:
        note.parent.mkdir(mode=0o700, exist_ok=True)
        note.touch()
    except OSError as e:
        _log.debug("%s is not noted, so the next process probes again: %s", note, e)
