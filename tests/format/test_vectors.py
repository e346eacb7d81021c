"""The test vectors of docs/format.md are a store, which casnap reads and its reader without it."""

from __future__ import annotations

from pathlib import Path

from casnap import Store
from tests.support.golden import as_text, from_text, unpack
from tests.support.read_alike import assert_read_alike

VECTORS = Path(__file__).parents[2] / "docs" / "format-store.txt"


def test_they_are_a_golden_store(tmp_path: Path) -> None:
    unpack("small", tmp_path / "store")
    assert as_text(tmp_path / "store") == VECTORS.read_text()


def test_they_are_read(tmp_path: Path) -> None:
    from_text(VECTORS.read_text(), tmp_path / "store")
    assert as_text(tmp_path / "store") == VECTORS.read_text()
    assert assert_read_alike(tmp_path / "store") > 20
    assert Store(tmp_path / "store", create=False).check(data=True).ok
