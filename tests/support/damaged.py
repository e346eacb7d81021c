"""Stores to damage, what is damaged there, and what a repair makes of it."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch

from casnap import Store
from casnap.format.records import Record, pack_key
from casnap.maintenance.repair import RepairReport
from tests.robustness.test_damage import expected, flip, make
from tests.support.checks import change, check, record_of
from tests.support.faults import CHUNK

WEIGHT = expected(1)["weight"][: CHUNK // 4]
"""A chunk of the snapshot ``b`` alone."""


@pytest.fixture(scope="module", name="pristine")
def pristine_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that nobody damages."""
    folder = tmp_path_factory.mktemp("pristine") / "store"
    make(folder)
    return folder


@pytest.fixture(name="store")
def copied_store(pristine: Path, tmp_path: Path, cache_dir: Path) -> Path:
    """Return a copy of a store, under a cache that no other test uses."""
    return Path(shutil.copytree(pristine, tmp_path / "store"))


def repair(path: Path, *sources: Path | str, **options: bool) -> RepairReport:
    return Store(path, create=False).repair(sources=sources, **options)


def lost_in(path: Path) -> set[bytes]:
    """Check all of a store, in which nothing may be wrong but that some is known to be lost."""
    report = check(path, data=True)
    assert {damage.kind for damage in report.damages} <= {"lost"}
    return {bytes.fromhex(damage.digest) for damage in report.damages}


def damage_chunk(path: Path, raw: torch.Tensor) -> Record:
    digest, place = record_of(path, raw)
    change(path / pack_key(place.pack), flip(place.offset + 11))
    return digest, place


def named(report: RepairReport) -> set[str]:
    return {hurt.snapshot for damage in report.remaining for hurt in damage.hurts}


def safetensors(file: Path, tensors: dict[str, torch.Tensor], **replace: object) -> Path:
    """Write a file as the safetensors library does."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        described = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        header[name] = {**described, **replace}  # type: ignore[dict-item]
        at += tensor.nbytes
    encoded = json.dumps(header).encode()
    raw = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + raw)
    return file
