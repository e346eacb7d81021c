"""Restores whose chunks a device verifies: what it hashes, what the host hashes, who is blamed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.errors import DamagedError, DeviceError
from casnap.format.codec import Codec
from casnap.restore import loading
from casnap.runtime.torch_modes import fill
from casnap.state import device_hash
from casnap.state.device_hash import Batch
from tests.support import hashing_device, late_device
from tests.support.cached import PLENTY
from tests.support.damaged import all_places_of
from tests.support.far import FarFolder
from tests.support.late_device import module
from tests.support.verified_there import damage_cell, hashed_on_host, transfer_that_damages

CELL = 128_000
"""Of a chunk size of 128 KiB: 32 rows of 1,000 float32 numbers."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels, and both devices ready: takes have hashed there."""
    hashing_device.install(monkeypatch, "late:0", "late:1")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run", create=NewStore(chunk_size="128K", codec="raw"))


def expected() -> torch.Tensor:
    """Return numbers of 20 cells, the last one of two rows."""
    return torch.arange(610_000.0).reshape(610, 1000)


def restore(snapshot: Snapshot, live: torch.Tensor) -> None:
    snapshot.restore({"s": StateDict(x=live)})


def read(snapshot: Snapshot, live: torch.Tensor) -> None:
    assert snapshot.read_object("s/x", live) is live


def load(snapshot: Snapshot, live: torch.Tensor) -> None:
    into = torch.nn.Module()
    into.register_buffer("x", live)
    snapshot.load_into(into, "s")


WAYS = [restore, read, load]


# --- which chunks -----------------------------------------------------------------------------


@pytest.mark.parametrize("fill", WAYS)
def test_the_host_hashes_no_chunk_that_its_device_can(
    store: Store, fill: Callable[[Snapshot, torch.Tensor], None]
) -> None:
    snapshot, live = store.take({"s": StateDict(x=expected())}, "step"), expected().to("late")
    live.zero_()
    late_device.run_all()
    late_device.counts.clear()
    with hashed_on_host() as hashed:
        fill(snapshot, live)
    # The last cell is small.
    assert [nbytes for nbytes in hashed if nbytes > 7000] == [8000]
    # One cell is looked at; a word more than a digest comes back for each.
    assert late_device.counts["to host"] == 19 * 36 + CELL
    assert torch.equal(live.cpu(), expected())


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().to("late").t()


def spaced(x: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(*x.shape, 2, dtype=x.dtype, device="late")
    return wide[..., 1].copy_(x)


def within_a_word(x: torch.Tensor) -> torch.Tensor:
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype, device="late")
    return memory[1:].view(x.shape).copy_(x)


def with_gaps(x: torch.Tensor) -> torch.Tensor:
    """Return rows that are whole, each with a gap behind it."""
    return torch.zeros(x.shape[0], x.shape[1] + 8, dtype=x.dtype, device="late")[:, :-8].copy_(x)


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.to("late")


def of_another_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to("late", torch.float64)


LAYOUTS: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "fp32": (expected(), plain, True),
    "bf16": (torch.randn(1200, 1000).bfloat16(), plain, True),
    "bytes": (torch.randint(256, (1_300_001,), dtype=torch.uint8), plain, True),
    "complex": (torch.randn(400, 500, dtype=torch.complex64), plain, True),
    "bools": (torch.randn(1_500_003) > 0, plain, True),
    "of odd rows": (torch.randn(401, 1001), plain, True),
    "of odd bytes": (torch.randint(256, (1301, 1001), dtype=torch.uint8), plain, True),
    "rows wider than a cell": (torch.randn(3, 150_001), plain, True),
    "one long axis": (torch.randn(5, 1, 90_000), plain, True),
    "none": (torch.randn(0, 1000), plain, False),
    "one element": (torch.tensor([0.5]), plain, False),
    "turned": (expected(), turned, False),
    "spaced": (expected(), spaced, False),
    "with gaps": (expected(), with_gaps, False),
    "within a word": (torch.randn(1200, 1000).half(), within_a_word, False),
    "cast": (expected(), of_another_dtype, False),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("fill", WAYS)
