"""``casnap cache``: what this host keeps of stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cached import Reader, far_store, kept_bytes, kept_files
from tests.support.cli_calls import document, failure, invoke
from tests.support.faults import assert_store, in_child, take


@pytest.fixture
def two(tmp_path: Path, cache_dir: Path) -> list[Path]:
    """Return two stores of which this host keeps chunks."""
    stores = [far_store(tmp_path / name, 0) for name in ("a", "b")]
    for store in stores:
        Reader(store).restore()
    return stores


def test_nothing_is_kept(cache_dir: Path) -> None:
    assert invoke("cache").stdout == f"0 B cached in {cache_dir}\n"
    assert document("cache")["stores"] == []
    assert "nothing of 's3://b/run1'" in failure("cache", "s3://b/run1")
    invoke("cache", "--clear")


def test_stores_and_bytes(two: list[Path]) -> None:
    shown = invoke("cache").stdout
    assert all(str(store) in shown for store in two)
    answer = document("cache")
    assert answer["cached_bytes"] == kept_bytes()
    assert {fields["store"] for fields in answer["stores"]} == set(map(str, two))
    assert sum(fields["pack_count"] for fields in answer["stores"]) == len(kept_files())
    assert not answer["cleared"]
    first = answer["stores"][0]
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


def test_the_indexes_of_local_stores(tmp_path: Path, cache_dir: Path) -> None:
    # Processes of their own: this one has them open.
    for name in ("a", "b"):
        assert in_child(lambda name=name: take(tmp_path / name, 0)) == 0
    shown = document("cache")
    on_disk = sum(f.stat().st_blocks * 512 for f in cache_dir.glob("*/*"))
    assert shown["index_bytes"] == on_disk > 0
    assert {s["store"] for s in shown["stores"]} == {str(tmp_path / name) for name in ("a", "b")}
    assert sum(s["index_bytes"] for s in shown["stores"]) == on_disk
    assert shown["cached_bytes"] == 0
    assert str(tmp_path / "a") in invoke("cache").stdout
    invoke("cache", "--clear", tmp_path / "a")
    assert [s["store"] for s in document("cache")["stores"]] == [str(tmp_path / "b")]
    invoke("cache", "--clear")
    assert document("cache")["index_bytes"] == 0
    assert_store(tmp_path / "a", {0})


def test_a_store_of_this_host_by_any_path_to_it(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_child(lambda: take(tmp_path / "st", 0)) == 0
    (tmp_path / "link").symlink_to("st")
    monkeypatch.chdir(tmp_path)
    for path in ("st", "./st/", "st/../st", "link", tmp_path / "link"):
        assert [s["store"] for s in document("cache", path)["stores"]] == [str(tmp_path / "st")]
    assert "nothing of 'other' is cached" in failure("cache", "other")


def test_a_uri_that_cannot_be_shown(two: list[Path], cache_dir: Path) -> None:
    for path in cache_dir.rglob("uri"):
        path.write_bytes(b"\x1b[31m\xff")
    shown = invoke("cache").stdout
    assert "\x1b" not in shown
    for path in cache_dir.rglob("uri"):
        path.unlink()
    assert {fields["store"] for fields in document("cache")["stores"]} == {"?"}
