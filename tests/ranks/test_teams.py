"""Ranks that talk in teams, each with a speaker: the same as ranks that are all connected."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from casnap import NewStore, StateDict, Store
from casnap.errors import DamagedError
from casnap.ranks import gloo
from casnap.ranks.joining import join
from casnap.ranks.link import Link
from casnap.ranks.topology import Mesh, Teams, Traffic, _teams
from tests.support.links import forget_links, links
from tests.support.pretended import pretended_host
from tests.support.ranks import RankDied, World
from tests.support.talks import STILL, carry, carry_by_all_means, die, err, stand_still
from tests.support.yard import OnPurposeError, Seen, Yard, heard_of, nothing_hangs, talk, watch
from tools import growth

Worlds = Callable[[int], World]
RANKS = 5  # teams of two: 0 speaks for 1, 2 for 3, and 4 is alone


@pytest.fixture(autouse=True)
def _teams_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASNAP_TEAM_RANKS", "2")


def test_teams_are_of_one_host() -> None:
    assert _teams([7, 7, 8, 8, 7, 8], 2) == [[0, 1], [2, 3], [4], [5]]
    assert _teams([7, 7, 7, 7, 8], 8) == [[0, 1, 2, 3], [4]]
    # Who is alone on a host, or knows none, goes with its like.
    assert _teams([1, 2, 3, 9, 9, 0, 0], 4) == [[0, 1, 2, 5], [3, 4], [6]]


# --- what is carried --------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[0], [0, 10, 4000], [0, 0, 6, 0], [1 << 21, 0, 2]])
def test_parts_of_any_size_arrive(world: Worlds, sizes: list[int]) -> None:
    world(RANKS).run(partial(carry, is_straight=False), sizes, "bytes")


def test_all_collectives(world: Worlds) -> None:
    world(RANKS).run(partial(fresh, carry_by_all_means))


def fresh(work: Callable[[], Any]) -> Any:
    forget_links()
    dist.barrier()
    return work()


def who_is_connected(per_host: int) -> tuple[str, list[int]]:
    """Talk, also of large parts; return the kind of connections, and with whom they are."""
    with pretended_host(per_host), join(None, 60, "the talk of teams") as comm:
        comm.all_gather(b"x" * 5000)
        (link,) = links()
        # Each rank has a part for the next one.
        to, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for nbytes in (1, 900, 1100, 65_500, 65_600, 300_000):
            parts = [b"%d" % comm.rank * nbytes if r == to else b"" for r in range(comm.size)]
            assert comm.all_to_all(parts)[before] == b"%d" % before * nbytes
        return type(link.connected).__name__, sorted(link.connected.peers)


def test_ranks_are_connected_with_their_team_and_speakers_with_each_other(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASNAP_TEAM_RANKS", "3")
    expected = [[1, 2, 3], [0], [0], [0, 4, 5], [3], [3]]
    found = world(6).run(who_is_connected, 3)
    assert found == [(Teams.__name__, peers) for peers in expected]
    monkeypatch.setenv("CASNAP_TEAM_RANKS", "6")
    found = world(6).run(who_is_connected, 3)
    assert found == [(Mesh.__name__, [r for r in range(6) if r != rank]) for rank in range(6)]


class PlainStore(dist.Store):  # type: ignore[misc, name-defined]
    """A store as a user may write one: it has the methods that torch's own groups need."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def add(self, key: str, number: int) -> int:
        return int(self._store.add(key, number))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait(keys, *timeout)


def talk_by_a_plain_store() -> list[bytes]:
    group, store = gloo.default_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo, "default_group", lambda: (group, PlainStore(store)))
        heard = fresh(partial(talk, 60))
        assert isinstance(links()[0]._store, PlainStore)
    forget_links()
    return heard


@pytest.mark.parametrize("size", [2, RANKS])
def test_a_store_that_cannot_compare_and_set(world: Worlds, size: int) -> None:
    assert world(size).run(talk_by_a_plain_store) == [heard_of(size)] * size