def test_any_layout_is_restored_bit_for_bit(
    store: Store, name: str, fill: Callable[[Snapshot, torch.Tensor], None]
) -> None:
    """What is cast, scattered, or begins within a word, the host verifies as before."""
    x, made, is_hashed_there = LAYOUTS[name]
    snapshot, live = store.take({"s": StateDict(x=x)}, "step"), made(torch.zeros_like(x))
    late_device.run_all()
    with module.stream(late_device.Stream("late")), hashed_on_host() as hashed:
        fill(snapshot, live)
        assert torch.equal(live.cpu(), x.to(live.dtype))
    of_cells = sum(nbytes for nbytes in hashed if nbytes >= 64 << 10)
    assert of_cells < 0.6 * x.nbytes if is_hashed_there else of_cells >= x.nbytes - CELL


def test_what_two_devices_and_the_host_want(store: Store) -> None:
    """A chunk that the host wants too is verified there; one that two devices want, by both."""
    x, y, z = expected(), expected().neg(), expected() + 1
    wanted = {"a": x, "b": x, "c": y, "d": y, "e": z, "f": z}
    snapshot = store.take({"s": StateDict(**wanted)}, "step")
    live = StateDict(
        a=torch.zeros_like(x, device="late:0"),
        b=torch.zeros_like(x, device="late:1"),
        c=torch.zeros_like(y, device="late:1"),
        d=torch.zeros_like(y),
        e=torch.zeros_like(z, device="late:0"),
        f=torch.zeros_like(z, dtype=torch.float64),
    )
    with hashed_on_host() as hashed:
        snapshot.restore({"s": live})
    assert sorted(n for n in hashed if n > 7000) == [8000] * 3 + [CELL] * 38
    for name, tensor in wanted.items():
        assert torch.equal(live[name].cpu(), tensor.to(live[name].dtype))


def test_a_part_and_reuse(store: Store) -> None:
    """Of a cell of which only a part is read, the host sees all; what is held is not read."""
    x = expected()
    snapshot, out = store.take({"s": StateDict(x=x)}, "step"), torch.zeros(330, 1000, device="late")
    with hashed_on_host() as hashed:
        snapshot.read_object("s/x", out, index=slice(10, 340))
    assert torch.equal(out.cpu(), x[10:340])
    assert sum(n == CELL for n in hashed) == 11, "a selection goes the old way"
    live = x.to("late")
    live[:500] = 0
    with hashed_on_host() as hashed:
        report = snapshot.restore({"s": StateDict(x=live)}, reuse=True)
    assert report.kept_bytes == x.nbytes - 16 * CELL
    assert CELL not in hashed
    assert torch.equal(live.cpu(), x)


@pytest.mark.parametrize("codec", [Codec.PLANES, Codec.DELTA])
def test_coded_chunks_are_verified_by_the_host(store: Store, codec: Codec) -> None:
    """They are decoded there: those of zstd, and deltas upon other chunks."""
    store.configure(codec="zstd" if codec is Codec.PLANES else "auto")
    bits = torch.randint(4096, (1_300_000,), dtype=torch.int16)
    for step in range(5 if codec is Codec.DELTA else 1):
        bits[step::50] += 1
        store.take({"s": StateDict(x=bits)}, f"{step}")
    store.gc(grace=0)
    store.gc(grace=0)
    expected = bits.clone()
    for step in range(1, 5 if codec is Codec.DELTA else 1):
        expected[step::50] -= 1
    live = torch.zeros_like(expected, device="late")
    assert codec in {place.codec for _, place in all_places_of(Path(store.uri))}
    restore(store["0"], live)
    assert torch.equal(live.cpu(), expected)


