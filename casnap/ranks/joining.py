"""Join the ranks of an operation: find the ranks, and the link between them.

The process keeps a link for each set of ranks, for later operations.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from casnap.errors import StateError, with_article
from casnap.ranks import gloo
from casnap.ranks.comm import DEFAULT_TIMEOUT, Comm, SingleProcess
from casnap.ranks.group import Group
from casnap.ranks.link import Link
from casnap.runtime.buffers import on_release
from casnap.runtime.fork import in_child, never_free
from casnap.runtime.units import seconds_of

_links: dict[tuple[int, ...], Link] = {}


@in_child
def _leave_links() -> None:
    # When a gloo group ends, it waits for its threads, which a child lacks.
    never_free(*_links.values())
    _links.clear()


on_release(lambda: sum(link.forget() for link in list(_links.values())))


def own_rank(pg: Any = None) -> int:
    """Return the rank of this process in a group; 0 if ``torch.distributed`` is not initialised.

    Args:
        pg: The process group; None for the default group.
    """
    return dist.get_rank(pg) if dist.is_available() and dist.is_initialized() else 0


def join(pg: Any, timeout: float | None, operation: str) -> Comm:
    """Begin an operation that all ranks of a process group do together.

    Args:
        pg: The process group; None for the default group. If ``torch.distributed`` is not
            initialised, this process does the operation alone.
        timeout: The most seconds that one rank waits for another; None for ten minutes.
        operation: The operation in words, for messages, such as "the take of 'step_1'".

    Raises:
        StateError: ``pg`` is not a process group, or this process is not in it.
        TypeError: The timeout is not a time.
        ValueError: The timeout is not above 0.
    """
    timeout = (
        DEFAULT_TIMEOUT if timeout is None else seconds_of("timeout", timeout, above_zero=True)
    )
    if not (dist.is_available() and dist.is_initialized()):
        if pg is not None:
            raise StateError("pg= needs torch.distributed.init_process_group() first")
        return SingleProcess()
    if pg is dist.GroupMember.NON_GROUP_MEMBER:
        raise StateError("this process is not in the process group pg; only its members take part")
    if pg is not None and not isinstance(pg, dist.ProcessGroup):
        raise StateError(
            "pg= is a process group, as of torch.distributed.new_group(); got "
            f"{with_article(type(pg).__name__)}, which is not a process group (for a mesh, pass "
            "mesh.get_group())"
        )
    group = dist.group.WORLD if pg is None else pg  # None is no group to torch 2.7
    return join_ranks(tuple(dist.get_process_group_ranks(group)), timeout, operation)


def join_ranks(ranks: tuple[int, ...], timeout: float | None, operation: str) -> Comm:
    """Begin an operation as :func:`join` does, given the numbers of the ranks.

    Args:
        ranks: The numbers of the ranks in the default process group.
        timeout: The most seconds that one rank waits for another; None for ten minutes.
        operation: The operation in words, for messages.
    """
    if len(ranks) == 1:
        return SingleProcess()
    timeout = DEFAULT_TIMEOUT if timeout is None else timeout
    return Group(_link_of(ranks), timeout, operation)


def _link_of(ranks: tuple[int, ...]) -> Link:
    """Return the process's link between some ranks; make the link if there is none yet."""
    home, store = gloo.default_group()
    for key in [key for key, link in _links.items() if link.home is not home]:
        # The default group of this link was destroyed. Its gloo group would keep two threads.
        _links.pop(key, None)
    if ranks not in _links:
        # Saves of DCP in the background may come here at the same time. They must share one link.
        _links.setdefault(ranks, Link(home, store, ranks, ranks.index(dist.get_rank())))
    return _links[ranks]
