"""Pretended hosts: the ranks of a world, which all run on this machine, count as those of several.

::

    with pretended_host(8):     # in each rank: of 16, the first eight are one host
        store.take(...)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from casnap.ranks import processes
from casnap.restore import restore
from tests.support.links import forget_links


@contextmanager
def pretended_host(per_host: int) -> Iterator[int]:
    """Have this rank be on a host with its neighbours, so many in all; give the host's number.

    All ranks call this. The next operation connects them anew.
    """
    host = dist.get_rank() // per_host

    def boot_id() -> str:
        return f"host {host}"

    with (
        mock.patch.object(processes, "boot_id", boot_id),
        mock.patch.object(restore, "boot_id", boot_id),
    ):
        forget_links()
        dist.barrier()
        yield host
    forget_links()
