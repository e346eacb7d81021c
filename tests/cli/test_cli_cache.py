"""``casnap cache``: what this host keeps of remote stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cached import Reader, far_store, kept, kept_bytes, kept_files
from tests.support.cli_calls import document, failure, invoke


@pytest.fixture
def two(tmp_path: Path, cache_dir: Path) -> list[Path]:
    """Return two stores of which this host keeps chunks."""
    stores = [far_store(tmp_path / name, 0) for name in ("a", "b")]
    for store in stores:
        Reader(store).restore()
    return stores


def test_nothing_is_kept(cache_dir: Path) -> None:
    assert invoke("cache").stdout == f"0 B cached in {kept()}\n"
    assert document("cache")["stores"] == []
    assert "nothing of 's3://b/run1'" in failure("cache", "s3://b/run1")
    invoke("cache", "--clear")


def test_stores_and_bytes(two: list[Path]) -> None:
    shown = invoke("cache").stdout
    assert all(str(store) in shown for store in two)
    told = document("cache")
    assert told["cached_bytes"] == kept_bytes()
    assert {fields["store"] for fields in told["stores"]} == set(map(str, two))
    assert sum(fields["pack_count"] for fields in told["stores"]) == len(kept_files())
    assert not told["cleared"]
    first = told["stores"][0]
    assert document("cache", first["id"])["stores"] == document("cache", first["store"])["stores"]


def test_clearing(two: list[Path]) -> None:
    assert "nearest" in failure("cache", "--clear", f"{two[0]}x")
    cleared = document("cache", "--clear", two[0])
    assert cleared["cleared"]
    assert [fields["store"] for fields in document("cache")["stores"]] == [str(two[1])]
    assert Reader(two[0]).restore().gets > 0
    assert Reader(two[1]).restore().gets == 0
    invoke("cache", "--clear")
    assert kept_files() == []
    assert Reader(two[0]).restore().gets > 0
    assert Reader(two[0]).restore().gets == 0


def test_a_uri_that_cannot_be_shown(two: list[Path]) -> None:
    for path in kept().glob("*/uri"):
        path.write_bytes(b"\x1b[31m\xff")
    shown = invoke("cache").stdout
    assert "\x1b" not in shown
    for path in kept().glob("*/uri"):
        path.unlink()
    assert {fields["store"] for fields in document("cache")["stores"]} == {"?"}
