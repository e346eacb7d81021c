"""Collectives in which a rank stays away, dies or stands still: the others name it in time."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from casnap.ranks import link as links
from casnap.ranks.comm import Comm
from casnap.ranks.joining import join
from casnap.ranks.processes import Process
from tests.support.faults import kill, stop
from tests.support.ranks import RankDied, World, Worlds
from tests.support.talks import LONG, STILL, die, stand_still, start_with
from tests.support.yard import SOON, Seen, Yard, heard_of, talk, watch

SHORT = 1.0


@pytest.fixture(scope="module")
def three_worlds(world: Worlds) -> Iterator[list[World]]:
    """Return worlds of three ranks that may work at the same time."""
    with ExitStack() as stack:
        yield [world(3), *(stack.enter_context(world(3).fresh()) for _ in range(2))]


def beside(
    worlds: list[World], work: Callable[..., Any], cases: list[tuple[Any, ...]], **options: Any
) -> dict[tuple[Any, ...], list[Any]]:
    """Run ``work(*case)`` for all cases, in several worlds at a time since the ranks mostly wait.

    Returns:
        What each rank returned, by case.
    """

    def run(number: int) -> dict[tuple[Any, ...], list[Any]]:
        return {c: worlds[number].run(work, *c, **options) for c in cases[number :: len(worlds)]}

    with ThreadPoolExecutor(len(worlds)) as threads:
        parts = list(threads.map(run, range(len(worlds))))
    return {case: found for part in parts for case, found in part.items()}


def assert_missed(seen: Seen, rank: int, what: str = "") -> None:
    """Check that a rank was missed. On a busy machine another one may have been late as well."""
    assert seen.error == "RankError"
    assert rank in seen.ranks
    assert f" did not {what}" in seen.text


# --- ranks that do something else, or nothing -------------------------------------------------


def do_something_else() -> tuple[Seen, Seen]:
    talk(60)
    doing = "the restore of 'x'" if dist.get_rank() == 1 else "the take of 'x'"
    return watch(partial(talk, 60, 2, doing=doing)), watch(partial(talk, 60))


def test_a_rank_that_does_something_else_is_told_so(world: Worlds) -> None:
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


SKIPS = [(0, 0), (1, 2)]


def test_a_rank_that_skips_an_operation_is_missed(three_worlds: list[World]) -> None:
    for (skipping, before), outcomes in beside(three_worlds, do_less, SKIPS).items():
        for rank, (seen, again) in enumerate(outcomes):
            if rank != skipping:
                assert_missed(seen, skipping, f"{'come' if before == 0 else 'answer'} within 1")
                assert SHORT <= seen.seconds < 2 * SHORT + SOON
                assert before == 0 or "last seen" in seen.text
            assert again.value == heard_of(3)


# --- what is told while a rank is waited for ---------------------------------------------------


class Told(logging.Handler):
    """Keeps what is logged, and says in the store of the process group that something was."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        links.gloo.default_group()[1].set(f"told/{dist.get_rank()}", "")


def come_late(absent: int, before: int, timeout: float) -> tuple[Seen, list[str]]:
    """Come to an operation only when another rank has told that this one is missing."""
    start_with(before)
    told, log, store = Told(), logging.getLogger("casnap"), links.gloo.default_group()[1]
    log.addHandler(told)
    try:
        with mock.patch.object(links, "_WARN_AFTER", 0.3):
            if dist.get_rank() == absent:
                tellers = [0] if absent else [1] if before else [1, 2]
                store.wait([f"told/{rank}" for rank in tellers], timedelta(seconds=LONG))
                for rank in tellers:
                    store.delete_key(f"told/{rank}")
                if timeout < LONG:
                    return watch(lambda: None), told.lines
            seen = watch(partial(talk, timeout, 3, doing="the take of 'x'"))
    finally:
        log.removeHandler(told)
    return seen, told.lines


ABSENT = [(0, 0), (2, 2)]


