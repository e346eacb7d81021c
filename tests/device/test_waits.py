"""Each wait of casnap's is needed: without it, one of these scenarios gets wrong bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from msgspec.structs import replace

import casnap.state
from casnap import NewStore, Snapshot, StateDict, Store, release_memory
from casnap.errors import DeviceError
from casnap.format.digest import Digest, digest_of
from casnap.integrations.dcp import CasnapReader, CasnapWriter
from casnap.restore import reuse
from casnap.runtime.buffers import view_at
from casnap.serving import Follower, FollowerOptions
from casnap.state import device_hash
from casnap.storage import Want
from casnap.take import staging
from tests.support import hashing_device
from tests.support.late_device import Stream, counts, module, run_all

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LATE, PROMPT = "late", "prompt"


def expected() -> torch.Tensor:
    return torch.arange(600_000.0).reshape(600, 1000)


def begun() -> torch.Tensor:
    """Return numbers that the caller has begun to bring to the device, on its own stream."""
    return expected().to("late")


def take(path: Path) -> None:
    with module.stream(Stream("late")):
        snapshot = Snapshot.take(path / "run" / "step", {"s": StateDict(x=begun())})
    assert torch.equal(snapshot.read_object("s/x"), expected())


def take_turned(path: Path) -> None:
    """Each block is made contiguous on the device first, by casnap's threads."""
    x = begun()
    module.synchronize("late")
    turned = torch.stack([x, x]).permute(2, 0, 1)
    snapshot = Snapshot.take(path / "run" / "step", {"s": StateDict(x=turned)})
    assert torch.equal(snapshot.read_object("s/x"), turned.cpu())


def take_in_the_background(path: Path) -> None:
    """From the second take on the device copies to where the copies stay."""
    for number in range(3):
        with module.stream(Stream("late")):
            x = begun() + number
            module.synchronize("late")
            turned = torch.stack([x, x]).permute(2, 0, 1)
            pending = Snapshot.async_take(path / "run" / f"{number}", {"s": StateDict(x=turned)})
            wanted = turned.cpu()
            x.zero_()
            turned.zero_()
            module.synchronize("late")
        assert torch.equal(pending.wait().read_object("s/x"), wanted)


def filled(fill: Callable[[Path, torch.Tensor], object], path: Path, rows: int = 600) -> None:
    """Fill a tensor that the caller's stream still writes to; another stream then reads it."""
    x = expected()[:rows]
    snapshot = Snapshot.take(path / "run" / "step", {"s": StateDict(x=x, y=torch.ones(3))})
    with module.stream(Stream("late")):
        out = torch.zeros_like(x, device="late").add_(7)
        fill(Path(snapshot.path), out)
    with module.stream(Stream("late")):
        assert torch.equal(out.cpu(), x)


def restore(path: Path, out: torch.Tensor) -> None:
    Snapshot(path).restore({"s": StateDict(x=out, y=torch.zeros(3))})


def read(path: Path, out: torch.Tensor) -> None:
    Snapshot(path).read_object("s/x", out)


def load(path: Path, out: torch.Tensor) -> None:
    module = torch.nn.Module()
    module.register_buffer("x", out)
    module.register_buffer("y", torch.zeros(3))
    Snapshot(path).load_into(module, "s")


def load_by_dcp(path: Path, out: torch.Tensor) -> None:
    dcp.load({"s": {"x": out}}, storage_reader=CasnapReader(path), no_dist=True)


def kept(fill: Callable[[Path, torch.Tensor], object], path: Path) -> None:
    """Fill a tensor that holds all, of which the caller's stream still changes a row.

    It is hashed on a stream that follows none of the caller's.
    """
    x = expected()
    snapshot = Store(path / "run", create=NewStore(chunk_size="64K")).take(
        {"s": StateDict(x=x)}, "step"
    )
    out = x.to("late")
    module.synchronize("late")

    def elsewhere(runs: Iterable[device_hash.CellRun]) -> list[Digest]:
        with module.stream(Stream("late")):
            return digests(runs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_hash, "_hashers", {})
        patch.setattr(casnap.state, "device_kernels", hashing_device, raising=False)
        # The last row is audited.
        patch.setattr(reuse._numbers, "choice", lambda kept: kept[-1])
        hasher = device_hash.hasher_of(out.device)
        assert hasher is not None
        digests = hasher.digests
        patch.setattr(hasher, "digests", elsewhere)
        with module.stream(Stream("late")):
            out[0].add_(7)
            fill(Path(snapshot.path), out)
    with module.stream(Stream("late")):
        assert torch.equal(out.cpu(), x)


