"""Test, by racing puts, whether a place honours put-if-absent: a put fails if its key is taken.

Some servers accept the header ``If-None-Match``, but ignore it. If two writers then put the same
root, the second put overwrites the first, and a committed snapshot is lost.
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
# How many seconds a host believes its last probe.
_BELIEVED = 30 * 86400.0
# Seconds between two looks of a thread that waits for the race: it may be called off.
_STEP = 0.1
# Endpoints that this process knows to honour it, each in one state of its bucket's versioning.
_proven_places: set[str] = set()


class PutIfAbsent:
    """Tests what a place does when several writers put the same key.

    Args:
        backend: The backend of the place.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def error(self) -> StoreError:
        """Return the error to raise when a writer uses a place without put-if-absent."""
        uri = self._backend.uri
        if not self._backend.can_put_if_absent:
            scheme = uri.partition("://")[0]
            return StoreError(
                f"{uri}: casnap does not know how to put an object only if it is absent on "
                f"{scheme}:// (it does on s3://, gs:// and az://). So if two writers put at once, "
                "one can overwrite the other's commit, and snapshots are lost. Use one of these, "
                f"{_ALONE}"
            )
        state = self._backend.versioning
        advice = (
            f", or a bucket that never kept versions (here versioning is {state}; some servers "
            "honour it only without)"
            if state
            else ""
        )
        return StoreError(
            f"{uri} lies on a server that does not honour put-if-absent (If-None-Match). So if two "
            "writers put at once, one can overwrite the other's commit, and snapshots are lost. "
            f"Use a server that honours it{advice}; {_ALONE}"
        )

    def has_one_winner(self, puts: int, threads: int) -> bool:
        """Put one new key several times; return whether just one put succeeded and was stored.

        Call this with one thread first, and with several only if the server has then refused the
        second put. On a server where all puts win, a race can confuse later listings of the folder:
        `rclone serve s3` then lists deleted objects.

        Args:
            puts: How many times to put the key, each time with other bytes.
            threads: How many threads put at once.
        """
        backend, key = self._backend, f"tmp/{os.urandom(12).hex()}"
        won: list[bytes] = []
        start = threading.Event()
        try:
            with as_exclusive(backend, False), Crew() as crew:
                contents = SharedItems([os.urandom(16) for _ in range(puts)], crew)

                def attempt() -> None:
                    while not start.wait(_STEP):
                        # Another thread could not be started. The starter waits for this one.
                        if crew.failed:
                            return
                    mine = [content for content in contents if backend.put_if_absent(key, content)]
                    won.extend(mine)

                crew.start(attempt, threads - 1)
                start.set()
                attempt()
            return len(won) == 1 and backend.read(key) == won[0]
        except FileNotFoundError:
            return False
        finally:
            _delete(backend, key)


def check_put_if_absent(backend: Backend, config: StoreConfig) -> None:
    """Check that two writers cannot overwrite each other's roots at the place of a store.

    Args:
        backend: The backend of the store.
        config: The store's ``casnap.json``. It has the verdict of the probe that was made when the
            store was created. The server may be another one now, so this host probes again before
            it first writes.

    Raises:
        StoreError: The place does not honour put-if-absent, and the user does not vouch that no
            other process writes.
    """
    if backend.exclusive:
        return
    if not config.put_if_absent or (backend.needs_probe and not honours_put_if_absent(backend)):
        raise PutIfAbsent(backend).error()


def recheck_put_if_absent(backend: Backend) -> None:
    """Check as :func:`check_put_if_absent` does, right before a root is put.

    This takes no request, unless the last put has shown that the bucket's versioning was switched
    on or off.

    Raises:
        StoreError: The place does not honour put-if-absent as it is now.
    """
    if backend.needs_probe and not backend.exclusive and not honours_put_if_absent(backend):
        raise PutIfAbsent(backend).error()


def put_if_absent_warnings(backend: Backend) -> list[str]:
    """Return warnings that a place may not honour put-if-absent, as far as this host knows.

    The function puts nothing, so readers may call it.
    """
    if not backend.can_put_if_absent or not backend.versioning:
        return []
    place = _place(backend)
    if not place or place in _proven_places or _is_fresh(_note(place)):
        return []
    return [
        f"versioning of the bucket is {backend.versioning}, and this host has not found that the "
        "server honours put-if-absent then. Some servers, such as Ceph RGW, do not: if two writers "
        "put at once, one overwrites the other's commit. `casnap init` with this store tests it"
    ]


def honours_put_if_absent(backend: Backend) -> bool:
    """Whether a place honours put-if-absent. A host probes each endpoint once a month.

    If the bucket's versioning is switched on or off, the place is probed again.

    Raises:
        PlaceError: The place cannot be written to.
    """
    if not backend.can_put_if_absent:
        return False
    while (place := _place(backend)) and place not in _proven_places:
        note = _note(place)
        if not _is_fresh(note):
            places = PutIfAbsent(backend)
            if not (places.has_one_winner(2, threads=1) and places.has_one_winner(4, threads=4)):
                return False
            _take_note(note)
        # The puts may have shown another state of the bucket, which is then probed too.
        _proven_places.add(place)
    return True


def _place(backend: Backend) -> str:
    """Return the text under which the result of a probe is kept; "" if the place needs no probe.

    The text names the endpoint and the bucket's versioning. A result is used again only for the
    same text: servers differ, and one may honour put-if-absent only without versioning.
    """
    endpoint = backend.endpoint
    versioning = backend.versioning if endpoint else ""
    return f"{endpoint} versioning {versioning}" if versioning else endpoint


def _delete(backend: Backend, key: str) -> None:
    try:
        backend.delete(key)
    except PLACE_ERRORS as e:
        # A collector that frees something deletes the key, once it is an hour old.
        _log.debug("%s/%s stays: %s", backend.uri, key, e)


def _note(endpoint: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "probed" / digest_of(endpoint.encode()).hex()[:32]


def _is_fresh(note: Path | None) -> bool:
    """Whether the note file of a probe is recent.

    An old one does not count: servers are replaced.
    """
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
