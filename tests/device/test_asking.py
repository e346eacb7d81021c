"""Takes that ask the store about what a device holds: what crosses, and when a device lies."""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from casnap import NewStore, PendingSnapshot, Retention, StateDict, Store
from casnap.errors import DeviceError, FencedError
from casnap.integrations.dcp import CasnapWriter
from casnap.state import device_hash
from casnap.state.device_hash import Batch
from casnap.storage import Reliance
from casnap.take import device_asking, staging
from casnap.take.device_asking import Asking
from casnap.take.take import _Steps
from tests.support import hashing_device
from tests.support.garbage import forget_collectors
from tests.support.late_device import counts, module
from tests.support.mounts import tmpfs
from tests.support.remote import RemoteDouble
from tests.support.staying import known_stays

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CHUNK = 64 << 10
# What crosses of a chunk that stays: its digest, and a word.
DIGEST = 36
ROWS = 40
"""Each tensor has so many rows, of a chunk each."""
WRONG = "late:0 does not hash as it should: the bytes of a chunk"
HOW = ["take", "async_take"]


@pytest.fixture(autouse=True)
def hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    hashing_device.install(monkeypatch, "late:0", "late:1")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store that is not empty: in an empty one nothing is asked."""
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    store.take({"s": StateDict(n=torch.zeros(CHUNK))}, "first")
    return store


def weights(*seeds: int) -> dict[str, torch.Tensor]:
    """Return tensors of the host, with whole numbers."""
    shape = ROWS, CHUNK // 4
    return {
        f"w{s}": torch.randint(999, shape, generator=torch.Generator().manual_seed(s)).float()
        for s in seeds
    }


def to_device(tensors: dict[str, torch.Tensor], index: int = 0) -> dict[str, torch.Tensor]:
    there = {name: tensor.to(f"late:{index}") for name, tensor in tensors.items()}
    module.synchronize(index)
    return there


def take(store: Store, live: dict[str, torch.Tensor], name: str, how: str = "take") -> int:
    """Take a snapshot that has to hold what is there now; return the bytes that crossed."""
    expected = {name: tensor.cpu() for name, tensor in live.items()}
    counts.clear()
    app_state = {"s": StateDict(**live)}
    if how == "take":
        snapshot = store.take(app_state, name)
    else:
        pending = store.async_take(app_state, name)
        for tensor in live.values():
            tensor.add_(1)  # what the call relies on, it must have looked at
        snapshot = pending.wait()
        for tensor in live.values():
            tensor.sub_(1)
    crossed = counts["to host"]
    for key, tensor in expected.items():
        assert torch.equal(snapshot.read_object(f"s/{key}"), tensor), key
    return crossed


# --- what crosses -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOW)
def test_of_what_did_not_change_only_digests_cross_and_a_sample(store: Store, how: str) -> None:
    live = to_device(weights(1, 2))
    take(store, live, "a", how)
    assert take(store, live, "b", how) == 2 * ROWS * DIGEST + CHUNK
    assert store.snapshots()[-1].stats.new_bytes < CHUNK


@pytest.mark.parametrize("how", HOW)
def test_only_the_rows_that_changed_cross(store: Store, how: str) -> None:
    live = to_device(weights(1, 2))
    take(store, live, "a", how)
    for row in (0, 7, 8, ROWS - 1):
        live["w1"][row] += 1
    assert take(store, live, "b", how) == 2 * ROWS * DIGEST + 5 * CHUNK


def test_each_device_is_asked_and_has_a_sample(store: Store) -> None:
    host = weights(1, 2, 3)
    store.take({"s": StateDict(**host)}, "a")
    live = to_device({"w1": host["w1"]}) | to_device({"w2": host["w2"]}, 1) | {"w3": host["w3"]}
    assert take(store, live, "b") == 2 * (ROWS * DIGEST + CHUNK)


@pytest.mark.parametrize("how", HOW)
def test_a_leaf_on_two_devices_of_which_one_hashes(
    store: Store, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    hashing_device.install(monkeypatch, "late:0")
    device_hash._in_the_making.add(torch.device("late:1"))
    host = weights(1)["w1"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shards = [
            Shard.from_tensor_and_offsets(part, [i * ROWS // 2, 0], 0)
            for i, half in enumerate(host.chunk(2))
            for part in to_device({"w": half}, i).values()
        ]
        sharded = ShardedTensor._init_from_local_shards(shards, host.shape)
        for name in ("a", "b"):
            taken = getattr(store, how)({"s": StateDict(x=sharded)}, name)
            snapshot = taken if how == "take" else taken.wait()
            assert torch.equal(snapshot.read_object("s/x"), host)
    finally:
        dist.destroy_process_group()


def test_layouts_and_parts_of_tensors(store: Store) -> None:
    """Turned ones are made contiguous first. What begins within a word crosses, as it did."""
    base = to_device(weights(1))["w1"]
    halves = base.bfloat16().view(-1)
    live = {
        "turned": base.t(),
        "columns": base[:, ::2],
        "rows": base[3:20],
        "odd": halves[1:-1],
        "small": base[0, :50].clone(),
        "scalar": base[0, 0].clone(),
        "empty": base[:0],
    }
    take(store, live, "a")
    crossed = take(store, live, "b")
    assert live["odd"].nbytes < crossed < live["odd"].nbytes + 3 * CHUNK


def test_windows_are_bounded_and_work_without_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = to_device(weights(1, 2))
    take(store, live, "a")
    batches, hash_batch = list[Batch](), hashing_device.hash_batch

    def counting(*args: Any) -> None:
        batches.append(args[1])
        hash_batch(*args)

    for hasher in device_hash._hashers.values():
        monkeypatch.setattr(hasher, "_hash_batch", counting)
    assert take(store, live, "b") == 2 * ROWS * DIGEST + CHUNK
    assert len(batches) == 1
    monkeypatch.setattr(device_asking, "_WINDOW_BYTES", live["w1"].nbytes)
    assert take(store, live, "c") == 2 * ROWS * DIGEST + CHUNK
    assert len(batches) == 3
    # What is made contiguous takes memory: here four pieces.
    turned = {"turned": live["w1"].t().contiguous().t()}
    monkeypatch.setattr(staging, "PIECE_BYTES", ROWS // 4 * CHUNK)
    monkeypatch.setattr(device_asking, "_MADE_BYTES", 1)
    take(store, turned, "turned")
    assert len(batches) == 3 + 4
    expected = sum(tensor.nbytes for tensor in live.values())

    def without_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(device_hash.DeviceHasher, "digests", without_memory)
    assert take(store, live, "d") == expected


def test_a_save_of_dcp(tmp_path: Path) -> None:
    live = to_device(weights(1))
    for name in ("a", "b"):
        counts.clear()
        dcp.save(live, storage_writer=CasnapWriter(tmp_path / "run" / name), no_dist=True)
    assert counts["to host"] < live["w1"].nbytes


# --- leaves that are new in each take ---------------------------------------------------------


def test_what_is_always_new_is_asked_in_one_of_eight_takes(store: Store) -> None:
    live = to_device(weights(1))
    nbytes, crossed = live["w1"].nbytes, list[int]()
    for number in range(19):
        live["w1"].add_(1)
        crossed.append(take(store, live, f"{number}") - nbytes)
    assert crossed[:2] == [ROWS * DIGEST] * 2
    assert sorted(crossed[2:]) == [0] * 15 + [ROWS * DIGEST] * 2
    stays = [take(store, live, f"stays{number}") for number in range(9)]
    asked = [number for number, each in enumerate(stays) if each < nbytes]
    # Once it is seen that it stays, it is asked each time.
    assert asked == list(range(asked[0], 9))
    assert asked[0] < 8


def test_an_empty_store_is_not_asked(tmp_path: Path) -> None:
    live = to_device(weights(1))
    assert (
        take(Store(tmp_path / "new", create=NewStore(chunk_size=CHUNK)), live, "a")
        == live["w1"].nbytes
    )


def test_nobody_waits_for_the_compiler(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_hash, "_hashers", {})
    compiled, run = threading.Event(), hashing_device.hash_batch

    def compiling(*args: Any) -> None:
        compiled.wait()
        run(*args)

    monkeypatch.setattr(hashing_device, "hash_batch", compiling)
    live = to_device(weights(1))
    assert take(store, live, "a") == live["w1"].nbytes
    assert take(store, live, "b") == live["w1"].nbytes
    compiled.set()
    assert device_hash.hasher_of(torch.device("late", 0)) is not None
    assert take(store, live, "c") == ROWS * DIGEST + CHUNK


# --- collectors -------------------------------------------------------------------------------


def collecting(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, path: str) -> None:
    """Have a method, at its first call, begin with a collection of all but the first snapshot."""
    method, once = getattr(owner, name), threading.Lock()

    def collect_first(self: Any, *args: Any) -> Any:
        if once.acquire(blocking=False):
            other = Store(path)
            for snapshot in other.snapshots()[1:]:
                other.delete(snapshot.name)
            other.gc(grace=0)
            other.gc(grace=0)
        return method(self, *args)

    monkeypatch.setattr(owner, name, collect_first)


@pytest.mark.usefixtures("unannounced")
def test_a_take_that_is_fenced_asks_and_copies_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = to_device(weights(1))
    take(store, live, "a")
    collecting(monkeypatch, Asking, "settle", store.uri)
    crossed = take(store, live, "b")
    assert crossed > live["w1"].nbytes
    assert [s.name for s in store.snapshots()] == ["first", "b"]
    assert store.check(data=True).ok


@pytest.mark.usefixtures("unannounced")
@pytest.mark.parametrize("max_pending", [1, 2])
@pytest.mark.parametrize("moment", ["before it stores", "before it commits"])
def test_an_async_take_cannot_write_what_stayed_on_the_device(
    store: Store, monkeypatch: pytest.MonkeyPatch, moment: str, max_pending: int
) -> None:
    live = to_device(weights(1, 2))
    take(store, {"w1": live["w1"]}, "a")
    if moment == "before it stores":
        collecting(monkeypatch, _Steps, "store_copies", store.uri)
    else:
        collecting(monkeypatch, Asking, "settle", store.uri)
    pending = store.async_take({"s": StateDict(**live)}, "b", max_pending=max_pending)
    live["w1"].zero_()
    with pytest.raises(FencedError, match=r"stayed on the device.*take again.*--grace"):
        pending.wait()
    assert [s.name for s in store.snapshots()] == ["first"]
    assert store.check(data=True).ok
    assert take(store, live, "c", "async_take") > 0


@pytest.mark.parametrize("max_pending", [1, 2])
def test_on_a_disk_collectors_wait_for_what_stayed_on_the_device(
    store: Store, monkeypatch: pytest.MonkeyPatch, max_pending: int
) -> None:
    live = to_device(weights(1, 2))
    take(store, {"w1": live["w1"]}, "a")
    collecting(monkeypatch, _Steps, "store_copies", store.uri)
    pending = store.async_take({"s": StateDict(**live)}, "b", max_pending=max_pending)
    live["w1"].zero_()
    assert torch.equal(pending.wait().read_object("s/w1"), weights(1)["w1"])
    assert [s.name for s in store.snapshots()] == ["first", "b"]
    assert store.check(data=True).ok


def test_in_a_bucket_the_call_announces_the_take_at_once(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    store = Store(RemoteDouble(request.node.name), create=NewStore(chunk_size=CHUNK))
    live = to_device(weights(1))
    pending = store.async_take({"s": StateDict(**live)}, "a")
    assert pending.wait().stats.new_bytes > live["w1"].nbytes
    backend = store._view.repository.backend
    assert isinstance(backend, RemoteDouble)
    stores = threading.Event()
    begin = _Steps.store_copies

    def wait_first(*args: Any) -> Any:
        stores.wait()
        return begin(*args)

    monkeypatch.setattr(_Steps, "store_copies", wait_first)
    pending = store.async_take({"s": StateDict(**live)}, "b")
    assert len(backend.announced_bases(60)) == 1
    stores.set()
    pending.wait()
    assert backend.announced_bases(60) == []


def test_an_interrupt_of_the_call_lets_collectors_go_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = to_device(weights(1))
    take(store, live, "a")
    begin = Reliance.__init__

    def interrupted(*args: Any, **options: Any) -> None:
        begin(*args, **options)
        _thread.interrupt_main()

    with monkeypatch.context() as patch:
        patch.setattr(Reliance, "__init__", interrupted)
        # Who has the error has all that the call had.
        with pytest.raises(KeyboardInterrupt) as caught:
            store.async_take({"s": StateDict(**live)}, "b")
    backend = store._view.repository.backend
    assert caught
    assert list(backend.announced_bases(60)) == []
    assert take(store, live, "b", "async_take") < live["w1"].nbytes


def test_on_a_full_disk_no_pending_take_keeps_what_can_be_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASNAP_GC", "auto")
    forget_collectors()
    nbytes = 8 << 20
    with tmpfs(tmp_path / "disk", str(23 * nbytes // 10 + (2 << 20))) as disk:
        store, pending = Store(disk / "store"), list[PendingSnapshot]()
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            dense = torch.randint(-(2**62), 2**62, (nbytes // 8,), generator=generator)
            # Of another path each time, so that all are asked for.
            state = {"s": StateDict(**to_device({f"w{step}": dense}))}
            options: dict[str, Any] = {"max_pending": 2, "retention": Retention(keep_last=1)}
            pending.append(store.async_take(state, f"{step}", **options))
        for each in pending:
            each.wait()
        assert torch.equal(store["5"].read_object("s/w5"), dense)
        assert len(store.snapshots()) == 1


# --- devices that lie -------------------------------------------------------------------------


def lying(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor, Batch, int], None]
) -> None:
    """Have a device change its digests once they are computed; whoever hashes next."""
    hash_batch = hashing_device._hash

    def hash_and_lie(table: torch.Tensor, batch: Batch, call: int, digests: torch.Tensor) -> None:
        hash_batch(table, batch, call, digests)
        change(digests, batch, call)

    monkeypatch.setattr(hashing_device, "_hash", hash_and_lie)


def flip_bits(digests: torch.Tensor, batch: Batch, call: int) -> None:
    digests[3, batch.first : batch.first + batch.cells] ^= 1


def of_a_first_call() -> Callable[[torch.Tensor, Batch, int], None]:
    """Return what leaves the digests, but not the tags, of the first call where later ones go."""
    first: list[torch.Tensor] = []

    def change(digests: torch.Tensor, batch: Batch, call: int) -> None:
        first.append(digests.clone())
        if digests.shape == first[0].shape:
            digests[:-1] = first[0][:-1]

    return change


def of_other_cells(digests: torch.Tensor, batch: Batch, call: int) -> None:
    digests.copy_(digests.flip(1))


def assert_nothing_is_wrong(store: Store, live: dict[str, torch.Tensor], names: list[str]) -> None:
    """Nothing was committed; from now on all is copied, and right."""
    assert [s.name for s in store.snapshots()] == names
    nbytes = sum(tensor.nbytes for tensor in live.values())
    assert take(store, live, "again") == nbytes
    assert take(store, live, "and again", "async_take") == nbytes
    assert store.check(data=True).ok


@pytest.mark.parametrize("how", HOW)
def test_wrong_digests_of_new_chunks(
    store: Store, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    live = to_device(weights(1))
    lying(monkeypatch, flip_bits)
    with pytest.raises(DeviceError, match=WRONG):
        take(store, live, "a", how)
    assert_nothing_is_wrong(store, live, ["first"])


@pytest.mark.parametrize("how", HOW)
def test_digests_of_what_was_there_before(
    store: Store, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """All chunks look known: the sample tells."""
    live = to_device(weights(1))
    lying(monkeypatch, of_a_first_call())
    take(store, live, "a")
    live["w1"].add_(1)
    with pytest.raises(DeviceError, match=WRONG):
        take(store, live, "b", how)
    assert_nothing_is_wrong(store, live, ["first", "a"])


@pytest.mark.parametrize("how", HOW)
def test_digests_of_other_cells(store: Store, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    live = to_device(weights(1))
    take(store, live, "a")
    lying(monkeypatch, of_other_cells)
    with pytest.raises(DeviceError, match="of another call or another cell"):
        take(store, live, "b", how)
    assert_nothing_is_wrong(store, live, ["first", "a"])


def test_a_tensor_that_changes_while_it_is_taken(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell that from a device that lies."""
    live = to_device(weights(1))
    divided = Asking._divided

    def write_first(*args: Any) -> Any:
        live["w1"].add_(1)
        module.synchronize("late")
        return divided(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Asking, "_divided", write_first)
        with pytest.raises(DeviceError, match=r"chunk of s/w1 .* unless another thread or stream"):
            store.take({"s": StateDict(**live)}, "a")
    assert_nothing_is_wrong(store, live, ["first"])


