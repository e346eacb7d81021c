"""Collectives whose ranks stay away, die or stand still: who is named to the others, and when."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from casnap.ranks import comm as comm_module
from casnap.ranks import link as links
from casnap.ranks.comm import Comm
from tests.support.faults import kill
from tests.support.ranks import RankDied, World
from tests.support.yard import SOON, Seen, Yard, heard_of, nothing_hangs, talk, watch

Worlds = Callable[[int], World]
SHORT = 1.0


def start_with(operations: int) -> None:
    """Begin with a new group, or in one that has served some operations."""
    comm_module._links.clear()
    dist.barrier()
    for _ in range(operations):
        talk(60)


# --- ranks that do something else, or nothing -------------------------------------------------


def do_something_else() -> tuple[Seen, Seen]:
    talk(60)
    doing = "the restore of 'x'" if dist.get_rank() == 1 else "the take of 'x'"
    return watch(partial(talk, 60, 2, doing=doing)), watch(partial(talk, 60))


def test_who_does_something_else_is_told_so(world: Worlds) -> None:
    outcomes = world(3).run(do_something_else)
    for rank, (seen, again) in enumerate(outcomes):
        what = "rank 1 came to the restore of 'x'"
        other = "the restore of 'x': ranks 0 and 2 came to the take of 'x' meanwhile"
        assert seen.error == "StateError"
        assert (other if rank == 1 else what) in seen.text
        assert again.value == heard_of(3)


def do_less(skipping: int, before: int) -> tuple[Seen, Seen]:
    """Stay away from an operation, the first one or a later one, and come to the next."""
    start_with(before)
    skips = dist.get_rank() == skipping
    seen = watch(lambda: None) if skips else watch(partial(talk, SHORT, doing="the second talk"))
    dist.barrier()
    return seen, watch(partial(talk, 60, doing="the third talk"))


@pytest.mark.parametrize("skipping", [0, 1])
@pytest.mark.parametrize("before", [0, 2])
def test_who_skips_an_operation_is_missed(world: Worlds, skipping: int, before: int) -> None:
    for rank, (seen, again) in enumerate(world(3).run(do_less, skipping, before)):
        if rank != skipping:
            assert seen.error == "RankError"
            assert seen.ranks == (skipping,)
            verb = "come" if before == 0 else "answer"
            assert f"rank {skipping} did not {verb} within 1" in seen.text
            assert SHORT <= seen.seconds < 2 * SHORT + SOON
            assert before == 0 or "last seen" in seen.text
        assert again.value == heard_of(3)


# --- ranks that die ---------------------------------------------------------------------------


def die(dying: int, before: int, at: int, inside: bool) -> tuple[Seen, Seen]:
    def strike(i: int, comm: Comm) -> None:
        if (i, comm.rank) == (at, dying):
            if inside:
                comm_module._as_tensor = lambda _: kill()
            else:
                kill()

    start_with(before)
    seen, again = watch(partial(talk, 4, 3, strike)), watch(partial(talk, 4))
    nothing_hangs()
    return seen, again


@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize(
    ("before", "at", "inside"),
    [(0, 1, False), (0, 2, True), (0, 3, False), (2, 0, False), (1, 0, True), (1, 3, False)],
)
def test_a_death_is_noticed_at_once(
    world: Worlds, dying: int, before: int, at: int, inside: bool
) -> None:
    outcomes = world(3).run(die, dying, before, at, inside, expect_errors=True)
    for rank, outcome in enumerate(outcomes):
        if rank == dying:
            assert isinstance(outcome, RankDied)
            continue
        seen, again = outcome
        if at == 3:
            assert seen.value == heard_of(3)  # all was said
        else:
            assert seen.error == "RankError"
            assert seen.text.startswith(f"the talk of ranks: rank {dying} died (last seen ")
            assert seen.ranks == (dying,)
            assert seen.seconds < 3.5
        assert again.error == "RankError"
        assert f"rank {dying} died" in again.text
        assert again.ranks == (dying,)
        assert again.seconds < 3.5
    assert [s.value for s in world(3).run(watch_talk)] == [heard_of(3)] * 3


def watch_talk() -> Seen:
    return watch(partial(talk, 60))


def die_on_the_way(dying: int, where: str) -> Seen:
    """Die before anybody met, after all have met, or before all know who is who."""
    start_with(0)
    if dist.get_rank() == dying:
        if where == "before":
            kill()
        if where == "met":
            dist.ProcessGroupGloo = lambda *_: kill()
        if where == "connected":
            links.Link._exchange_processes = lambda *_: kill()
    return watch(partial(talk, SHORT))


@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize("where", ["before", "met", "connected"])
def test_a_death_before_all_have_met(world: Worlds, dying: int, where: str) -> None:
    outcomes = world(3).run(die_on_the_way, dying, where, expect_errors=True)
    for rank, seen in enumerate(outcomes):
        if rank != dying:
            assert seen.error == "RankError"
            assert seen.ranks == (dying,)
            assert f"rank {dying} " in seen.text
            assert seen.seconds < 3 * SHORT + SOON


# --- ranks that stand still -------------------------------------------------------------------


def stand_still(
    folder: str, stopping: int, before: int, at: int, inside: bool
) -> tuple[Seen, Seen, Seen]:
    yard = Yard(folder)
    real = comm_module._as_tensor

    def stop(part: Any) -> torch.Tensor:
        comm_module._as_tensor = real
        yard.stand_still()
        return real(part)

    def strike(i: int, comm: Comm) -> None:
        if (i, comm.rank) == (at, stopping):
            if inside:
                comm_module._as_tensor = stop
            else:
                yard.stand_still()

    start_with(before)
    seen = watch(partial(talk, SHORT, 3, strike))
    missed = watch(lambda: None)
    if dist.get_rank() != stopping:
        missed = watch(partial(talk, SHORT, doing="the talk that is missed"))
        yard.done(stopping)
    dist.barrier()
    again = watch(partial(talk, 60, doing="the talk of all"))
    nothing_hangs()
    return seen, missed, again


@pytest.mark.parametrize(
    ("stopping", "before", "at", "inside"),
    [(0, 0, 0, False), (1, 0, 0, False), (1, 0, 2, True), (0, 1, 0, False), (1, 1, 3, False)],
)
def test_who_stands_still_is_named_in_time(
    world: Worlds, tmp_path: Path, stopping: int, before: int, at: int, inside: bool
) -> None:
    outcomes = world(3).run(stand_still, str(tmp_path), stopping, before, at, inside)
    for rank, (seen, missed, again) in enumerate(outcomes):
        if at == 3:
            assert seen.value == heard_of(3)
        else:
            assert seen.error == "RankError"
            if rank != stopping or (before, at) != (0, 0):
                assert f"rank {stopping} did not " in seen.text
                assert seen.ranks == (stopping,)
                assert "within 1" in seen.text
            if rank != stopping:
                assert SHORT * 0.9 <= seen.seconds < 2 * SHORT + SOON
        if rank != stopping:
            assert missed.error == "RankError"
            assert f"rank {stopping} did not " in missed.text
            assert missed.seconds < 2 * SHORT + SOON
        assert again.value == heard_of(3)


# --- the store --------------------------------------------------------------------------------


def lose_the_store(folder: str, port: int, how: str) -> tuple[Seen, Seen]:
    """Kill or stop rank 0, which keeps the store, as it does where no launcher does."""
    yard = Yard(folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    talk(60)

    def strike(i: int, comm: Comm) -> None:
        if (i, comm.rank) == (1, 0):
            kill() if how == "killed" else yard.stand_still()

    links._STORE_SECONDS = 1.0
    seen = watch(partial(talk, SHORT, 2, strike))
    again = watch(partial(talk, SHORT)) if rank else seen
    if rank and how == "stopped":
        yard.done(0)
    return seen, again


@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.slow)])
def test_the_store_is_gone_with_rank_0(world: Worlds, tmp_path: Path, how: str) -> None:
    with world(3).fresh() as fresh:
        probe = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = probe.port
        del probe
        outcomes = fresh.run(lose_the_store, str(tmp_path), port, how, expect_errors=True)
    for rank, outcome in enumerate(outcomes):
        if rank == 0:
            assert isinstance(outcome, RankDied) == (how == "killed")
            continue
        for seen in outcome:
            assert seen.error == "RankError"
            assert ("rank 0 died" if how == "killed" else "rank 0 if no launcher") in seen.text
            assert seen.seconds < 2 * SHORT + 1 + SOON
