"""Patches lead from one pulled version to the next: exactly, small, and only if both are whole."""

from __future__ import annotations

import itertools
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from casnap import Store
from casnap.errors import BackendError, DamagedError
from casnap.files.safetensors_header import read_header
from casnap.format.digest import digest_of
from casnap.serving import PullOptions
from casnap.serving.patches import Differences, Patch, StagedPatches
from casnap.serving.version import RECORD, StoredCell, Version, read_record
from tests.support.served import store_at, take, tensors_in, versions_of


def pulled(path: Path, store: Store, **options: Any) -> Path:
    return Path(store.pull(path / "live", options=PullOptions(**options)).folder)


def bits(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return flat.view(f"u{tensor.element_size()}")


def read(staged: StagedPatches) -> Any:
    return Patch.read(staged.path, staged.digest, staged.base, staged.content)


def assert_leads(staged: StagedPatches, base: Path, folder: Path) -> None:
    """Check that patches, and the tensors that are not patched, make one version of the other."""
    before, after = tensors_in(base), tensors_in(folder)
    patches = read(staged)
    assert not patches.keys() & set(staged.whole)
    for name, tensor in after.items():
        held = bits(before[name]).copy()
        if name in patches:
            patch = patches[name]
            assert (np.diff(patch.indices) > 0).all()
            assert np.array_equal(held[patch.indices], patch.before)
            held[patch.indices] = patch.values
        elif name in staged.whole:
            held = bits(tensor)
        assert np.array_equal(held, bits(tensor)), name


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int16]
)
def test_patches_lead_from_one_version_to_the_next(tmp_path: Path, dtype: torch.dtype) -> None:
    store = store_at(tmp_path / "store")
    generator = torch.Generator().manual_seed(0)
    many = torch.randint(0, 100, (300, 500), generator=generator).to(dtype)
    folders = []
    for step in range(3):
        extra = {"many": many, "one": torch.tensor(float(step)), "even": torch.arange(900) + step}
        take(store, step, **extra)
        folders.append(pulled(tmp_path, store, keep=5))
        many = many.clone()
        at = torch.randperm(many.numel(), generator=generator)[:1500]
        raw = many.view(-1).view(torch.uint8).view(-1, many.element_size())
        # Any bits: also of NaNs, and of zeros with a sign.
        raw[at] = torch.randint(0, 256, raw[at].shape, generator=generator, dtype=torch.uint8)
    for base, folder in itertools.pairwise(folders):
        staged = StagedPatches.between(base, folder)
        assert staged is not None
        assert_leads(staged, base, folder)
        # A patch is an index and two values for each element; what changes whole has none.
        assert "many" in read(staged)
        assert {"even", "one"} <= set(staged.whole)
        assert staged.nbytes < 1500 * (4 + 2 * many.element_size()) + (64 << 10)
        staged.remove()
    # Over a missed version, and back.
    for base, folder in ((folders[0], folders[2]), (folders[2], folders[0])):
        staged = StagedPatches.between(base, folder)
        assert staged is not None
        assert_leads(staged, base, folder)
        staged.remove()
    assert len(versions_of(tmp_path / "live")) == 3


def test_values_that_were_cast_are_compared_as_they_are_served(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store")
    folders = []
    for step in range(2):
        # A change that the cast loses, and one that it keeps.
        tensor = torch.ones(40_000)
        tensor[:20] += step * 2**-20
        tensor[20:40] += step
        take(store, step, cast=tensor, lost=torch.ones(100) + step * 2**-20)
        folders.append(pulled(tmp_path, store, dtype="bfloat16"))
    staged = StagedPatches.between(*folders)
    assert staged is not None
    assert_leads(staged, *folders)
    assert read(staged)["cast"].indices.tolist() == list(range(20, 40))
    assert "lost" not in {*read(staged), *staged.whole}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int16])