def test_of_a_far_store_unless_a_cache_keeps_the_chunks(tmp_path: Path, cache_dir: Path) -> None:
    """The cache gets only what the host has verified; nor is what it has believed."""
    folder, options = FarFolder(tmp_path / "far"), NewStore(chunk_size="128K", codec="raw")
    Store(folder, create=options).take({"s": StateDict(x=expected())}, "step")
    for cache_bytes, by_host in ((None, 0), (PLENTY, 19), (PLENTY, 19)):
        far = Store(FarFolder(tmp_path / "far"), create=False, cache_bytes=cache_bytes)
        live = torch.zeros_like(expected(), device="late")
        with hashed_on_host() as hashed:
            restore(far["step"], live)
        assert hashed.count(CELL) == by_host
        assert torch.equal(live.cpu(), expected())


# --- where no device verifies -------------------------------------------------------------------


@pytest.mark.parametrize("why", ["no hasher", "off", "no memory", "failing kernels"])
def test_without_a_device_that_can_the_host_verifies_all(
    store: Store, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A restore has no kernel compiled; and nobody is blamed."""
    snapshot = store.take({"s": StateDict(x=expected())}, "step")
    hasher = device_hash.made_hasher(torch.device("late", 0))
    assert hasher is not None

    def failing(*_: object) -> None:
        raise torch.OutOfMemoryError("none") if why == "no memory" else RuntimeError("no")

    if why == "no hasher":
        hashing_device.install(monkeypatch)
    elif why == "off":
        monkeypatch.setenv("CASNAP_DEVICE_HASH", "off")
    else:
        monkeypatch.setattr(hasher, "_hash_batch", failing)
    for _ in range(2):
        live = torch.zeros_like(expected(), device="late")
        with hashed_on_host() as hashed:
            restore(snapshot, live)
        assert hashed.count(CELL) == 19
        assert torch.equal(live.cpu(), expected())
    assert not device_hash._distrusted
    if why == "no hasher":
        assert not device_hash._hashers
        assert not device_hash._in_the_making


def test_little_is_verified_by_the_host(store: Store) -> None:
    x = expected()[:200]
    snapshot, live = store.take({"s": StateDict(x=x)}, "step"), torch.zeros_like(x, device="late")
    with hashed_on_host() as hashed:
        restore(snapshot, live)
    assert hashed.count(CELL) == 6
    assert torch.equal(live.cpu(), x)


# --- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", WAYS)
def test_damage_on_the_disk_is_the_disks(
    store: Store, fill: Callable[[Snapshot, torch.Tensor], None]
) -> None:
    """The error is that of a host's tensor, and the device goes on hashing."""
    snapshot = store.take({"s": StateDict(x=expected())}, "step")
    other = store.take({"s": StateDict(x=expected() + 1)}, "other")
    digest = damage_cell(store, expected()[64:96])
    live = torch.zeros_like(expected(), device="late")
    with pytest.raises(DamagedError, match=r"hurt: s/x; these tensors may hold unverified") as e:
        fill(snapshot, live)
    assert digest.hex() in str(e.value)
    assert e.value.paths == ("s/x",)
    # All else was read.
    rest = torch.arange(610) // 32 != 2
    assert torch.equal(live.cpu()[rest], expected()[rest])
    assert not device_hash._distrusted
    with hashed_on_host() as hashed:
        fill(other, live)
    assert CELL not in hashed
    assert torch.equal(live.cpu(), expected() + 1)


@pytest.mark.parametrize("fill", WAYS)
def test_damage_of_a_transfer_is_the_devices(
    store: Store, fill: Callable[[Snapshot, torch.Tensor], None]
) -> None:
    """The host reads the chunk again, whole. The next restore is verified on the host."""
    snapshot = store.take({"s": StateDict(x=expected())}, "step")
    live = torch.zeros_like(expected(), device="late")
    with (
        transfer_that_damages(CELL),
        pytest.raises(DeviceError, match=r"late:0 does not hash as it should: .* a chunk of s/x "),
    ):
        fill(snapshot, live)
    with hashed_on_host() as hashed:
        fill(snapshot, live)
    assert hashed.count(CELL) == 19
    assert torch.equal(live.cpu(), expected())


def test_damage_of_both_is_told_of_the_device_first(store: Store) -> None:
    """A chunk that is damaged in the store blames no device; the one beside it does."""
    snapshot = store.take({"s": StateDict(x=expected())}, "step")
    digest = damage_cell(store, expected()[:32])
    live = torch.zeros_like(expected(), device="late")
    with transfer_that_damages(CELL, which=10), pytest.raises(DeviceError, match="late:0"):
        restore(snapshot, live)
    with pytest.raises(DamagedError, match=digest.hex()):
        restore(snapshot, live)


def test_without_the_device_nobody_notices_a_transfer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tests above do damage something."""
    monkeypatch.setenv("CASNAP_DEVICE_HASH", "off")
    snapshot = store.take({"s": StateDict(x=expected())}, "step")
    live = torch.zeros_like(expected(), device="late")
    with transfer_that_damages(CELL):
        restore(snapshot, live)
    assert not torch.equal(live.cpu(), expected())


def test_a_device_that_says_that_all_has_arrived(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hashes what lies elsewhere: one of its chunks is looked at."""
    snapshot = store.take({"s": StateDict(x=expected())}, "step")
    live, true = torch.zeros_like(expected(), device="late"), expected().to("late")
    late_device.run_all()
    hasher = device_hash.made_hasher(torch.device("late", 0))
    assert hasher is not None

    def elsewhere(table: torch.Tensor, batch: Batch, call: int, digests: torch.Tensor) -> None:
        moved = table.clone()
        moved[0] += true.data_ptr() - live.data_ptr()
        hashing_device.hash_batch(moved, batch, call, digests)
        late_device.run_all()

    def nowhere(target: torch.Tensor, source: torch.Tensor) -> None:
        """Stand for a transfer that does not take place."""

    monkeypatch.setattr(hasher, "_hash_batch", elsewhere)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "fill", nowhere)
        with pytest.raises(DeviceError, match="late:0 does not hash as it should"):
            restore(snapshot, live)
    restore(snapshot, live)
    assert torch.equal(live.cpu(), expected())