def test_a_device_that_is_found_to_lie_before_the_commit(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has said before is not believed any more."""
    live = to_device(weights(1))
    take(store, live, "a")
    begin, is_found = _Steps.store_copies, threading.Event()

    def wait_first(*args: Any) -> Any:
        is_found.wait()
        return begin(*args)

    with monkeypatch.context() as patch:
        patch.setattr(_Steps, "store_copies", wait_first)
        pending = store.async_take({"s": StateDict(**live)}, "b")
        device_hash.distrusted(torch.device("late:0"), "a test says so")
        is_found.set()
        with pytest.raises(DeviceError, match=r"late:0 .* has since computed a wrong digest"):
            pending.wait()
    assert_nothing_is_wrong(store, live, ["first", "a"])


@pytest.mark.parametrize("how", HOW)
def test_a_run_goes_on_after_a_wrong_digest_if_it_is_to(
    store: Store, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    live = to_device(weights(1))
    lying(monkeypatch, flip_bits)
    taken = getattr(store, f"try_{how}")({"s": StateDict(**live)}, "a")
    assert (taken if how == "take" else taken.wait()) is None
    assert_nothing_is_wrong(store, live, ["first"])


@pytest.mark.parametrize("how", HOW)
def test_a_device_whose_kernels_fail_hashes_no_more(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    live = to_device(weights(1, 2))
    take(store, live, "a")

    def failing(*_: object) -> None:
        raise RuntimeError("too many resources requested")

    for hasher in device_hash._hashers.values():
        monkeypatch.setattr(hasher, "_hash_batch", failing)
    monkeypatch.setattr(device_asking, "_WINDOW_BYTES", live["w1"].nbytes)
    nbytes = sum(tensor.nbytes for tensor in live.values())
    with caplog.at_level(logging.WARNING, "casnap"):
        assert take(store, live, "b", how) == nbytes
        assert take(store, live, "c", how) == nbytes
    [record] = caplog.records
    assert record.message.startswith("late:0 does not hash, so what it holds is copied")
    assert record.message.endswith("too many resources requested")


@pytest.mark.parametrize("how", HOW)
def test_little_memory_on_the_device_is_enough(store: Store, how: str) -> None:
    """Of what is not contiguous, little is made so at a time."""
    turned = {"turned": to_device({"w": torch.arange(12e6).reshape(3000, 4000)})["w"].t()}
    take(store, turned, "a")
    module.free_bytes = 40 << 20
    take(store, turned, "b", how)


def test_a_device_that_fails_its_proof_is_told_by_the_log(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_hash, "_hashers", {})
    lying(monkeypatch, flip_bits)
    live = to_device(weights(1))
    with caplog.at_level(logging.ERROR, "casnap"):
        take(store, live, "a")
        for worker in threading.enumerate():
            if worker.name == "casnap-device-hash":
                worker.join()
    [record] = caplog.records
    assert "late:0 does not hash as it should" in record.message
    assert take(store, live, "b") == live["w1"].nbytes


@pytest.mark.parametrize("how", HOW)
def test_what_a_gpu_is_to_do(tmp_path: Path, how: str) -> None:
    known_stays(tmp_path, torch.device("late", 0), how)