def restore_kept(path: Path, out: torch.Tensor) -> None:
    assert Snapshot(path).restore({"s": StateDict(x=out)}, reuse=True).kept_bytes


def load_kept(path: Path, out: torch.Tensor) -> None:
    module = torch.nn.Module()
    module.register_buffer("x", out)
    assert Snapshot(path).load_into(module, "s", reuse=True).kept_bytes


def load_kept_by_dcp(path: Path, out: torch.Tensor) -> None:
    dcp.load({"s": {"x": out}}, storage_reader=CasnapReader(path, reuse=True), no_dist=True)


class Unknown:
    """A value whose loader is not known: it gets new tensors."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"x": self.x}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.x = state["x"]


def restore_what_another_key_fills(path: Path) -> None:
    """Two keys are of one memory: the first one keeps what is there, the second one fills it."""
    x = expected()
    store = Store(path / "run", create=NewStore(chunk_size="64K"))
    snapshot = store.take({"a": StateDict(x=x), "b": StateDict(x=x + 7)}, "step")
    with pytest.MonkeyPatch.context() as patch:
        hashing_device.install(patch, "late:0")
        live = x.to("late")
        module.synchronize("late")
        kept = Unknown(live)
        with module.stream(Stream("late")):
            snapshot.restore({"a": kept, "b": StateDict(x=live)}, reuse=True)
        run_all()
    assert torch.equal(kept.x.cpu(), x)
    assert torch.equal(live.cpu(), x + 7)


def look_at_what_is_being_filled(_: Path) -> None:
    """A thread, which uses the default stream, fills what is looked at on the caller's stream."""
    x = expected()
    with pytest.MonkeyPatch.context() as patch:
        hashing_device.install(patch, "late:0")
        live = x.to("late")
        module.synchronize("late")
        want = Want(digest_of(view_at(x.data_ptr(), x.nbytes)), x.nbytes, nothing, "x")
        live.add_(7)
        with module.stream(Stream("late")):
            assert list(reuse.lacking([reuse.Candidate(want, live, run_all)])) == [want]


def read_of_numpy(path: Path) -> None:
    """What is not read straight into its place is copied there by the thread of the caller."""
    x = expected()
    snapshot = Snapshot.take(path / "run" / "step", {"s": StateDict(x=x.numpy())})
    with module.stream(Stream("late")):
        out = torch.zeros_like(x, device="late")
        snapshot.read_object("s/x", out)
    with module.stream(Stream("late")):
        assert torch.equal(out.cpu(), x)


def load_of_an_overlap_by_dcp(path: Path) -> None:
    x = expected()
    where = path / "run" / "step"
    dcp.save({"x": x, "y": x[:10]}, storage_writer=CasnapWriter(where), no_dist=True)
    with module.stream(Stream("late")):
        out = torch.zeros_like(x, device="late")
        state = {"x": out, "y": out[:10]}
        dcp.load(state, storage_reader=CasnapReader(where), no_dist=True)
    with module.stream(Stream("late")):
        assert torch.equal(out.cpu(), x)


def restore_an_optimizer(path: Path) -> None:
    """One without moments gets new ones from its own ``load_state_dict``."""

    def made(device: str) -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(expected().to(device))
        weight.grad = expected().to(device)
        return torch.optim.SGD([weight], momentum=0.9)

    taken, live = made("cpu"), made("late")
    taken.step()
    snapshot = Snapshot.take(path / "run" / "step", {"optim": taken})
    with module.stream(Stream("late")):
        snapshot.restore({"optim": live})
    [moments] = live.state.values()
    with module.stream(Stream("late")):
        assert torch.equal(moments["momentum_buffer"].cpu(), expected())


def save_by_dcp(path: Path) -> None:
    """As on CUDA: copies into pinned memory, and torch waits for those from the current device."""
    state, writer, runtime = {"x": expected().to("late:1")}, CasnapWriter(path), module.cudart()
    release_memory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        patch.setattr(torch.accelerator, "synchronize", module.synchronize)
        staged = writer.stage(state)
        is_right = torch.equal(staged["x"], expected())
        # Its memory is unpinned when it is freed.
        run_all()
        del staged, writer
        gc.collect()
    assert is_right


