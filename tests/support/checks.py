"""Checks of stores that are damaged on purpose, and where to damage them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from casnap import StateDict, Store
from casnap.errors import CasnapError
from casnap.format.digest import digest_of
from casnap.format.records import PackId, Record
from casnap.maintenance.check import CheckReport
from casnap.maintenance.places import Listing
from casnap.maintenance.survey import Survey
from casnap.storage.roots import put_next_root
from casnap.storage.segments import drop_packs
from tests.robustness.test_damage import KEY, STEPS, content, expected
from tests.support.faults import CHUNK

FROZEN = expected(0)["frozen"][CHUNK // 4 : CHUNK // 2]
"""A chunk that every snapshot needs."""


def check(path: Path, **options: object) -> CheckReport:
    return Store(path, create=False).check(**options)  # type: ignore[arg-type]


def listing_of(path: Path) -> Listing:
    return Survey(Store(path, create=False).objects).listing


def record_of(path: Path, raw: torch.Tensor | bytes) -> Record:
    """Return where the bytes of a chunk lie."""
    digest = digest_of(raw if isinstance(raw, bytes) else raw.numpy().tobytes())
    return digest, listing_of(path).places(digest)[0]


def drop_from_index(store: Store, pack: bytes, **changes: object) -> None:
    """Put a root whose index lists a pack no more, though it is there and may be needed."""
    view = store.objects.view()
    segments = drop_packs(store.objects, view, {PackId(pack)})
    assert put_next_root(store.objects.backend, view.root, segments=segments, **changes)


def change(file: Path, damage: Callable[[bytes], bytes | None]) -> None:
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