def test_a_pull_notes_the_patches(tmp_path: Path, dtype: torch.dtype) -> None:
    # As in a bucket: most chunks are deltas.
    store = store_at(tmp_path / "store", mirror=tmp_path / "bucket")
    bucket = Store(tmp_path / "bucket")
    generator = torch.Generator().manual_seed(0)
    many = torch.randn(300, 500, generator=generator).to(dtype)
    moved = [torch.randn(40_000, generator=generator) for _ in range(2)]
    folders = []
    for step in range(4):
        many = many.clone()
        raw = many.view(-1).view(torch.uint8).view(-1, many.element_size())
        at = torch.randperm(many.numel(), generator=generator)[: step * 700]
        raw[at] ^= 1
        take(store, step, many=many, a=moved[step % 2], b=moved[1 - step % 2])
        store.wait_mirrored(60)
        if step != 2:
            folders.append(pulled(tmp_path, bucket, keep=5, patches=True))
    assert not list(folders[0].glob("casnap-patches.*"))
    # The second one is over two steps, whose deltas are a chain.
    for base, folder in itertools.pairwise(folders):
        [made] = folder.glob("casnap-patches.*")
        staged = StagedPatches.between(base, folder)
        assert staged is not None
        assert staged.path == made
        assert_leads(staged, base, folder)
        assert "many" in read(staged)
        # These two have changed places, and lie in the old version.
        assert (base is folders[0]) == ({"a", "b"} <= {*staged.whole, *read(staged)})
        # The same as from both folders.
        made.rename(made.with_name("away"))
        again = StagedPatches.between(base, folder)
        assert again is not None
        assert again.whole == staged.whole
        for name, patch in Patch.read(made.with_name("away"), *staged[1:4]).items():
            assert all(map(np.array_equal, patch[1:], read(again)[name][1:]))
        again.remove()
        assert not again.path.exists()
        made.with_name("away").rename(made)
        staged.remove()
        assert made.exists()
    # From another base, and where they are damaged, folders are compared.
    over = StagedPatches.between(folders[0], folders[2])
    assert over is not None
    assert_leads(over, folders[0], folders[2])
    made.write_bytes(made.read_bytes()[:-1] + b"!")
    staged = StagedPatches.between(base, folder)
    assert staged is not None
    assert staged.path != made
    assert_leads(staged, base, folder)


