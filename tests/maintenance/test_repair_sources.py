"""A repair finds what is lost in backups, files of tensors and the cache."""

from __future__ import annotations

import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from casnap import StateDict, Store
from casnap.format.digest import Digest
from casnap.format.records import pack_key
from tests.support.damaged import (
    FROZEN,
    KEY,
    STEPS,
    WEIGHT,
    broken,
    content,
    copied_store,  # noqa: F401 - a fixture
    damage_chunk,
    damage_everywhere,
    expected,
    forget_cache,
    listing_of,
    lost_in,
    make,
    named,
    pristine_store,  # noqa: F401 - a fixture
    record_of,
    repair,
    safetensors,
)


def torch_file(file: Path, *, legacy: bool = False) -> Path:
    state = {"model": [{"weight": expected(1)["weight"]}, (expected(0)["frozen"],)]}
    torch.save(state, file, _use_new_zipfile_serialization=not legacy)
    return file


def numpy_file(file: Path, dtype: str = "<f4", order: str = "C") -> Path:
    for name in ("frozen", "weight"):
        array = np.asarray(expected(1)[name].numpy(), dtype, order=order)  # type: ignore[call-overload]
        np.save(file.with_stem(name), array)
    return file.parent


SOURCES: dict[str, Callable[[Path], Path]] = {
    "safetensors": lambda f: safetensors(f / "x.safetensors", dict(list(expected(1).items())[:2])),
    "torch": lambda f: torch_file(f / "x.pt"),
    "old torch": lambda f: torch_file(f / "x.pth", legacy=True),
    "numpy": lambda f: numpy_file(f / "x.npy"),
    "big endian": lambda f: numpy_file(f / "x.npy", ">f4"),
    "folder": lambda f: torch_file(f / "x.ckpt").parent,
    "store": lambda f: make(f / "store").objects.backend.folder,
}


@pytest.mark.parametrize("source", SOURCES)
def test_healed_from(store: Path, tmp_path: Path, source: str) -> None:
    damage_chunk(store, FROZEN)
    damage_chunk(store, WEIGHT)
    (tmp_path / "source").mkdir()
    where = SOURCES[source](tmp_path / "source")
    report = repair(store, where)
    assert report.ok
    assert report.healed_chunks == 2
    assert not report.skipped
    assert lost_in(store) == set()
    assert broken(store) == set()


def test_healed_long_after(store: Path, tmp_path: Path) -> None:
    """First lost, later found; a source may be a backup of this very store, and damaged itself."""
    backup = Path(shutil.copytree(store, tmp_path / "backup"))
    lost, _ = damage_chunk(backup, WEIGHT)
    for raw in (WEIGHT, FROZEN):
        (store / "casnap-store" / pack_key(record_of(store, raw)[1].pack)).unlink()
    assert named(repair(store)) == set(STEPS)
    report = repair(store, backup)
    assert report.healed_chunks > 10
    assert lost_in(store) == {lost}
    assert broken(store) == {"b"}


def test_trees_are_healed_from_the_cache(store: Path) -> None:
    """Nodes that this host remembers need no source."""
    opened = Store(store)
    for name, step in STEPS.items():
        opened[name].restore({KEY: StateDict(content(step))})
    for row in map(opened.row, STEPS):
        for place in listing_of(store).of(Digest(row.manifest.digest)):
            (store / "casnap-store" / pack_key(place.pack)).unlink(missing_ok=True)
    report = opened.repair()
    assert report.healed_chunks > 5
    assert report.ok
    assert broken(store) == set()


def test_a_table_that_is_lost(store: Path, tmp_path: Path, cache_dir: Path) -> None:
    """Without its table a store can do nothing; a backup has it."""
    backup = Path(shutil.copytree(store, tmp_path / "backup"))
    table = Store(store).objects.newest().table
    assert table is not None
    damage_everywhere(store, table.digest)
    forget_cache(cache_dir)
    assert named(repair(store)) == {"*"}
    assert repair(store, backup).ok
    assert broken(store) == set()


def long_storage(folder: Path) -> bytes:
    """Return a file as torch wrote it before 1.6; its storage claims to be longer than the file."""
    torch.save({"x": torch.ones(300)}, folder / "notes", _use_new_zipfile_serialization=False)
    numel, claimed = struct.pack("<H", 300), struct.pack("<i", 1 << 30)
    return (folder / "notes").read_bytes().replace(b"M" + numel, b"J" + claimed)


def test_a_source_with_objects_of_an_unknown_class(store: Path, tmp_path: Path) -> None:
    """Nothing of a file is run, so whatever else it holds does not matter."""

    class Arguments:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return Path.touch, (Path(tmp_path / "owned"),)  # type: ignore[return-value]

    damage_chunk(store, FROZEN)
    file = tmp_path / "model.pt"
    torch.save({"args": Arguments(), "model": {"frozen": FROZEN}}, file)
    assert repair(store, file).ok
    assert broken(store) == set()
    assert not (tmp_path / "owned").exists()


def test_sources_that_cannot_be_used(store: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return Path.touch, (Path(tmp_path / "owned"),)  # type: ignore[return-value]

    digest, _ = damage_chunk(store, FROZEN)
    folder = tmp_path / "source"
    folder.mkdir()
    torch.save({"x": Evil()}, folder / "evil.pt")
    np.save(folder / "evil.npy", np.array([Evil()]), allow_pickle=True)
    (folder / "empty.safetensors").touch()
    (folder / "cut.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    safetensors(folder / "lies.safetensors", {"x": FROZEN}, shape=[1 << 40, 1 << 40])
    safetensors(folder / "beyond.safetensors", {"x": FROZEN}, data_offsets=[0, 1 << 40])
    safetensors(folder / "zero.safetensors", {"x": FROZEN}, shape=[0], data_offsets=[0, 0])
    safetensors(folder / "unknown.safetensors", {"x": FROZEN}, dtype="F4")
    (folder / "notes.txt").write_text("not looked at")
    torch.save(torch.ones(3).to_sparse(), folder / "sparse.pt")
    with zipfile.ZipFile(folder / "deflated.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\2N.")
        archive.writestr("archive/data/0", bytes(1 << 20))
    (folder / "huge.pth").write_bytes(long_storage(folder))
    report = repair(store, folder, tmp_path / "nowhere", "memory://no-store-here")
    assert not (tmp_path / "owned").exists()
    assert {bytes.fromhex(d.digest) for d in report.remaining} == {digest}
    unusable = (
        "evil.pt",
        "deflated",
        "huge",
        "evil.npy",
        "empty",
        "cut",
        "lies",
        "beyond",
        "zero",
        "unknown",
        "nowhere",
        "memory://",
    )
    assert len(report.skipped) == len(unusable)
    for name in unusable:
        assert any(name in why for why in report.skipped), name