# --- ranks that fail --------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [[0], [3], [4], [1, 2], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("at", [0, 2])
def test_an_error_on_some_ranks_is_raised_on_all(
    world: Worlds, failing: list[int], at: int
) -> None:
    for error in (OnPurposeError("it broke"), DamagedError("it broke")):
        for rank, (seen, before, again, after) in enumerate(
            world(RANKS).run(err, failing, at, error)
        ):
            if rank in failing:
                assert (seen.error, seen.text) == (type(error).__name__, str(error))
            elif isinstance(error, DamagedError):
                assert (seen.error, seen.text) == ("DamagedError", f"rank {failing[0]}: it broke")
            else:
                assert (seen.error, seen.ranks) == ("RankError", tuple(failing))
            assert again.value == heard_of(RANKS)
            assert before == after


def lose_each_other() -> list[str]:
    fresh(partial(talk, 60))
    doing = "another talk" if dist.get_rank() == 3 else "the talk"
    return [watch(partial(talk, 60, doing=doing)).text, str(talk(60))]


def test_ranks_that_came_to_another_operation_are_named(world: Worlds) -> None:
    texts = {text for text, _ in world(RANKS).run(lose_each_other)}
    assert any("rank 3 came to another talk meanwhile" in text for text in texts)


@pytest.mark.parametrize("dying", [0, 1, 2, 4])
@pytest.mark.parametrize(("before", "at", "inside"), [(1, 1, False), (0, 2, True)])
def test_a_death_is_noticed_at_once(
    world: Worlds, dying: int, before: int, at: int, inside: bool
) -> None:
    outcomes = world(RANKS).run(die, dying, before, at, inside, expect_errors=True)
    for rank, outcome in enumerate(outcomes):
        if rank == dying:
            assert isinstance(outcome, RankDied)
            continue
        for seen in outcome:
            assert (seen.error, seen.ranks) == ("RankError", (dying,))


@pytest.mark.parametrize("stopping", [0, 1, 2, 3])
def test_a_rank_that_stands_still_is_named_in_time(
    world: Worlds, tmp_path: Path, stopping: int
) -> None:
    outcomes = world(RANKS).run(stand_still, str(tmp_path), stopping, 1, 1, True)
    for rank, (seen, missed, again) in enumerate(outcomes):
        if rank != stopping:
            assert (seen.error, seen.ranks) == ("RankError", (stopping,)), seen
            assert (missed.error, missed.ranks) == ("RankError", (stopping,)), missed
        assert again.value == heard_of(RANKS)