def test_a_pull_notes_no_patch_of_what_is_damaged(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store", mirror=tmp_path / "bucket")
    bucket = Store(tmp_path / "bucket")
    take(store, 0)
    store.wait_mirrored(60)
    base = pulled(tmp_path, bucket)
    whole = base.with_name("whole")
    shutil.copytree(base, whole)
    file = base / "model.safetensors"
    stat, raw = file.stat(), bytearray(file.read_bytes())
    at = raw.index(tensors_in(base)["layers.1"].view(torch.uint8).numpy().tobytes())
    # Where the delta changes nothing.
    raw[at + 1000] ^= 1
    with file.open("r+b") as opened:
        opened.write(raw)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    take(store, 1)
    store.wait_mirrored(60)
    folder = pulled(tmp_path, bucket, patches=True)
    staged = StagedPatches.between(base, folder)
    assert staged is not None
    assert staged.is_of_version
    assert "layers.1" in staged.whole
    assert_leads(staged, whole, folder)


def test_a_tensor_is_patched_or_whole_whichever_of_its_chunks_comes_last(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store")
    many = torch.zeros(200_000)
    take(store, 0, many=many)
    base = pulled(tmp_path, store)
    take(store, 1, many=many + (torch.arange(200_000) % 9_999 == 0))
    new = Version.at(pulled(tmp_path, store))
    record = read_record(base / RECORD)
    assert new is not None
    assert record is not None
    cells = new.cells_of["many"]
    reading, may_go_on = Event(), Event()

    class Slow(Version):
        """A version whose first chunk is read while its last one is found to be damaged."""

        def verified(self, cell: StoredCell) -> bytearray | None:
            if cell.start == self.cells_of["many"][-1][1].start:
                return None
            reading.set()
            assert may_go_on.wait(60)
            return super().verified(cell)

    sizes = {"many": [cell.nbytes for _, cell in cells]}
    differences = Differences(Slow(base, record), new.record.tensors, sizes)

    def note(number: int) -> None:
        raw = new.verified(cells[number][1])
        assert raw is not None
        differences.note("many", number, memoryview(raw))

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(note, 0)
        assert reading.wait(60)
        note(len(cells) - 1)
        may_go_on.set()
        first.result()
    header = read_header(memoryview(differences.encoded(new.content)))
    assert header.tensors == []
    assert header.metadata["whole"] == '["many"]'


def test_no_patches_lead_to_other_tensors(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store")
    take(store, 0)
    base = pulled(tmp_path, store)
    take(store, 1, norm=torch.zeros(20_001))
    assert StagedPatches.between(base, pulled(tmp_path, store)) is None
    take(store, 2, other=torch.zeros(3))
    assert StagedPatches.between(base, pulled(tmp_path, store)) is None
    assert StagedPatches.between(tmp_path, base) is None
    assert StagedPatches.between(base, tmp_path / "no_such") is None


def test_each_chunk_is_verified(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store")
    take(store, 0)
    base = pulled(tmp_path, store)
    take(store, 1)
    folder = pulled(tmp_path, store)

    def damage(place: Path) -> None:
        file = place / "model.safetensors"
        raw = bytearray(file.read_bytes())
        at = raw.index(tensors_in(place)["layers.1"].view(torch.uint8).numpy().tobytes())
        raw[at + 10] ^= 1
        file.write_bytes(raw)

    whole = base.with_name("whole")
    base.rename(whole)
    shutil.copytree(whole, base)
    damage(base)
    staged = StagedPatches.between(base, folder)
    assert staged is not None
    # Nobody knows what an engine has read of a base that is damaged.
    assert "layers.1" in staged.whole
    assert_leads(staged, whole, folder)
    damage(folder)
    with pytest.raises(DamagedError, match=r"what was pulled for layers\.1.*--verify"):
        StagedPatches.between(whole, folder)


def test_other_files_are_no_patches(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store")
    take(store, 0)
    base = pulled(tmp_path, store)
    take(store, 1)
    staged = StagedPatches.between(base, pulled(tmp_path, store))
    assert staged is not None
    path, digest, from_, to = staged[:4]
    for asked in ((path, digest, to, to), (path, digest, from_, from_)):
        with pytest.raises(DamagedError, match="from another version, or to another one"):
            Patch.read(*asked)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(DamagedError, match="damaged, or not the file that was meant"):
        Patch.read(*staged[:4])
    staged.remove()
    with pytest.raises(FileNotFoundError):
        Patch.read(*staged[:4])


def test_a_file_in_a_version_that_is_only_named_like_patches_is_passed_over(
    tmp_path: Path,
) -> None:
    store = store_at(tmp_path / "store")
    take(store, 0)
    base = pulled(tmp_path, store)
    take(store, 1)
    folder = pulled(tmp_path, store)
    about = {"base": "x", "content": "y", "whole": "all"}
    for raw in (b"notes", save({"w": torch.ones(3)}), save({}, {"base": "x"}), save({}, about)):
        (folder / f"casnap-patches.{digest_of(raw).hex()}").write_bytes(raw)
    staged = StagedPatches.between(base, folder)
    assert staged is not None
    assert not staged.is_of_version
    assert_leads(staged, base, folder)


def test_the_next_pull_deletes_what_a_crash_has_left(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store")
    take(store, 0)
    base = pulled(tmp_path, store)
    take(store, 1)
    staged = StagedPatches.between(base, pulled(tmp_path, store))
    assert staged is not None
    assert staged.path.name in versions_of(tmp_path / "live")
    pulled(tmp_path, store)
    assert not staged.path.exists()


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(tmp_path / "store")
    take(store, 0)
    base = pulled(tmp_path, store)
    take(store, 1)
    folder = pulled(tmp_path, store)
    monkeypatch.setattr("casnap.serving.patches.write_cached", full)
    with pytest.raises(BackendError, match=r"no space left .*stays as it is"):
        StagedPatches.between(base, folder)


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")