def follow(path: Path) -> None:
    """A forward that was begun reads the version before; all streams then read the next one."""
    x, place = expected(), path / "run"
    store = Store(place)
    store.take({"s": StateDict(x=x)}, "1")
    with module.stream(Stream("late")):
        live = torch.zeros_like(x, device="late").add_(7)
        follower = Follower(place, {"x": live}, options=FollowerOptions(path="s"), interval=None)
        begun = live + 0
    store.take({"s": StateDict(x=x + 1)}, "2")
    assert follower.update()
    with module.stream(Stream("late")):
        assert torch.equal(live.cpu(), x + 1)
        assert torch.equal(begun.cpu(), x)


def asked(how: str, path: Path) -> None:
    """Most of it is known by what the device hashes; some rows are new, and made contiguous."""
    with pytest.MonkeyPatch.context() as patch:
        hashing_device.install(patch, "late:0")
        x = torch.stack([begun(), begun()]).permute(2, 0, 1)
        module.synchronize("late")
        for number in range(3):
            with module.stream(Stream("late")):
                x += 0  # a kernel that nobody has waited for
                x[10:20] += 1
                if number == 2:
                    x.copy_(x.flip(0))
                state, name = {"s": StateDict(x=x)}, path / "run" / f"{number}"
                if how == "take":
                    wanted, snapshot = None, Snapshot.take(name, state)
                else:
                    pending = Snapshot.async_take(name, state)
                    wanted = x.cpu()
                    x.add_(1)
                    module.synchronize("late")
                    snapshot = pending.wait()
                    x.sub_(1)
                if wanted is None:
                    wanted = x.cpu()
                assert torch.equal(snapshot.read_object("s/x"), wanted)


def take_of_what_was_known(path: Path) -> None:
    """The device must not hash what was there before."""
    with pytest.MonkeyPatch.context() as patch:
        hashing_device.install(patch, "late:0")
        x = begun()
        Snapshot.take(path / "run" / "before", {"s": StateDict(x=x)})
        with module.stream(Stream("late")):
            x.add_(1)
            snapshot = Snapshot.take(path / "run" / "step", {"s": StateDict(x=x)})
    assert torch.equal(snapshot.read_object("s/x"), expected() + 1)


def restore_verified_there(pinned: bool, path: Path) -> None:
    """Threads copy on the default stream; the device hashes on the caller's."""
    x = expected()
    store = Store(path / "run", create=NewStore(chunk_size="128K"))
    snapshot = store.take({"s": StateDict(x=x)}, "step")
    release_memory()
    with pytest.MonkeyPatch.context() as patch:
        hashing_device.install(patch, "late:0")
        patch.setattr(module.cudart(), "free_bytes", None if pinned else 0)
        with module.stream(Stream("late")):
            out = torch.zeros_like(x, device="late").add_(7)
            snapshot.restore({"s": StateDict(x=out)})
        assert counts["to host"], "a chunk is looked at, where the device verifies"
        assert (counts["pageable"] < x.nbytes) == pinned
        release_memory()
    with module.stream(Stream("late")):
        assert torch.equal(out.cpu(), x)


def hash_on_another_stream(*args: Any) -> None:
    """Hash once the memory is another's: so it is left."""
    stream = Stream("late")
    with module.stream(stream):
        HASH_BATCH(*args)
    stream._queue.clear()
    stream.end = stream._done


def nothing(*_: object) -> None:
    """Stand for a wait that was forgotten."""


def copy_without_wait(target: torch.Tensor, source: torch.Tensor) -> None:
    BEGIN_COPY(target, source)


def piece_not_kept_alive(*args: Any) -> staging.Piece:
    return replace(COPIED(*args), keep_alive=None)