def test_another_stream_that_writes_meanwhile(store: Store) -> None:
    """The error says that this may be the cause."""
    snapshot = store.take({"s": StateDict(x=expected())}, "step")
    live = torch.zeros_like(expected(), device="late")
    late_device.run_all()

    def disturbed(target: torch.Tensor, source: torch.Tensor) -> None:
        fill(target, source)
        live[100] = 7

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "fill", disturbed)
        with pytest.raises(DeviceError, match="unless another thread or stream writes"):
            restore(snapshot, live)


# --- at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [False, True])
def test_two_threads_restore_at_once(store: Store, damage: bool) -> None:
    """To one device, on streams of their own; with a damaged store, each hears of its own."""
    taken = [expected() + i for i in range(2)]
    snapshots = [store.take({"s": StateDict(x=x)}, f"{i}") for i, x in enumerate(taken)]
    if damage:
        damage_cell(store, taken[1][32:64])
    live = [torch.zeros_like(x, device="late") for x in taken]
    late_device.run_all()
    outcomes: dict[int, Any] = {}
    begun = threading.Barrier(2)

    def work(i: int) -> None:
        begun.wait()
        with module.stream(late_device.Stream("late")):
            try:
                for _ in range(3):
                    restore(snapshots[i], live[i])
                outcomes[i] = None
            except (DamagedError, DeviceError) as e:
                outcomes[i] = e

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes[0] is None
    assert torch.equal(live[0].cpu(), taken[0])
    assert isinstance(outcomes[1], DamagedError) if damage else outcomes[1] is None
    assert damage or torch.equal(live[1].cpu(), taken[1])
    assert not device_hash._distrusted
