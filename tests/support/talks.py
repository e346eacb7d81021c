"""What ranks do in tests of collectives: they carry bytes, fail, die, or stand still."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from casnap.ranks import gloo
from casnap.ranks.comm import Comm
from casnap.ranks.joining import join
from tests.support.faults import kill
from tests.support.links import forget_links, links
from tests.support.yard import Seen, Yard, nothing_hangs, talk, watch

STILL = 3.0  # a busy machine keeps ranks from meeting for a second or two
LONG = 60.0


def carry(sizes: list[int], kind: str, *, is_straight: bool = True) -> None:
    """Send parts of these sizes to each rank; their bytes tell the sender and the receiver."""

    def content(source: int, target: int) -> bytes:
        return bytes([source, target]) * (sizes[(source + target) % len(sizes)] // 2)

    kinds: dict[str, Callable[[bytes], Any]] = {
        "bytes": bytes,
        "writable": lambda part: memoryview(bytearray(part)),
        "read-only": memoryview,
    }
    made = kinds[kind]
    with join(None, 60, "the carrying of bytes") as comm:
        parts = [made(content(comm.rank, target)) for target in range(comm.size)]
        got = comm.all_to_all(parts)
        expected = [content(source, comm.rank) for source in range(comm.size)]
        assert [bytes(part) for part in got] == expected
        nbytes = sum(len(part) for rank, part in enumerate(expected) if rank != comm.rank)
        for room in (bytearray(nbytes), bytearray(nbytes + 5), bytearray(max(0, nbytes - 1))):
            got = comm.all_to_all(parts, memoryview(room))
            assert [bytes(part) for part in got] == expected
            inside = [p.obj is room for r, p in enumerate(got) if r != comm.rank and len(p)]
            assert not is_straight or all(inside) == (len(room) >= nbytes)


def carry_by_all_means() -> None:
    with join(None, 60, "the carrying of bytes") as comm:
        own = b"%d" % comm.rank
        ranks = [b"%d" % rank for rank in range(comm.size)]
        assert comm.all_gather(own) == ranks
        assert comm.gather(own) == (ranks if comm.rank == 0 else [])
        assert bytes(comm.broadcast(b"all" if comm.rank == 0 else b"")) == b"all"
        assert bytes(comm.broadcast()) == b""
        assert comm.scatter([part * 3 for part in ranks]) == own * 3
        same = memoryview(bytearray(b"x" * (1 << 20)))
        assert all(part == same for part in comm.all_to_all([same] * comm.size))


def err(failing: list[int], at: int, error: BaseException) -> tuple[Seen, str, Seen, str]:
    """Raise on some ranks before a collective, then talk again."""

    def strike(i: int, comm: Comm) -> None:
        if i == at and comm.rank in failing:
            raise error

    talk(60)
    name = group_name()
    seen = watch(partial(talk, 60, 3, strike))
    return seen, name, watch(partial(talk, 60)), group_name()


def group_name() -> str:
    (link,) = (x for x in links() if x.size == dist.get_world_size())
    return link._name


def start_with(operations: int) -> None:
    """Begin with a new group, or in one that has served some operations."""
    forget_links()
    dist.barrier()
    for _ in range(operations):
        talk(60)


def die(dying: int, before: int, at: int, inside: bool) -> tuple[Seen, Seen]:
    def strike(i: int, comm: Comm) -> None:
        if (i, comm.rank) == (at, dying):
            if inside:
                gloo.as_tensor = lambda _: kill()  # type: ignore[assignment, return-value]
            else:
                kill()

    start_with(before)
    seen, again = watch(partial(talk, LONG, 3, strike)), watch(partial(talk, LONG))
    nothing_hangs()
    return seen, again


def stand_still(
    folder: str, stopping: int, before: int, at: int, inside: bool
) -> tuple[Seen, Seen, Seen]:
    yard = Yard(folder)
    real = gloo.as_tensor

    def stop(part: Any) -> torch.Tensor:
        gloo.as_tensor = real
        yard.stand_still()
        return real(part)

    def strike(i: int, comm: Comm) -> None:
        if (i, comm.rank) == (at, stopping):
            if inside:
                gloo.as_tensor = stop
            else:
                yard.stand_still()

    start_with(before)
    seen = watch(partial(talk, STILL, 3, strike))
    missed = watch(lambda: None)
    if dist.get_rank() != stopping:
        missed = watch(partial(talk, STILL, doing="the talk that is missed"))
        yard.done(stopping)
    dist.barrier()
    again = watch(partial(talk, 60, doing="the talk of all"))
    nothing_hangs()
    return seen, missed, again