BEGIN_COPY, COPIED = staging.begin_copy, staging._copied
HASH_BATCH = hashing_device.hash_batch
SCENARIOS: dict[str, Callable[[Path], object]] = {
    "take": take,
    "take turned": take_turned,
    "take in the background": take_in_the_background,
    "restore": partial(filled, restore),
    # Few bytes are read into memory that is not pinned, and torch does not wait for a copy of that.
    "load little": partial(filled, load, rows=200),
    "read": partial(filled, read),
    "read of numpy": read_of_numpy,
    "load": partial(filled, load),
    "load by dcp": partial(filled, load_by_dcp),
    "load of an overlap by dcp": load_of_an_overlap_by_dcp,
    "restore an optimizer": restore_an_optimizer,
    "save by dcp": save_by_dcp,
    "restore what is held": partial(kept, restore_kept),
    "load what is held": partial(kept, load_kept),
    "load what is held by dcp": partial(kept, load_kept_by_dcp),
    "restore what another key fills": restore_what_another_key_fills,
    "look at what is being filled": look_at_what_is_being_filled,
    "restore verified there": partial(restore_verified_there, True),
    "the same from memory that is not pinned": partial(restore_verified_there, False),
    "follow": follow,
    "take of what was known": take_of_what_was_known,
    "take of some that is known": partial(asked, "take"),
    "the same in the background": partial(asked, "async_take"),
}
# What is left out, the scenario that notices it, and whether default streams are late or prompt.
WAITS = [
    ("casnap.take.capture.synchronize", nothing, "take", LATE),
    ("tests.support.late_device.Stream.wait_stream", nothing, "take turned", LATE),
    ("casnap.take.staging.begin_copy", copy_without_wait, "take", LATE),
    ("casnap.take.staging._copied", piece_not_kept_alive, "take turned", PROMPT),
    ("casnap.take.staging.begin_copy", copy_without_wait, "take in the background", LATE),
    ("casnap.take.staging._copied", piece_not_kept_alive, "take in the background", PROMPT),
    ("casnap.restore.restore.synchronize", nothing, "restore", LATE),
    ("casnap.restore.restore.synchronize", nothing, "restore an optimizer", LATE),
    ("casnap.restore.reuse.synchronize", nothing, "restore what another key fills", LATE),
    (
        "casnap.restore.reuse.synchronize_workers",
        nothing,
        "look at what is being filled",
        LATE,
    ),
    (
        "casnap.restore.landings.synchronize_workers",
        nothing,
        "the same from memory that is not pinned",
        LATE,
    ),
    ("casnap.restore.restore.synchronize", nothing, "restore verified there", LATE),
    ("casnap.restore.read_object.synchronize", nothing, "read", LATE),
    ("casnap.restore.read_object.synchronize", nothing, "read of numpy", LATE),
    ("casnap.restore.load_into.synchronize", nothing, "load", LATE),
    ("casnap.integrations.dcp.load.synchronize", nothing, "load by dcp", LATE),
    ("casnap.integrations.dcp.load.synchronize", nothing, "load of an overlap by dcp", LATE),
    ("casnap.integrations.dcp.staging.synchronize", nothing, "save by dcp", LATE),
    ("casnap.restore.patching.synchronize_devices", nothing, "follow", LATE),
    ("casnap.restore.loading.synchronize_workers", nothing, "load little", LATE),
    ("casnap.take.capture.synchronize", nothing, "take of what was known", LATE),
    ("casnap.take.staging.begin_copy", copy_without_wait, "take of some that is known", LATE),
    ("casnap.take.staging._copied", piece_not_kept_alive, "take of some that is known", PROMPT),
    ("casnap.take.staging.begin_copy", copy_without_wait, "the same in the background", LATE),
    ("casnap.take.staging._copied", piece_not_kept_alive, "the same in the background", PROMPT),
    (
        "tests.support.hashing_device.hash_batch",
        hash_on_another_stream,
        "take of what was known",
        LATE,
    ),
    (
        "tests.support.hashing_device.hash_batch",
        hash_on_another_stream,
        "restore verified there",
        LATE,
    ),
]


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_bytes_are_right(tmp_path: Path, name: str) -> None:
    SCENARIOS[name](tmp_path)


@pytest.mark.parametrize(
    ("target", "without", "name", "streams"), WAITS, ids=[f"{wait[0]}, {wait[2]}" for wait in WAITS]
)
def test_without_one_of_its_waits_the_bytes_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    target: str,
    without: Callable[..., object],
    name: str,
    streams: str,
) -> None:
    module.is_prompt = streams == PROMPT
    monkeypatch.setattr(target, without)
    # What a device hashes is compared with what has crossed.
    with pytest.raises((AssertionError, DeviceError)):
        SCENARIOS[name](tmp_path)
