"""What a writer tries again: a root whose number was taken, and a change that cannot be finished.

What a collector that is faster than a change does to it, from the mildest case on:

1. It has condemned a pack that the change relies on. The root of the change no longer condemns it
   (``session.py``).
2. Its fence has passed packs that the change wrote. They get new names; nothing is written again
   (``Session._move``).
3. Such a pack is deleted already, or one that the change relies on: :class:`FencedError`. The
   change starts again (:func:`again`), and is announced at once, so that collectors wait for it.
4. It cannot start again, or was fenced five times. It is given up, and the error is raised.

If the disk is full, a change starts again once something was freed. Nothing else knows all that. A
writer says how often it starts again, what makes room on a full disk, and what ranks have to agree
on before.
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
"""After so many fences, or full disks, a writer gives up that has much to lose."""
Obstacle: TypeAlias = FencedError | StorageFullError


def put_root_after(
    store: Repository,
    prepare: Callable[[Root], Root | None],
    put: Callable[[Root], bool] | None = None,
    first_root: Callable[[], Root] | None = None,
) -> Root | None:
    """Put the root after the newest one, and again as long as another commit takes its number.

    Args:
        store: The store.
        prepare: Given a root, writes all that the root after it names, and returns that one; None
            if none is to be put.
        put: Puts it; returns False if its number is taken, so that it will never stand. By default
            :func:`~casnap.storage.commit_log.roots.put_root`.
        first_root: Returns the root to follow at first; by default the newest.

    Returns:
        The root that was put.
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
    """Do some work that writes to a store, and start again if a collector or the disk prevents it.

    From the first fence on, the changes of this process are announced at once, so that collectors
    see the next try. Fences and full disks are counted apart: who gives up at a full disk has made
    room there first, however many fences came before.

    Args:
        store: The store.
        work: The work, from its beginning.
        what: What it is, for the log.
        tries: After how many fences to give up, or after how many full disks; None for never.
        on_full: Called when the disk is full; returns if there may be room now. By default there is
            none.
        start_over: Called before each new try; returns whether there can be one. If many ranks do
            the work, they agree here.
        give_up: Called with the error of the last try; by default that is raised.

    Raises:
        FencedError: A collector was faster in the last try.
        StorageFullError: The disk is full, and nothing there can be freed.
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