@pytest.mark.parametrize(("absent", "before"), ABSENT)
def test_a_rank_that_does_not_come_is_named_while_it_is_waited_for(
    world: Worlds, absent: int, before: int
) -> None:
    outcomes = world(3).run(come_late, absent, before, LONG)
    line = (
        f"the take of 'x' waits for rank {absent}, not here after 0.3 s: all ranks of the process "
        "group must make this call; for some of them alone, take(), async_take() and Snapshot() "
        "have pg=. It goes on when all are here, and fails after 60 s"
    )
    for rank, (seen, lines) in enumerate(outcomes):
        assert seen.value == heard_of(3)
        # Where rank 0 is missing, no other knows of the rest before they have met once.
        tells = rank == min({0, 1, 2} - {absent}) or (absent, rank) == (0, 2)
        assert lines == [line] * tells


@pytest.mark.parametrize("before", [0, 2])
def test_an_error_says_that_all_ranks_must_call(world: Worlds, before: int) -> None:
    for rank, (seen, _) in enumerate(world(3).run(come_late, 1, before, STILL)):
        if rank != 1:
            assert_missed(seen, 1)
            assert "; all ranks of the process group must make this call" in seen.text


def work_slowly() -> list[str]:
    """Come at once, and take long for what comes then, here and in the background."""
    start_with(1)
    told, log = Told(), logging.getLogger("casnap")
    log.addHandler(told)
    try:
        with mock.patch.object(links, "_WARN_AFTER", 0.1), join(None, LONG, "the take") as comm:
            comm.all_gather(b"")
            if comm.rank:
                time.sleep(0.3)  # what is waited for is that nothing is told
            comm.all_gather(b"")
            with comm.background(1) as behind:
                if comm.rank == 1:
                    time.sleep(0.3)
                behind.all_gather(b"")
            with comm.background(2) as behind:
                if comm.rank == 1:
                    time.sleep(0.3)
                behind.all_gather(b"")
    finally:
        log.removeHandler(told)
    return told.lines


def test_nothing_is_told_of_ranks_that_work(world: Worlds) -> None:
    assert world(2).run(work_slowly) == [[], []]


def be_late() -> Seen:
    def strike(i: int, comm: Comm) -> None:
        if (i, comm.rank) == (1, 1):
            time.sleep(links.PATIENCE / 2 + 1)

    start_with(1)
    return watch(partial(talk, LONG, 3, strike))


def test_a_rank_that_works_is_waited_for_longer_than_one_that_connects(world: Worlds) -> None:
    assert [seen.value for seen in world(2).run(be_late)] == [heard_of(2)] * 2


# --- ranks that die ---------------------------------------------------------------------------


DEATHS = [
    (dying, *when) for dying in (0, 1) for when in [(0, 1, False), (0, 2, True), (1, 3, False)]
]


def test_a_death_is_noticed_at_once(three_worlds: list[World]) -> None:
    died = beside(three_worlds, die, DEATHS, expect_errors=True)
    for (dying, _, at, _), outcomes in died.items():
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
                assert seen.seconds < LONG / 2
            assert again.error == "RankError"
            assert f"rank {dying} died" in again.text
            assert again.ranks == (dying,)
            assert again.seconds < LONG / 2


def wait_for_rank_0() -> Seen:
    """Have rank 0 die when the others have seen that it waits for them."""
    start_with(0)
    store, look = links.gloo.default_group()[1], Process.has_ended

    def look_and_say(process: Process, host: int) -> bool:
        ended = look(process, host)
        # Only now: a rank 0 that is gone at the first look is taken for one of an older group.
        store.set(f"looked/{dist.get_rank()}", "")
        return ended

    def die_when_seen(*_: object) -> None:
        store.wait(["looked/1", "looked/2"])
        kill()

    if dist.get_rank() == 0:
        links.Link._arrival = die_when_seen  # type: ignore[method-assign,assignment]
    with mock.patch.object(Process, "has_ended", look_and_say):
        return watch(partial(talk, LONG))


def test_rank_0_dies_while_it_waits_for_the_others(world: Worlds) -> None:
    for seen in world(3).run(wait_for_rank_0, expect_errors=True)[1:]:
        assert seen.text == "the talk of ranks: rank 0 died"
        assert seen.seconds < LONG / 2


