"""Collectives that carry errors: what each rank gets from the others, also if one raises."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from casnap.errors import DamagedError, MismatchError, StateError, UnavailableError
from casnap.ranks import gloo, processes
from casnap.ranks import group as group_module
from casnap.ranks import link as link_module
from casnap.ranks.comm import Comm, SingleProcess
from casnap.ranks.joining import join
from tests.support.links import forget_links, links
from tests.support.ranks import Worlds
from tests.support.talks import carry, carry_by_all_means, err
from tests.support.yard import OnPurposeError, Seen, Yard, heard_of, talk, watch

# --- what is carried --------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[0], [0, 10, 4000, 0], [1 << 21, 0, 2]])
def test_parts_of_any_size_arrive(world: Worlds, sizes: list[int]) -> None:
    for size, kind in ((4, "bytes"), (3, "writable"), (2, "read-only")):
        world(size).run(carry, sizes, kind)


def test_all_collectives(world: Worlds) -> None:
    world(3).run(carry_by_all_means)


def test_a_single_process_talks_to_itself() -> None:
    with join(None, None, "the talk of one") as comm:
        assert isinstance(comm, SingleProcess)
        assert comm.all_gather(b"x") == [b"x"]
        assert comm.gather(b"x") == [b"x"]
        assert comm.broadcast(b"x") == comm.scatter([b"x"]) == b"x"
        comm.enter_phase("here")
        comm.await_end(0)
    with pytest.raises(StateError, match="init_process_group"):
        join(object(), None, "the talk of one")
    with pytest.raises(ValueError, match="above 0"):
        join(None, 0, "the talk of one")
    with pytest.raises(ValueError, match="above 0"):
        join(None, float("nan"), "the talk of one")


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("failing", "at"), [([1], 0), ([0, 2], 1), ([0, 1, 2], 2)])
def test_an_error_on_some_ranks_is_raised_on_all(
    world: Worlds, failing: list[int], at: int
) -> None:
    for error in (OnPurposeError("it broke"), DamagedError("it broke"), KeyboardInterrupt()):
        outcomes = world(3).run(err, failing, at, error)
        for rank, (seen, before, again, after) in enumerate(outcomes):
            if rank in failing:
                assert (seen.error, seen.text) == (type(error).__name__, str(error))
            elif isinstance(error, DamagedError):
                assert (seen.error, seen.text) == ("DamagedError", f"rank {failing[0]}: it broke")
            else:
                assert seen.error == "RankError"
                assert seen.ranks == tuple(failing)
                also = "" if len(failing) == 1 else f" (and rank {failing[1]})"
                what = f"the talk of ranks: rank {failing[0]} failed{also}: {type(error).__name__}"
                assert seen.text == f"{what}: {error}"
            # The group is in step still.
            assert again.value == heard_of(3)
            assert before == after


def reason_of_another_rank() -> str:
    def strike(i: int, comm: Comm) -> None:
        if (i, comm.rank) == (1, 1):
            raise UnavailableError("no", reason="denied")

    try:
        talk(60, 3, strike)
    except UnavailableError as e:
        return f"{e}: {e.reason}"
    return "no error"


def test_the_reason_of_an_unavailable_place_is_told_to_all(world: Worlds) -> None:
    assert world(2).run(reason_of_another_rank) == ["rank 1: no: denied", "no: denied"]


class UntellableError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def err_without_words(error: Exception) -> tuple[Seen, Seen]:
    def strike(i: int, comm: Comm) -> None:
        if (i, comm.rank) == (1, 1):
            raise error

    try:
        seen = watch(partial(talk, 60, 3, strike))
    except ZeroDivisionError:
        seen = watch(lambda: None)
    return seen._replace(value=None), watch(partial(talk, 60))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OnPurposeError("of \udcff"), r"OnPurposeError: of \udcff"),
        (UntellableError(), "UntellableError: its text cannot be told (ZeroDivisionError)"),
    ],
)
def test_an_error_is_told_whatever_its_text_is(world: Worlds, error: Exception, told: str) -> None:
    """The others waited for the text until their timeout."""
    outcomes = world(3).run(err_without_words, error)
    for rank, (seen, again) in enumerate(outcomes):
        if rank != 1:
            assert seen.text == f"the talk of ranks: rank 1 failed: {told}"
            assert seen.seconds < 60
        assert again.value == heard_of(3)


def err_at_the_end() -> Seen:
    def strike(i: int, comm: Comm) -> None:
        if i == 1 and comm.rank == 1:
            comm.leave()
            raise MismatchError("too late for the others")

    seen = watch(partial(talk, 60, 1, strike))
    assert talk(60) == heard_of(2)
    return seen


def test_an_error_after_the_last_collective_is_a_ranks_own(world: Worlds) -> None:
    first, second = world(2).run(err_at_the_end)
    assert first.value == heard_of(2)
    assert second.error == "MismatchError"


def talk_after_the_end() -> None:
    with join(None, 60, "the talk of ranks") as comm:
        comm.all_gather(b"")
    with pytest.raises(StateError, match="the talk of ranks: it has ended already"):
        comm.all_gather(b"")
    comm.fail(ValueError())  # has no effect
    comm.leave()


def test_what_has_ended_is_over(world: Worlds) -> None:
    world(2).run(talk_after_the_end)


def err_while_others_are_busy(folder: str) -> tuple[Seen, Seen]:
    link_module.PATIENCE = group_module.PATIENCE = 0.5
    yard = Yard(folder)

    def strike(i: int, comm: Comm) -> None:
        if i == 2 and comm.rank == 1:
            raise DamagedError("a chunk is missing")
        if i == 2:
            yard.wait("raised")

    seen = watch(partial(talk, 60, 3, strike))
    if dist.get_rank() == 1:
        yard.leave("raised")
    return seen, watch(partial(talk, 60))


def test_a_rank_that_fails_does_not_wait_for_busy_ranks(world: Worlds, tmp_path: Path) -> None:
    with world(3).fresh() as fresh:
        outcomes = fresh.run(err_while_others_are_busy, str(tmp_path))
    for rank, (seen, again) in enumerate(outcomes):
        assert seen.error == "DamagedError"
        assert seen.text == ("a chunk is missing" if rank == 1 else "rank 1: a chunk is missing")
        assert seen.seconds < 30  # the deadline is 60
        assert again.value == heard_of(3)


def interrupted_in_the_middle(error: type[BaseException]) -> tuple[Seen, Seen]:
    def raise_it(number: int, frame: object) -> None:
        raise error("from the handler")

    before = signal.signal(signal.SIGUSR1, raise_it)
    real = gloo.as_tensor

    def interrupt(part: Any) -> torch.Tensor:
        gloo.as_tensor = real
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(10)  # until it comes
        raise AssertionError

    def strike(i: int, comm: Comm) -> None:
        if i == 1 and comm.rank == 1:
            gloo.as_tensor = interrupt

    try:
        return watch(partial(talk, 60, 3, strike)), watch(partial(talk, 60))
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_within_a_collective_breaks_it_off_for_all(
    world: Worlds, error: type[BaseException]
) -> None:
    outcomes = world(3).run(interrupted_in_the_middle, error)
    for rank, (seen, again) in enumerate(outcomes):
        assert seen.error == (error.__name__ if rank == 1 else "RankError")
        assert rank == 1 or f"rank 1 failed: {error.__name__}: from the handler" in seen.text
        assert seen.seconds < 30  # the deadline is 60
        assert again.value == heard_of(3)


# --- groups -----------------------------------------------------------------------------------


def talk_in_groups() -> list[Any]:
    rank = dist.get_rank()
    groups = [dist.new_group(members) for members in ([1, 2], [0, 1], [2, 0])]
    heard: list[Any] = []
    for _ in range(2):
        for members, group in zip(([1, 2], [0, 1], [2, 0]), groups, strict=True):
            if rank in members:
                heard.append(talk(60, 2, pg=group) == heard_of(2))
            else:
                with pytest.raises(StateError, match="not in the process group"):
                    join(group, 60, "nothing")
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(join(alone, 60, "the talk of one"), SingleProcess)
    return heard


def test_groups_of_some_ranks(world: Worlds) -> None:
    assert world(3).run(talk_in_groups) == [[True] * 4] * 3


def fail_in_one_group() -> tuple[Seen, Seen]:
    """Groups that share rank 1: one breaks, which does the other no harm."""
    rank = dist.get_rank()
    left, right = dist.new_group([0, 1]), dist.new_group([1, 2])
    own = left if rank == 0 else right

    def strike(i: int, comm: Comm) -> None:
        if (rank, i) == (2, 1):
            raise OnPurposeError("it broke")

    if rank == 1:
        talk(60, pg=left)
    seen = watch(partial(talk, 60, 2, strike, pg=own)) if rank else watch(partial(talk, 60, pg=own))
    again = watch(partial(talk, 60, pg=own))
    if rank == 1:
        talk(60, pg=left)
    return seen, again


def test_a_group_that_fails_does_others_no_harm(world: Worlds) -> None:
    (zero, zero_again), (one, one_again), (two, two_again) = world(3).run(fail_in_one_group)
    assert zero.value == zero_again.value == one_again.value == two_again.value == heard_of(2)
    assert one.text == "the talk of ranks: rank 1 failed: OnPurposeError: it broke"
    assert two.error == "OnPurposeError"


def talk_while_another_goes_on(folder: str) -> list[str]:
    """Begin an operation while one goes on in the background: it waits for its turn."""
    yard, order = Yard(folder), list[str]()
    begun = threading.Event()

    def background() -> None:
        with join(None, 60, "the talk behind") as comm:
            comm.all_gather(b"")
            begun.set()
            yard.wait("next")
            comm.all_gather(b"")
            order.append("first")

    thread = threading.Thread(target=background)
    thread.start()
    assert begun.wait(60)
    if dist.get_rank() == 0:
        threading.Timer(0.2, lambda: yard.leave("next")).start()
    talk(60, 2)
    order.append("second")
    thread.join()
    return order


def test_operations_take_turns(world: Worlds, tmp_path: Path) -> None:
    assert world(2).run(talk_while_another_goes_on, str(tmp_path)) == [["first", "second"]] * 2


def lose_a_turn() -> Seen:
    """Begin an operation and forget it, as an interrupt can make it happen."""
    join(None, 60, "nothing")
    return watch(partial(talk, 60))


def test_a_lost_operation_frees_its_turn(world: Worlds) -> None:
    assert [seen.value for seen in world(2).run(lose_a_turn)] == [heard_of(2)] * 2


def begin_anew(port: int) -> list[list[bytes]]:
    """Destroy the default group and make another."""
    rank, size = dist.get_rank(), dist.get_world_size()
    heard = []
    for i in range(3):
        dist.destroy_process_group()
        server = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        store = dist.PrefixStore(str(i), server)
        # On a busy machine gloo may fail on one rank, and another wait for it five times this long.
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20)
        )
        heard.append(talk(60, 2))
        if i == 1:
            # What is left in the store of an older group is not taken for a newer one.
            forget_links()
            heard.append(talk(60, 2))
    return heard


def test_process_groups_come_and_go(world: Worlds) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with world(2).fresh() as fresh:
        assert fresh.run(begin_anew, server.port) == [[heard_of(2)] * 4] * 2


# --- forks ------------------------------------------------------------------------------------


def fork_in_between() -> list[bytes]:
    """Fork, as data loaders do, between operations and while one goes on."""
    talk(60)
    check_fork()
    with join(None, 60, "the talk of ranks") as comm:
        comm.all_gather(b"")
        check_fork()
        comm.all_gather(b"")
    return talk(60)


def check_fork() -> None:
    pid = os.fork()
    if pid == 0:
        fine = not links()
        os._exit(0 if fine else 1)
    ended = time.monotonic() + 30
    while (answer := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < ended:
        time.sleep(0.01)
    if answer == (0, 0):
        os.kill(pid, signal.SIGKILL)
    assert answer == (pid, 0)


def test_forks_leave_the_parents_alone(world: Worlds) -> None:
    assert world(2).run(fork_in_between) == [heard_of(2)] * 2


def test_a_process_is_known_by_more_than_its_number() -> None:
    own = processes.Process.current()
    if not own.host:
        assert not own.has_ended(own.host)
        return
    assert not own.has_ended(own.host)
    assert own._replace(start=own.start + 1).has_ended(own.host)
    assert not own._replace(start=own.start + 1).has_ended(own.host + 1)
    pid = os.fork()
    if pid == 0:
        signal.pause()
    child = processes.Process(own.host, pid, int(processes._stat(pid)[19]))
    assert not child.has_ended(own.host)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert child.has_ended(own.host)  # a zombie
    os.waitpid(pid, 0)
    assert child.has_ended(own.host)
