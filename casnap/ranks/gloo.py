"""The gloo groups that ranks use. Only this module uses undocumented names of torch.

``dist.new_group`` would not do. It is a collective of the trainer's default group, it waits for a
missing rank as long as that group does, and its collectives take no deadline of their own. A
``ProcessGroupGloo`` that is made directly needs its members only, and each call has its deadline.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def default_group() -> tuple[object, Any]:
    """Return the default process group, and the store that its ranks met in."""
    c10d = dist.distributed_c10d
    return c10d._get_default_group(), c10d._get_default_store()


def new_group(store: Any, name: str, rank: int, size: int, seconds: float) -> Any:
    """Connect this rank with the others of a new group; they meet in the store by a name."""
    prefixed = dist.distributed_c10d.PrefixStore(name, store)
    return dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=seconds))


def exchange_rows(pg: Any, mine: torch.Tensor, seconds: float) -> torch.Tensor:
    """Send row i of a tensor to rank i; return the rows that the ranks sent here."""
    theirs = torch.empty_like(mine)
    options = dist.AllToAllOptions()
    options.timeout = timedelta(seconds=seconds)
    pg.alltoall_base(theirs, mine, [], [], options).wait()
    return theirs


def break_connections(pg: Any, rank: int, size: int) -> None:
    """Break a group, so that every rank that waits in it fails at once.

    Dropping the group is not enough while an exception still refers to it. But one missed deadline
    breaks all connections of a gloo group.
    """
    for peer in range(size):
        if peer != rank:
            with suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                pg.recv([nothing], peer, 1).wait(timedelta(milliseconds=1))