def go_on_after_a_death() -> list[Seen]:
    """Talk again and again though rank 1 died. Rank 2 looks only now and then what rank 0 does."""
    start_with(1)
    rank = dist.get_rank()
    if rank == 1:
        kill()
    pauses = links.Link._pauses

    def slowly(link: links.Link, until: float, given_up: threading.Event) -> Iterator[None]:
        for _ in pauses(link, until, given_up):
            yield
            time.sleep(0.3)

    if rank == 2:
        links.Link._pauses = slowly  # type: ignore[method-assign]
    try:
        return [watch(partial(talk, STILL + SOON)) for _ in range(4)]
    finally:
        links.Link._pauses = pauses  # type: ignore[method-assign]


def test_ranks_stay_in_step_after_a_death(world: Worlds) -> None:
    """A rank that was slow to hear why a meeting failed came to the next one instead."""
    for rank, seen in enumerate(world(3).run(go_on_after_a_death, expect_errors=True)):
        if rank != 1:
            assert [each.ranks for each in seen] == [(1,)] * 4, seen
            assert all(each.seconds < SOON for each in seen)


def end_after_the_error(folder: Path) -> Seen:
    """Rank 2 dies; rank 1 ends as soon as it has heard so; rank 0 looks who is dead after that."""
    start_with(1)
    yard, rank = Yard(folder), dist.get_rank()
    dead, cause = links.Link._dead_ranks, links.Link._cause

    def look_late(link: links.Link) -> list[int]:
        yard.leave("looks")
        while 1 not in (found := dead(link)):
            time.sleep(0.005)
        return found

    def find_late(link: links.Link, *given: Any) -> Any:
        if rank == 1:
            yard.wait("looks")
        else:
            links.Link._dead_ranks = look_late  # type: ignore[method-assign]
        return cause(link, *given)

    if rank == 2:
        kill()
    links.Link._cause = find_late  # type: ignore[method-assign]
    try:
        seen = watch(partial(talk, LONG))
        if rank == 1:
            kill()
        return seen
    finally:
        links.Link._dead_ranks, links.Link._cause = dead, cause  # type: ignore[method-assign]


def test_a_rank_that_ends_after_its_error_has_not_died(world: Worlds, tmp_path: Path) -> None:
    seen = world(3).run(end_after_the_error, tmp_path / "yard", expect_errors=True)[0]
    assert seen.ranks == (2,), seen
    assert "rank 2 died" in seen.text


def test_new_ranks_talk_after_a_death(world: Worlds) -> None:
    world(3).run(die, 1, 0, 1, False, expect_errors=True)
    assert [s.value for s in world(3).run(watch_talk)] == [heard_of(3)] * 3


def watch_talk() -> Seen:
    return watch(partial(talk, 60))


def die_on_the_way(dying: int, where: str) -> Seen:
    """Die before the ranks meet, after they have met, or once they are connected."""
    start_with(0)
    if dist.get_rank() == dying:
        if where == "before":
            kill()
        if where == "met":
            links.gloo.new_group = lambda *told, **how: kill()
        if where == "connected":
            connect = links.gloo.new_group
            links.gloo.new_group = lambda *told, **how: (connect(*told, **how), kill())
    return watch(partial(talk, STILL if where == "before" else LONG))


def test_a_death_before_all_have_met(three_worlds: list[World]) -> None:
    cases = [(0, "before"), (1, "met"), (0, "connected")]
    died = beside(three_worlds, die_on_the_way, cases, expect_errors=True)
    for (dying, where), outcomes in died.items():
        for seen in (seen for rank, seen in enumerate(outcomes) if rank != dying):
            assert seen.error == "RankError"
            assert seen.ranks == (dying,)
            assert f"rank {dying} " in seen.text
            assert seen.seconds < SOON
            # All ranks know who has come, once they have met.
            assert where == "before" or f": rank {dying} died" in seen.text


# --- ranks that cannot be connected -----------------------------------------------------------


