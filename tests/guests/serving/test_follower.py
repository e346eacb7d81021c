"""Followers in a process: live tensors are patched between forwards, whole versions at a time."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from casnap import NewStore, StateDict, Store
from casnap.backends.base import Target
from casnap.errors import (
    CasnapError,
    DamagedError,
    EntryNotFoundError,
    MismatchError,
    SnapshotNotFoundError,
)
from casnap.runtime import buffers
from casnap.runtime.typing import override
from casnap.serving import AppliedVersion, Follower, FollowerOptions, PullOptions
from tests.support.bitwise import assert_same
from tests.support.ranks import Worlds
from tests.support.remote import RemoteDouble

CHUNK = 64 << 10
ROWS = 100
"""Of 1,000 float32 numbers: seven cells of 16 rows, the last one of four."""


class Net(nn.Module):
    """Weights that all have one number, so that a mix of two versions shows."""

    def __init__(self, value: float = -1.0) -> None:
        super().__init__()
        value = float(value)
        self.large = nn.Parameter(torch.full((ROWS, 1000), value))
        self.narrow = nn.Parameter(torch.full((70_000,), value, dtype=torch.bfloat16))
        self.tied = self.narrow
        self.register_buffer("small", torch.full((3,), value))
        self.register_buffer("scalar", torch.tensor(value))
        self.register_buffer("empty", torch.zeros(0, 3))

    def values(self) -> set[float]:
        """Return the numbers that it holds."""
        held = [t for t in self.state_dict().values() if t.numel()]
        return {float(x) for t in held for x in t.reshape(-1).unique()}


def take(store: Store, value: float, name: str | None = None, **options: Any) -> None:
    store.take({"model": Net(value)}, name or f"run/{value:g}", **options)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store of one version."""
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    take(store, 0)
    return store


@pytest.mark.parametrize(
    "wrong",
    [{"every": 0}, {"every": "2"}, {"timeout": -1}, {"timeout": "soon"}, {"rename": "s/a/b/"}],
)
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        FollowerOptions(**wrong)


def test_options_of_another_kind(store: Store) -> None:
    with pytest.raises(TypeError, match="options= is a FollowerOptions"):
        Follower(store.uri, Net(), options=PullOptions(), interval=None)  # type: ignore[arg-type]


def following(store: Store, target: Any, **options: Any) -> Follower:
    return Follower(store.uri, target, options=FollowerOptions(**options), interval=None)


# --- versions -----------------------------------------------------------------------------------


def test_it_holds_the_newest_version(store: Store) -> None:
    net = Net()
    large = net.large
    address = net.large.data_ptr()
    follower = following(store, net)
    assert net.values() == {0.0}
    assert follower.version.name == "run/0"
    assert follower.version.commit == store["run/0"].commit_id
    assert not follower.update()
    for value in (1, 2, 3):
        take(store, value)
    assert follower.update()
    with follower.applied() as version:
        assert version.name == "run/3"
        assert net.values() == {3.0}
    assert net.large is large
    assert net.large.data_ptr() == address


def test_a_thread_follows(store: Store) -> None:
    seen = list[AppliedVersion]()
    net = Net()
    with Follower(store.uri, net, interval=0.01, on_version=seen.append) as follower:
        take(store, 1)
        while follower.version.name != "run/1":
            time.sleep(0.01)
        assert net.values() == {1.0}
        assert [v.name for v in seen] == ["run/1"]
        assert follower.error is None
    take(store, 2)
    time.sleep(0.1)
    assert net.values() == {1.0}


def test_a_tag_is_moved_and_moved_back(store: Store) -> None:
    for value in (1, 2):
        take(store, value)
    with pytest.raises(SnapshotNotFoundError, match="tagged 'stable'"):
        following(store, Net(), tag="stable")
    net = Net()
    store.publish("stable", "run/1")
    follower = following(store, net, tag="stable")
    assert net.values() == {1.0}
    for value in (2, 0, 1):
        store.publish("stable", f"run/{value}")
        assert follower.update()
        assert net.values() == {float(value)}


