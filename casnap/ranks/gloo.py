"""The gloo groups over which ranks communicate.

In this folder, only this module uses undocumented names of torch. ``dist.new_group`` is not used.
It is a collective of the trainer's default group, and waits for a missing rank as long as that
group does. Collectives of the groups that it makes take no deadline of their own. A
``ProcessGroupGloo`` that is made directly needs only its members, and each call has a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from casnap.runtime.environment import gloo_interfaces


def default_group() -> tuple[object, Any]:
    """Return the default process group, and the torch store through which its ranks met."""
    c10d = dist.distributed_c10d
    return c10d._get_default_group(), c10d._get_default_store()


def _device() -> Any:
    """Return a gloo device whose ranks connect when they first talk, where torch can do that.

    There is one device, even if the environment names several network interfaces, because a missed
    deadline breaks only the connections of one device.
    """
    kind: Any = dist.ProcessGroupGloo
    make = kind.create_default_device
    for interface in gloo_interfaces()[:1]:
        make = partial(kind.create_device, interface=interface)
    try:
        return make(lazy_init=True)
    except TypeError:  # of torch 2.7, where all ranks connect at once
        return make()


# Comparing versions takes as long as a tenth of a collective, so it is done once.
_ALLTOALL_HAS_DEADLINE = torch.__version__ >= "2.9"
# The tag of the messages of an exchange of rows; `topology.py` and `break_connections` have others.
_OF_ROWS = 5
# Seconds between two looks for an address.
_LOOK = 0.005
# A value that no rank stores.
_NOTHING = "\x00"
# Torch's message for a method that a store written in Python lacks.
_NOT_IMPLEMENTED = "Not implemented"


def value_in(store: Any, key: str) -> bytes | None:
    """Return the value of a key in a torch store; None if the key is not set.

    The call does not wait.

    It takes one request; two if the store cannot compare and set, such as a store written in
    Python.
    """
    try:
        # This sets nothing: no key has the value that it expects.
        value = bytes(store.compare_set(key, _NOTHING, _NOTHING))
    except RuntimeError as e:
        if _NOT_IMPLEMENTED not in str(e):
            raise
        return bytes(store.get(key)) if store.check([key]) else None
    return None if value == _NOTHING.encode() else value


def first_in(store: Any, key: str, value: bytes) -> bytes:
    """Set a key in a torch store unless the key is set; return the value that the key has then.

    In a store that cannot compare and set, two ranks may both find their own value.
    """
    try:
        return bytes(store.compare_set(key, "", value))
    except RuntimeError as e:
        if _NOT_IMPLEMENTED not in str(e):
            raise
        if not store.check([key]):
            store.set(key, value)
        return bytes(store.get(key))


class _Addresses(dist.Store):  # type: ignore[misc, name-defined]
    """A torch store through which gloo reads the addresses of ranks.

    For each address, gloo calls ``wait`` for the key, then ``get`` for the value. To save a
    request, ``wait`` already reads the value here, and ``get`` returns it.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._values: dict[str, bytes] = {}

    def has_extended_api(self) -> bool:
        return False

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        until = time.monotonic() + timeout.total_seconds()
        for key in keys:
            while (value := value_in(self._store, key)) is None:
                if time.monotonic() > until:
                    raise dist.DistStoreError(f"{key} is not in the store within {timeout}")
                time.sleep(_LOOK)
            self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values.pop(key)


def new_group(
    store: Any, name: str, rank: int, size: int, seconds: float, *, connects_later: bool = False
) -> tuple[Any, object]:
    """Make a gloo group of some ranks. The ranks find each other in a torch store.

    Args:
        store: The torch store of the default group.
        name: The name of the new group, the same on all its ranks.
        rank: The number of this rank in the new group.
        size: The number of ranks.
        seconds: How long to wait for each other rank.
        connects_later: Whether two ranks connect when they first talk, instead of at once.

    Returns:
        The group, and an object that the caller must keep as long as it uses the group.
    """
    kind: Any = dist.ProcessGroupGloo
    prefix = dist.distributed_c10d.PrefixStore
    if not connects_later:
        prefixed = prefix(name, store)
        return kind(prefixed, rank, size, timedelta(seconds=seconds)), prefixed
    options = kind._Options()
    options._timeout, options._threads = timedelta(seconds=seconds), 2
    options._devices = [_device()]
    addresses = _Addresses(store)
    return kind(prefix(name, addresses), rank, size, options), addresses


def exchange_rows(pg: Any, mine: torch.Tensor, seconds: float) -> torch.Tensor:
    """Send row i of a tensor to rank i; return the rows that the ranks sent to this rank.

    Args:
        pg: The gloo group.
        mine: The tensor, with a row for each rank.
        seconds: How long to wait for the other ranks.

    Returns:
        A tensor of the received rows, in the order of the ranks.
    """
    theirs = mine.clone()
    if _ALLTOALL_HAS_DEADLINE:
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=seconds)
        pg.alltoall_base(theirs, mine, [], [], options).wait()
        return theirs
    # Here an all-to-all has the deadline of the group: the time that ranks get to connect.
    until = time.monotonic() + seconds
    others = [rank for rank in range(len(mine)) if rank != pg.rank()]
    works = [pg.recv([theirs[rank]], rank, _OF_ROWS) for rank in others]
    works += [pg.send([mine[rank]], rank, _OF_ROWS) for rank in others]
    for work in works:
        work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))
    return theirs


def break_connections(pg: Any, peers: Iterable[int]) -> None:
    """Break all connections of a gloo group, so that ranks that wait in the group fail at once.

    An exception may still refer to the group, so to drop the group is not enough. gloo breaks all
    connections of a group when one call misses its deadline. So this function lets a call miss it.

    Args:
        pg: The group.
        peers: The ranks to which this rank is connected.
    """
    for peer in peers:
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:
            pg.recv([nothing], peer, 1).wait(timedelta(milliseconds=1))
        except RuntimeError as e:
            # Any other error means that this connection was broken before; so try the next one.
            if "Timed out" in str(e):
                return


def as_tensor(part: bytes | bytearray | memoryview) -> torch.Tensor:
    """Return bytes as a tensor of uint8. The tensor shares the memory of a writable view.

    Read-only bytes are copied.
    """
    # Torch warns about read-only memory, though this memory is only read.
    writable = part if isinstance(part, memoryview) and not part.readonly else bytearray(part)
    return torch.frombuffer(writable, dtype=torch.uint8)
