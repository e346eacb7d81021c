"""When a writer tries again: its root's number was taken, or a collector or full disk stopped it.

A collector may overtake a change. There are four cases, from the mildest on:

1. The collector has condemned a pack that the change relies on. The root of the change rescues the
   pack (``session.py``).
2. The collector's fence has passed packs that the change wrote. These packs get new ids; no chunk
   is written again (``Session._move``).
3. The collector has deleted such a pack, or one that the change relies on: :class:`FencedError`.
   The change starts again (:func:`again`), and announces itself right away, so that collectors wait
   for it.
4. The change cannot start again, or was fenced five times. It gives up, and the error is raised.

If the disk is full, a change starts again once other data was freed. No other module knows these
rules. A writer only says how many times it starts again, what makes room on a full disk, and what
ranks must agree on before each start.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeAlias, TypeVar

from casnap.errors import FencedError, StorageFullError
from casnap.format.records import Root
from casnap.storage.commit_log.roots import named_root, put_root
from casnap.storage.reading.repository import Repository

_log = logging.getLogger("casnap")
T = TypeVar("T")

TRIES = 5
"""How many times a writer is fenced, or finds the disk full, before it gives up, by default."""
Obstacle: TypeAlias = FencedError | StorageFullError


def put_root_after(
    store: Repository,
    prepare: Callable[[Root], Root | None],
    put: Callable[[Root], bool] | None = None,
    first_root: Callable[[], Root] | None = None,
) -> Root | None:
    """Put the root after the newest one. If another commit takes its number, try again.

    Args:
        store: The store.
        prepare: Called with the newest root. It writes all files that the next root names, and
            returns the next root; None to put no root.
        put: Puts a root; returns False if another root has taken its number. By default
            :func:`~casnap.storage.commit_log.roots.put_root`.
        first_root: Returns the root to follow in the first try; by default the newest.

    Returns:
        The root that was put; None if ``prepare`` returned None.
    """
    put = put or partial(put_root, store.backend)
    last_root = first_root or store.newest
    while True:
        root = prepare(last_root())
        if root is None:
            return None
        if put(root):
            store.note_newest(root)
            return root
        # A listing may be older than the root that has taken the number.
        store.observe_root(named_root(store.backend, root.seq))
        last_root = store.newest


def _raise(error: Obstacle) -> NoReturn:
    raise error


def again(
    store: Repository,
    work: Callable[[], T],
    what: str,
    *,
    tries: int | None = TRIES,
    on_full: Callable[[StorageFullError], None] = _raise,
    start_over: Callable[[], bool] = lambda: True,
    give_up: Callable[[Obstacle], T] = _raise,
) -> T:
    """Do work that writes to a store. If a collector or a full disk stops the work, start it again.

    After the first fence, each change of this process announces itself as soon as it begins, so
    that collectors see the next try. Fences and full disks are counted separately, so that many
    fences do not use up the tries after a full disk.

    Args:
        store: The store.
        work: Does the work from its beginning.
        what: The work in words, for the log.
        tries: After how many fences, or how many full disks, to give up; None for never.
        on_full: Called if the disk is full. It returns if there may be room now, and otherwise
            raises an error; by default it raises the given error.
        start_over: Called before each new try; returns whether to try again. If many ranks do the
            work, they agree here.
        give_up: Called with the error of the last try; by default it raises the error.

    Returns:
        The result of ``work``, or of ``give_up``.

    Raises:
        FencedError: A collector overtook the last try.
        StorageFullError: The disk is full, and nothing on it can be freed.
    """
    obstacles = Counter[type[Obstacle]]()
    while True:
        try:
            return work()
        except (FencedError, StorageFullError) as e:
            reason = "the disk was full, and there is room now"
            if isinstance(e, FencedError):
                store.announces_at_once = True
                reason = "a collector went past it"
            obstacles[type(e)] += 1
            if obstacles[type(e)] == tries:
                return give_up(e)
            if isinstance(e, StorageFullError):
                on_full(e)
            if not start_over():
                raise
        _log.info("%s starts again: %s", what, reason)