def stand_still_connecting(folder: str, stopping: int) -> tuple[Seen, Seen]:
    """Stop a rank that has come to a new group, before it is connected."""
    yard = Yard(folder)
    fresh(lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == stopping:
            connecting = Link._connected

            def stop(*args: Any) -> Any:
                patch.undo()
                yard.stand_still()
                return connecting(*args)

            patch.setattr(Link, "_connected", stop)
        seen = watch(partial(talk, STILL))
    if dist.get_rank() != stopping:
        yard.done(stopping)
    dist.barrier()
    again = watch(partial(talk, 60, doing="the talk of all"))
    nothing_hangs()
    return seen, again


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stopping"), [(5, 2), (2, 1)])
def test_a_rank_that_hangs_while_it_connects_is_named(
    world: Worlds, tmp_path: Path, size: int, stopping: int
) -> None:
    """It has come, as the others know; and the store, which answers, is not to blame."""
    for seen, again in world(size).run(stand_still_connecting, str(tmp_path), stopping):
        assert (seen.error, seen.ranks) == ("RankError", (stopping,)), seen
        assert f"rank {stopping} could not be connected" in seen.text
        assert again.value == heard_of(size)


def send_damaged(sender: int, where: int) -> tuple[Seen, Seen]:
    """Tell all something; of what one rank sends, one byte is turned on its way."""
    fresh(partial(talk, 60))
    (link,) = links()
    transport = link.connected
    assert isinstance(transport, Teams)
    send = transport._begin_sending
    kept: list[bytes] = []

    def damaged(target: int, common: bytes, *told: Any) -> list[Any]:
        turned = bytearray(common)
        if len(turned) > 5000:
            turned[where] ^= 0xFF
        # It lives on: what is sent is told apart by its id, which another object could get.
        kept.append(bytes(turned))
        return send(target, kept[-1], *told)

    def tell() -> None:
        with join(None, 60, "the talk of teams") as comm:
            comm.all_gather(b"%d" % comm.rank * 6000)

    if dist.get_rank() == sender:
        transport._begin_sending = damaged  # type: ignore[method-assign]
    seen = watch(tell)
    transport._begin_sending = send  # type: ignore[method-assign]
    # Who heard nothing of it learns of it in the next operation.
    watch(partial(talk, 60))
    dist.barrier()
    return seen, watch(partial(talk, 60))


@pytest.mark.parametrize("sender", [1, 2])
@pytest.mark.parametrize("where", [0, 3000])
def test_what_is_damaged_on_its_way_is_not_used(world: Worlds, sender: int, where: int) -> None:
    outcomes = world(RANKS).run(send_damaged, sender, where)
    assert all(again.value == heard_of(RANKS) for _, again in outcomes)
    # Who was sent what is damaged says so; the others hear of that.
    assert all(seen.error in ("", "RankError") for seen, _ in outcomes)
    blaming = [seen for seen, _ in outcomes if "damaged" in seen.text]
    assert blaming
    assert all(f"what rank {sender} sent came damaged" in seen.text for seen in blaming)


# --- takes and restores -----------------------------------------------------------------------


def sharded(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(400_000.0).reshape(1000, 400) + step
    rank = dist.get_rank()
    parts = {
        f"w{dim}": DTensor.from_local(
            whole.chunk(dist.get_world_size(), dim)[rank].clone(),
            mesh,
            [Shard(dim)],
            shape=whole.shape,
            stride=whole.stride(),
        )
        for dim in (0, 1)
    }
    return {"model": StateDict(**parts, same=whole + 1, own=torch.full((9,), float(rank + step)))}


def take_and_restore(path: str) -> tuple[Traffic, Traffic]:
    with pretended_host(3):
        return taken_and_restored(path)


def taken_and_restored(path: str) -> tuple[Traffic, Traffic]:
    store = Store(path, create=NewStore(chunk_size=64 << 10))
    store.take(sharded(1), "step_1")
    changed, unchanged = sharded(2), sharded(2)
    store.take(changed, "step_2")
    taking = growth.costing(lambda: store.take(unchanged, "step_3")).traffic
    for read_once in (True, False):
        for step in (1, 2):
            found, expected = sharded(9), sharded(step)
            restoring = growth.costing(
                partial(store[f"step_{step}"].restore, found, read_once=read_once)
            ).traffic
            for name, value in expected["model"].items():
                got = found["model"][name]
                if isinstance(value, DTensor):
                    value, got = value.to_local(), got.to_local()
                assert torch.equal(got, value), name
    return taking, restoring


def test_takes_and_restores_by_teams_on_hosts(
    world: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASNAP_TEAM_RANKS", "3")
    counts = world(6).run(take_and_restore, str(tmp_path / "store"))
    for taking, restoring in counts:
        assert taking.collectives <= 16
        assert restoring.collectives <= 12
    speakers, members = (0, 3), (1, 2, 4, 5)
    # One message to the speaker for each collective, and one more where it is long; a speaker has
    # one for the other speaker and one for each of its team.
    for rank in members:
        taking, _ = counts[rank]
        assert taking.messages <= 3 * taking.collectives
    for rank in speakers:
        taking, _ = counts[rank]
        assert taking.messages <= 3 * 3 * taking.collectives
    assert Store(tmp_path / "store", create=False).check().ok


def test_a_number_of_ranks_that_is_none(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASNAP_TEAM_RANKS", "many")
    outcomes = world(2).run(partial(fresh, partial(talk, 20)), expect_errors=True)
    assert all("CASNAP_TEAM_RANKS is 'many'" in str(outcome) for outcome in outcomes)