def test_which_snapshots_count(store: Store) -> None:
    take(store, 5, "other/5")
    net = Net()
    follower = following(store, net, match="run/*")
    assert net.values() == {0.0}
    take(store, 6, "other/6")
    assert not follower.update()
    Follower(f"{store.uri}/other", net, interval=None)
    assert net.values() == {6.0}
    with pytest.raises(EntryNotFoundError, match="nothing below 'weights'"):
        following(store, net, path="weights")


# --- what is read and copied --------------------------------------------------------------------


def test_only_chunks_that_changed_are_copied(store: Store) -> None:
    state = {"w": torch.zeros(ROWS, 1000), "v": torch.zeros(50_000), "b": torch.zeros(4)}
    store.take({"model": StateDict(state)}, "state/0")
    live = {name: torch.ones_like(tensor) for name, tensor in state.items()}
    follower = Follower(f"{store.uri}/state", live, interval=None)
    assert follower.version.copied_bytes == sum(t.nbytes for t in state.values())
    state["w"][17] = 1
    state["w"][33] = 2
    state["w"][99] = 3
    state["b"][0] = 4
    store.take({"model": StateDict(state)}, "state/1")
    assert follower.update()
    assert follower.version.copied_bytes == (32 + 4) * 4000 + 16
    for name, tensor in state.items():
        assert torch.equal(live[name], tensor), name


class Counting(RemoteDouble):
    """Counts the bytes that are read of packs."""

    nbytes = 0

    @override
    def read_into(self, key: str, targets: Sequence[Target]) -> list[int]:
        sizes = super().read_into(key, targets)
        self.nbytes += sum(sizes) if key.startswith("packs/") else 0
        return sizes


def test_going_back_reads_only_what_differs(tmp_path: Path) -> None:
    """Also over versions that it never held."""
    backend = Counting(str(tmp_path / "bucket"))
    store = Store(backend, create=NewStore(chunk_size=CHUNK))
    weights = torch.arange(1000.0 * ROWS).reshape(ROWS, 1000)
    versions = []
    for step in range(4):
        weights[20 * step] += 1  # each in a cell of its own, of 16 rows
        versions.append(weights.clone())
        store.take({"model": StateDict(w=weights)}, f"run/{step}")
    store.publish("stable", "run/3")
    live = {"w": torch.zeros_like(weights)}
    follower = Follower(backend, live, options=FollowerOptions(tag="stable"), interval=None)
    for step, cells in ((2, 1), (0, 2), (3, 3)):
        store.publish("stable", f"run/{step}")
        backend.nbytes = 0
        assert follower.update()
        assert torch.equal(live["w"], versions[step])
        assert follower.version.copied_bytes == cells * 64_000
        assert cells * 64_000 <= backend.nbytes < cells * 64_000 + 16_000  # and nodes


def moved(weights: torch.Tensor, step: int) -> torch.Tensor:
    """Return bfloat16 weights of which 1 % have moved by one unit in the last place."""
    drawn = torch.Generator().manual_seed(step)
    bits = weights.view(torch.int16).clone()
    bits[torch.rand(weights.shape, generator=drawn) < 0.01] += 1
    return bits.view(torch.bfloat16)


def run_of_deltas(tmp_path: Path, count: int) -> tuple[str, list[torch.Tensor]]:
    """Return a bucket to which versions can be copied, each a delta upon the one before."""
    here, there = (
        Store(tmp_path / "here", create=NewStore(chunk_size=CHUNK)),
        str(tmp_path / "bucket"),
    )
    weights = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    versions = []
    for step in range(count):
        weights = moved(weights, step)
        versions.append(weights)
        here.take({"model": StateDict(w=weights)}, f"run/{step}")
    return there, versions


def send(tmp_path: Path, there: str, step: int) -> int:
    """Copy a version to the bucket; return the bytes that were sent."""
    destination = Store(RemoteDouble(there), create=NewStore(chunk_size=CHUNK))
    return Store(tmp_path / "here").copy(f"run/{step}", to=destination).sent_bytes


