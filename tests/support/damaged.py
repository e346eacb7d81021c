"""Stores to damage: how they are made, damaged, checked and repaired."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.errors import CasnapError
from casnap.format.digest import digest_of
from casnap.format.records import PackId, Record, SegmentId, decode_segment, pack_key, segment_key
from casnap.maintenance.check import CheckReport
from casnap.maintenance.full_index import FullIndex
from casnap.maintenance.repair import RepairReport
from casnap.maintenance.survey import Survey
from casnap.storage.writing.segments import drop_packs
from tests.support.faults import CHUNK
from tests.support.written import put_next_root

STEPS = {"a": 0, "b": 1, "run/c": 2}
KEY = "state"


def content(step: int) -> dict[str, Any]:
    """Return what the state holds at a step, to be changed at will."""
    return copy.deepcopy(expected(step))


@lru_cache
def expected(step: int) -> dict[str, Any]:
    """Return tensors of seven chunks (so a list), two, one, a part of one, and none."""
    return {
        "frozen": torch.arange(100_000, dtype=torch.float32),
        "weight": torch.arange(20_000, dtype=torch.float32) * (step + 1),
        "exact": torch.arange(CHUNK // 4, dtype=torch.int32) + step // 2,
        "bias": torch.full((64,), float(step)),
        "inline": torch.full((4,), step),
        "notes": ["x" * 100, {"step": step, "text": f"{step}" * 80}],
    }


def make(folder: Path) -> Store:
    store = Store(folder, create=NewStore(chunk_size=CHUNK))
    for name, step in STEPS.items():
        store.take({KEY: StateDict(content(step))}, name, metadata={"step": step})
    return store


@pytest.fixture(scope="module", name="pristine")
def pristine_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the store that tests copy; no test changes it."""
    folder = tmp_path_factory.mktemp("pristine") / "store"
    make(folder)
    return folder


@pytest.fixture(name="store")
def copied_store(pristine: Path, tmp_path: Path, cache_dir: Path) -> Path:
    """Return a copy of a store, under a cache that no other test uses."""
    return Path(shutil.copytree(pristine, tmp_path / "store"))


# --- how it is damaged -------------------------------------------------------------------------

Damage = Callable[[bytes], "bytes | None"]
"""What becomes of the bytes of a file; None: it is deleted."""


@contextmanager
def damaged(file: Path, damage: Damage) -> Iterator[None]:
    """Change a file, or (None) delete it, for a while."""
    before = file.read_bytes()
    after = damage(before)
    file.unlink()
    if after is not None:
        file.write_bytes(after)
    try:
        yield
    finally:
        file.write_bytes(before)


def flip(at: int, bit: int = 0) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]


def objects_of(store: Path) -> list[Path]:
    tops = ("roots", "packs", "index", "casnap.json")
    files = [p for p in sorted(store.rglob("*")) if p.is_file()]
    inner = store / "casnap-store"
    return [p for p in files if inner in p.parents and p.relative_to(inner).parts[0] in tops]


def newest(store: Path) -> Path:
    return max((store / "casnap-store/roots" / "0").iterdir(), key=lambda p: int(p.name))


def forget_copies(store: Path) -> None:
    """Leave the newest root without a copy."""
    shutil.rmtree(store / "casnap-store/roots" / "copies")


def _cut_off(length: int, raw: bytes) -> bytes:
    return raw[:length]


def damages(file: Path, choose: random.Random) -> Iterator[Damage]:
    """Yield bits to flip, lengths to cut off at, and the deletion."""
    size = file.stat().st_size
    places = {7, size // 2, size - 40, *(choose.choices(range(size), k=2))}
    for at in sorted(p for p in places if 0 <= p < size):
        yield flip(at, choose.randrange(8))
    for length in (0, choose.randrange(size), size - 1):
        yield partial(_cut_off, length)
    yield lambda raw: raw + b"\0"
    yield lambda _: None


def forget_cache(cache_dir: Path) -> None:
    for kept in cache_dir.iterdir():
        if kept.is_dir():
            shutil.rmtree(kept)
        else:
            kept.unlink()


def all_places_of(store: Path) -> list[Record]:
    root = Store(store)._view.repository.newest()
    keys = [segment_key(SegmentId(ref.id)) for ref in root.segments]
    return [
        r
        for k in keys
        for r in decode_segment((store / "casnap-store" / k).read_bytes(), k).records
    ]


def damage_everywhere(store: Path, digest: bytes) -> None:
    """Flip a bit at all the places of a chunk or node."""
    for other, place in all_places_of(store):
        if other == digest:
            file = store / "casnap-store" / pack_key(place.pack)
            file.write_bytes(flip(place.offset)(file.read_bytes()))


# --- what is found, and repaired ---------------------------------------------------------------

FROZEN = expected(0)["frozen"][CHUNK // 4 : CHUNK // 2]
"""A chunk that every snapshot needs."""

WEIGHT = expected(1)["weight"][: CHUNK // 4]
"""A chunk of the snapshot ``b`` alone."""


def check(path: Path, **options: object) -> CheckReport:
    return Store(path, create=False).check(**options)  # type: ignore[arg-type]


def listing_of(path: Path) -> FullIndex:
    return Survey(Store(path, create=False)._view.repository).index


def record_of(path: Path, raw: torch.Tensor | bytes) -> Record:
    """Return where the bytes of a chunk lie."""
    digest = digest_of(raw if isinstance(raw, bytes) else raw.numpy().tobytes())
    return digest, listing_of(path).of(digest)[0]


def drop_from_index(store: Store, pack: bytes, **changes: object) -> None:
    """Put a root whose index no longer lists a pack. The pack stays, and may be needed."""
    view = store._view.repository.view()
    segments = drop_packs(store._view.repository, view, {PackId(pack)})
    assert put_next_root(store._view.repository.backend, view.root, segments=segments, **changes)


def change(file: Path, damage: Damage) -> None:
    after = damage(file.read_bytes())
    file.unlink()
    if after is not None:
        file.write_bytes(after)


def broken(path: Path) -> set[str]:
    """Return the snapshots that cannot be restored."""
    found = set()
    for name, step in STEPS.items():
        state = StateDict(content(step + 5))
        try:
            Store(path, create=False)[name].restore({KEY: state})
        except CasnapError:
            found.add(name)
        else:
            assert torch.equal(state["weight"], expected(step)["weight"])
    return found


def other_store(folder: Path, **tensors: torch.Tensor) -> Path:
    """Make a store that holds these tensors alone."""
    Store(folder, create=NewStore(chunk_size=CHUNK)).take({KEY: StateDict(**tensors)}, "copy")
    return folder


def repair(path: Path, *sources: Path | str, dry_run: bool = False) -> RepairReport:
    return Store(path, create=False).repair(sources=sources, dry_run=dry_run)


def lost_in(path: Path) -> set[bytes]:
    """Check all of a store, in which nothing may be wrong but that some is known to be lost."""
    report = check(path, data=True)
    assert {damage.kind for damage in report.damages} <= {"lost"}
    return {bytes.fromhex(damage.digest) for damage in report.damages}


def damage_chunk(path: Path, raw: torch.Tensor) -> Record:
    """Damage a chunk at all its places in one pack: a small one has two."""
    digest, place = record_of(path, raw)
    for each in listing_of(path).of(digest):
        if each.pack == place.pack:
            change(path / "casnap-store" / pack_key(place.pack), flip(each.offset + 11))
    return digest, place


def named(report: RepairReport) -> set[str]:
    return {hurt.snapshot for damage in report.remaining for hurt in damage.hurts}