def fail_to_connect(times: int, late: float) -> tuple[Seen, Seen]:
    """Have gloo fail some times to connect rank 1, as it may on a busy machine, at once or late."""
    start_with(0)
    connect, patience = links.gloo.new_group, links.PATIENCE
    left = itertools.count(times, -1)

    def fail(*told: Any, **how: Any) -> Any:
        if next(left) > 0:
            if not late:
                raise RuntimeError("Connection closed by peer")
            time.sleep(late)
        return connect(*told, **how)

    links.PATIENCE = STILL
    if dist.get_rank() == 1:
        links.gloo.new_group = fail
    try:
        seen = watch(partial(talk, LONG))
    finally:
        links.gloo.new_group, links.PATIENCE = connect, patience
    dist.barrier()
    return seen, watch(partial(talk, LONG))


@pytest.mark.parametrize(("times", "late"), [(1, 0), (3, 0), (1, STILL)])
def test_ranks_that_cannot_be_connected_try_again(world: Worlds, times: int, late: float) -> None:
    """The others were blamed for having broken off the connection."""
    for seen, again in world(3).run(fail_to_connect, times, late):
        if times == 1:
            assert seen.value == heard_of(3)
        else:
            assert (seen.error, seen.ranks) == ("RankError", ())
            assert "the ranks could not be connected: " in seen.text
        assert seen.seconds < LONG / 2 + SOON
        assert again.value == heard_of(3)


# --- ranks that stand still -------------------------------------------------------------------


STOPS = [(0, 0, 0, False), (1, 0, 2, True), (1, 1, 3, False)]


def test_a_rank_that_stands_still_is_named_in_time(
    three_worlds: list[World], tmp_path_factory: pytest.TempPathFactory
) -> None:
    cases = [(str(tmp_path_factory.mktemp("yard")), *stop) for stop in STOPS]
    for (_, stopping, before, at, _), outcomes in beside(three_worlds, stand_still, cases).items():
        for rank, (seen, missed, again) in enumerate(outcomes):
            if at == 3:
                assert seen.value == heard_of(3)
            else:
                assert seen.error == "RankError"
                if rank != stopping or (before, at) != (0, 0):
                    assert_missed(seen, stopping)
                    assert f"within {STILL:g}" in seen.text
                if rank != stopping:
                    assert STILL * 0.9 <= seen.seconds < 2 * STILL + SOON
            if rank != stopping:
                assert_missed(missed, stopping)
                assert missed.seconds < 2 * STILL + SOON
            assert again.value == heard_of(3)


def stand_still_and_go_on() -> Seen:
    """Have rank 1 stand still until the others have waited for its report for some time."""
    start_with(1)
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    looks = itertools.count()
    look = links.Link._recorded_failure

    def look_and_wake(link: links.Link) -> Any:
        # By its pauses, this is more than the second in which ranks that live report.
        if next(looks) == 45:
            os.kill(pids[1], signal.SIGCONT)
        return look(link)

    def strike(i: int, comm: Comm) -> None:
        if (i, comm.rank) == (1, 1):
            stop()

    if dist.get_rank() == 0:
        links.Link._recorded_failure = look_and_wake  # type: ignore[method-assign]
    try:
        return watch(partial(talk, STILL, 3, strike))
    finally:
        links.Link._recorded_failure = look  # type: ignore[method-assign]
        if dist.get_rank() == 0:
            os.kill(pids[1], signal.SIGCONT)  # a busy machine looks less often


def test_a_rank_that_goes_on_while_all_report_is_named(world: Worlds) -> None:
    for seen in world(3).run(stand_still_and_go_on):
        assert_missed(seen, 1, f"answer within {STILL:g}")


# --- the store --------------------------------------------------------------------------------


def lose_the_store(folder: str, port: int, how: str) -> tuple[Seen, Seen]:
    """Kill or stop rank 0, which keeps the store, as it does where no launcher does."""
    yard = Yard(folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    # The ranks of a busy machine may take their time to meet.
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=200))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    store.set_timeout(timedelta(seconds=20))
    talk(60)

    def strike(i: int, comm: Comm) -> None:
        if (i, comm.rank) == (1, 0):
            kill() if how == "killed" else yard.stand_still()

    links._STORE_SECONDS = 1.0
    seen = watch(partial(talk, STILL, 2, strike))
    again = watch(partial(talk, STILL)) if rank else seen
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
            assert seen.seconds < 2 * STILL + 1 + SOON