def test_it_reads_deltas_upon_what_it_holds(tmp_path: Path) -> None:
    there, versions = run_of_deltas(tmp_path, 4)
    send(tmp_path, there, 0)
    backend = Counting(there)
    live = {"w": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    follower = Follower(backend, live, interval=None)
    for step in (1, 2, 3):
        sent = send(tmp_path, there, step)
        assert sent < versions[0].nbytes / 10
        backend.nbytes = 0
        assert follower.update()
        assert torch.equal(live["w"], versions[step])
        assert backend.nbytes <= 1.1 * sent
        assert follower.version.copied_bytes == versions[0].nbytes
    backend.reset()
    assert not follower.update()
    assert backend.count <= 2, backend.log


@pytest.mark.parametrize("changes", ["all", "a chunk", "nothing"])
def test_tensors_that_somebody_has_replaced_are_read_whole(store: Store, changes: str) -> None:
    net = Net()
    with Follower(store.uri, net, interval=None) as follower:
        zeros = {name: torch.full_like(t, -2.0) for name, t in net.state_dict().items()}
        net.load_state_dict(zeros, assign=True)
        newest = Net(0)
        with torch.no_grad():
            if changes == "a chunk":
                newest.large[0] = 1
            elif changes == "all":
                newest = Net(1)
        store.take({"model": newest}, "run/next")
        assert follower.update()
        assert_same(net.state_dict(), newest.state_dict())


def put_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.full_like(tensor, -2.0)


def put_data_at_the_same_address(tensor: torch.Tensor) -> None:
    """Free the storage first: the system gives the next one its address, most of the time."""
    tensor.data = torch.empty(0)
    tensor.data = torch.full((ROWS, 1000), -2.0)


def write_in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor[40:60] = -2.0


def turn(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(1000, ROWS).t()


OTHERS = [put_data, put_data_at_the_same_address, write_in_place, turn]


@pytest.mark.parametrize("write", OTHERS)
@pytest.mark.parametrize("when", ["before", "between"])
def test_tensors_that_somebody_else_has_written_are_read_whole(
    store: Store, write: Callable[[torch.Tensor], None], when: str
) -> None:
    net, newest = Net(), Net(0)
    with torch.no_grad():
        newest.large.copy_(torch.arange(ROWS * 1000).view(ROWS, 1000))
    store.take({"model": newest}, "run/1")
    follower = following(store, net)
    with torch.no_grad():
        newest.large[0] += 1
    store.take({"model": newest}, "run/2")
    if when == "before":
        write(net.large)
        assert follower.update()
    else:
        update = threading.Thread(target=follower.update)
        with follower.applied():
            update.start()
            # Until the version was staged and waits: then no other forward gets in.
            while not is_waiting(follower):
                pass
            write(net.large)
        update.join()
    assert follower.version.name == "run/2"
    assert_same(net.state_dict(), newest.state_dict())
    assert follower.version.copied_bytes == newest.large.nbytes
    # What the follower itself wrote does not count.
    with torch.no_grad():
        newest.large[0] += 1
    store.take({"model": newest}, "run/3")
    assert follower.update()
    assert follower.version.copied_bytes == 16 * 4000
    assert_same(net.state_dict(), newest.state_dict())


def is_waiting(follower: Follower) -> bool:
    entered = threading.Event()

    def enter() -> None:
        with follower.applied():
            entered.set()

    threading.Thread(target=enter).start()
    return not entered.wait(0.1)


def test_it_casts_and_fills_any_layout(store: Store) -> None:
    state = {"w": torch.randn(ROWS, 1000), "v": torch.randn(50_000)}
    store.take({"model": StateDict(state)}, "state/0")
    turned = torch.zeros(1000, ROWS, dtype=torch.float64).t()
    live = {"w": turned, "v": torch.zeros(50_000, dtype=torch.bfloat16)}
    follower = Follower(f"{store.uri}/state", live, interval=None)
    for step in (1, 2):
        assert torch.equal(turned, state["w"].double())
        assert torch.equal(live["v"], state["v"].bfloat16())
        state["w"][50] = step
        state["v"][7] = step
        store.take({"model": StateDict(state)}, f"state/{step}")
        assert follower.update()
    assert turned[50, 3] == 2


def test_names_are_changed(store: Store) -> None:
    state = {"module.w": torch.ones(9), "module.extra": torch.ones(2)}
    store.take({"model": StateDict(state)}, "state/0")
    live = {"w": torch.zeros(9)}
    place = f"{store.uri}/state"
    with pytest.raises(MismatchError, match=r"missing.*\n.*w"):
        Follower(place, live, interval=None)
    Follower(
        place,
        live,
        options=FollowerOptions(
            rename=lambda name: None if "extra" in name else name.removeprefix("module.")
        ),
        interval=None,
    )
    assert live["w"].sum() == 9
    live["w"].zero_()
    Follower(
        place, live, options=FollowerOptions(rename={"module.w": "w"}, strict=False), interval=None
    )
    assert live["w"].sum() == 9


def test_another_shape_changes_nothing(store: Store) -> None:
    net = Net()
    follower = following(store, net, strict=False)
    store.take({"model": StateDict(large=torch.ones(ROWS, 999), narrow=net.narrow)}, "run/x")
    with pytest.raises(MismatchError, match="of another shape"):
        follower.update()
    assert net.values() == {0.0}
    take(store, 2)
    assert follower.update()
    assert net.values() == {2.0}


# --- forwards -----------------------------------------------------------------------------------


def test_no_forward_sees_a_mix(store: Store) -> None:
    net = Net()
    mixes, forwards, stopping = list[set[float]](), [0, 0], threading.Event()

    def serve(number: int) -> None:
        while not stopping.is_set():
            with follower.applied() as version:
                values = net.values()
                if values != {float(version.name.removeprefix("run/"))}:
                    mixes.append(values)
            forwards[number] += 1

    with Follower(store.uri, net, interval=0.001) as follower:
        threads = [threading.Thread(target=serve, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for value in range(1, 11):
            take(store, value)
            before = list(forwards)
            while follower.version.name != f"run/{value}" or forwards == before:
                time.sleep(0.001)
        stopping.set()
        for thread in threads:
            thread.join()
    assert mixes == []
    assert min(forwards) > 10


# --- failures -----------------------------------------------------------------------------------


def damage_new_packs(store: Store, before: set[Path]) -> None:
    for pack in set(Path(store.uri).rglob("packs/*/*")) - before:
        raw = bytearray(pack.read_bytes())
        if b"CASNAPp1" in raw[-44:]:
            for at in range(0, len(raw) - 200, CHUNK):
                raw[at + 100] ^= 1
            pack.chmod(0o644)
            pack.write_bytes(raw)


def test_a_damaged_version_changes_nothing(store: Store) -> None:
    net = Net()
    follower = following(store, net)
    before = set(Path(store.uri).rglob("packs/*/*"))
    state = {name: tensor.clone() for name, tensor in Net(1).state_dict().items()}
    state["large"][5] = 5
    store.take({"model": StateDict(state)}, "run/bad")
    damage_new_packs(store, before)
    with pytest.raises(DamagedError):
        follower.update()
    assert net.values() == {0.0}
    assert follower.version.name == "run/0"
    take(store, 2)
    assert follower.update()
    assert net.values() == {2.0}


def test_the_thread_goes_on_after_a_failure(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    with Follower(store.uri, net, interval=0.01) as follower:
        store.take({"model": StateDict(large=torch.ones(3))}, "run/x")
        while follower.error is None:
            time.sleep(0.01)
        assert "fails, and is tried again" in caplog.text
        take(store, 2)
        while follower.version.name != "run/2" or follower.error is not None:
            time.sleep(0.01)
        assert net.values() == {2.0}


def test_a_copy_that_fails_half_way_is_never_served(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net()
    follower = following(store, net)
    take(store, 1)
    real, calls = buffers.copy, list[int]()

    def failing(target: memoryview, source: memoryview | bytes) -> None:
        calls.append(len(target))
        if len(calls) == 2:
            raise MemoryError
        real(target, source)

    patch = follower._weights.stage(store["run/1"].contents)
    monkeypatch.setattr(buffers, "copy", failing)
    with pytest.raises(MemoryError):
        follower._apply(patch)
    monkeypatch.undo()
    with (
        pytest.raises(CasnapError, match="half way, so the tensors hold a mix"),
        follower.applied(),
    ):
        pass


def test_a_version_that_is_deleted_and_collected(store: Store) -> None:
    net = Net()
    follower = following(store, net)
    take(store, 1)
    assert follower.update()
    store.delete("run/1")
    for _ in range(2):
        store.gc(grace=0)
    assert follower.update(), "what is left is the newest"
    assert net.values() == {0.0}


def test_a_store_that_is_rolled_back(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.uri, tmp_path / "backup")
    net = Net()
    follower = following(store, net)
    take(store, 1)
    assert follower.update()
    shutil.rmtree(store.uri)
    shutil.copytree(tmp_path / "backup", store.uri)
    assert follower.update()
    assert net.values() == {0.0}
    take(Store(store.uri), 2)
    assert follower.update()
    assert net.values() == {2.0}


# --- ranks --------------------------------------------------------------------------------------


def parallel(value: float) -> dict[str, torch.Tensor]:
    """Return weights of which each rank holds slices."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = {name: t.detach() for name, t in Net(value).state_dict().items()}
    return {
        "large": distribute_tensor(full["large"], mesh, [Shard(1)], src_data_rank=None),
        "narrow": distribute_tensor(full["narrow"], mesh, [Shard(0)], src_data_rank=None),
        "tied": full["tied"].clone(),
        "small": full["small"].clone(),
        "scalar": full["scalar"].clone(),
        "empty": full["empty"],
    }


def held(live: dict[str, torch.Tensor]) -> set[float]:
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in live.values()]
    return {float(x) for t in parts if t.numel() for x in t.reshape(-1).unique()}


def serve_as_ranks(path: str, versions: int) -> list[str]:
    live, alone = parallel(-1), dist.new_group([0])
    seen = []
    with Follower(path, live, interval=0.01) as follower:
        share = follower.version.copied_bytes
        whole = sum(t.nbytes for t in Net().state_dict().values())
        assert share < 0.8 * whole, "a rank copies its slices alone"
        published = 0
        while len(set(seen)) <= versions:
            with follower.applied() as version:
                value = float(version.name.removeprefix("run/"))
                assert held(live) == {value}
                # What a forward of tensor parallelism does: all ranks add up.
                total = live["large"].to_local().sum()
                dist.all_reduce(total)
                assert total.item() == value * ROWS * 1000, "the ranks hold different versions"
                seen.append(version.name)
            if dist.get_rank() == 0 and published < versions and value == published:
                published += 1
                take(Store(path), published, pg=alone)
    return seen


def test_ranks_take_a_version_before_the_same_forward(store: Store, world: Worlds) -> None:
    one, other = world(2).run(serve_as_ranks, store.uri, 6, timeout=60)
    assert one == other
    assert set(one) == {f"run/{i}" for i in range(7)}


def serve_with_slow_copies(path: str) -> list[str]:
    copy = buffers.copy

    def slow(target: memoryview, source: memoryview | bytes) -> None:
        time.sleep(0.05)
        copy(target, source)

    with mock.patch.object(buffers, "copy", slow):
        return serve_as_ranks(path, 2)


def test_ranks_look_on_after_copies_that_last_longer_than_the_interval(
    store: Store, world: Worlds
) -> None:
    """The thread that looks meets a copy of the thread that serves."""
    one, other = world(2).run(serve_with_slow_copies, store.uri, timeout=60)
    assert one == other
    assert set(one) == {f"run/{i}" for i in range(3)}


def serve_gathered(path: str) -> None:
    """FSDP2 leaves weights whole after a forward, and while a version is staged."""
    net, alone = torch.nn.Linear(300, 400), dist.new_group([0])
    x = torch.ones(2, 300)
    if dist.get_rank() == 0:
        Store(path).take({"model": net}, "run/0", pg=alone)
    dist.barrier()
    live = fully_shard(torch.nn.Linear(300, 400), mesh=init_device_mesh("cpu", (2,)))
    with Follower(path, live, interval=None) as follower, torch.no_grad():
        for version in range(1, 4):
            torch.nn.init.constant_(net.weight, version)
            torch.nn.init.constant_(net.bias, version)
            if dist.get_rank() == 0:
                Store(path).take({"model": net}, f"run/{version}", pg=alone)
            dist.barrier()
            with follower.applied():
                live(x)
            follower.update()
            for _ in range(2):
                with follower.applied():
                    assert torch.equal(live(x), net(x))
                live.reshard()


def test_weights_that_are_gathered_are_followed(tmp_path: Path, world: Worlds) -> None:
    world(2).run(serve_gathered, str(tmp_path / "store"), timeout=60)


def fail_on_one_rank(path: str) -> None:
    live, alone = parallel(-1), dist.new_group([0])
    follower = Follower(path, live, interval=None)
    if dist.get_rank() == 0:
        take(Store(path), 1, pg=alone)
    dist.barrier()
    small = live.pop("small")
    if dist.get_rank() == 0:
        live["small"] = small
    with pytest.raises(CasnapError):
        follower.update()
    assert held(live) == {0.0}
    with follower.applied() as version:
        assert version.name == "run/0"
    live["small"] = small
    assert follower.update()
    assert held(live) == {1.0}
    # One that fits no rank stands in the way of none after it.
    if dist.get_rank() == 0:
        Store(path).take({"model": StateDict(large=torch.ones(3))}, "run/x", pg=alone)
    dist.barrier()
    with pytest.raises(CasnapError):
        follower.update()
    if dist.get_rank() == 0:
        take(Store(path), 2, pg=alone)
    dist.barrier()
    assert follower.update()
    assert held(live) == {2.0}


def test_if_one_rank_cannot_stage_none_takes_the_version(store: Store, world: Worlds) -> None:
    world(2).run(fail_on_one_rank, store.uri, timeout=60)


def move_back_what_is_staged(path: str) -> list[str]:
    live, alone, store = parallel(-1), dist.new_group([0]), Store(path)
    leads = dist.get_rank() == 0
    if leads:
        store.publish("stable", "run/0")
        for value in (1, 2):
            take(store, value, pg=alone)
    dist.barrier()
    seen = []

    def staged() -> str:
        return "" if follower._staged is None else follower._staged.contents.name

    with Follower(path, live, options=FollowerOptions(tag="stable"), interval=0.01) as follower:
        if leads:
            store.publish("stable", "run/2")
            while staged() != "run/2":
                time.sleep(0.01)
            # One note speaks for all ranks.
            (state,) = store.followers()
            assert getattr(state.serving, "name", None) == "run/0"
        dist.barrier()
        # Here the other rank hears of it.
        with follower.applied() as version:
            seen.append(version.name)
        while staged() != "run/2":
            time.sleep(0.01)
        dist.barrier()
        if leads:
            store.publish("stable", "run/1")
            deadline = time.monotonic() + 5
            while staged() != "run/1" and time.monotonic() < deadline:
                time.sleep(0.01)
        while seen[-1] == "run/0":
            dist.barrier()
            with follower.applied() as version:
                seen.append(version.name)
            time.sleep(0.02)
        assert held(live) == {1.0}
    return seen


def test_ranks_go_to_an_older_version_at_once_if_the_newer_is_withdrawn(
    store: Store, world: Worlds
) -> None:
    one, other = world(2).run(move_back_what_is_staged, store.uri, timeout=60)
    assert one == other
    assert set(one) == {"run/0", "run/1"}
