"""``casnap pull``: what it prints, and what it refuses. ``--follow``: tests/guests/serving."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from casnap import Store
from tests.support.cli_calls import document, failure, invoke
from tests.support.served import assert_served, store_at, take, tensors_in


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = store_at(tmp_path / "store")
    take(store, 0, "run1/step_0")
    return store


def test_what_it_prints(store: Store, tmp_path: Path) -> None:
    live = tmp_path / "live"
    output = invoke("pull", store.uri, live).stdout
    assert f"{live} is now run1/step_0: 9 tensors, 9 of them changed\n" in output
    assert invoke("pull", f"{store.uri}/run1", live).stdout == f"{live} is at run1/step_0 already\n"
    take(store, 1, "run1/step_1")
    output = invoke("pull", f"{store.uri}/run1", live, "--keep", 1).stdout
    assert "run1/step_1: 9 tensors, 2 of them changed\n" in output
    assert_served(live, 1)
    result = document("pull", f"{store.uri}/run1/step_0", live)
    assert (result["name"], result["switched"], result["tensor_count"]) == ("run1/step_0", True, 9)
    assert result["output"] == str(live)
    assert sorted(result["changed"]) == ["bias", "layers.1"]


def test_the_mapping(store: Store, tmp_path: Path) -> None:
    live = tmp_path / "live"
    options = ("--rename", r"s/^layers\./h./", "--dtype", "float16", "--max-shard-size", "200KB")
    invoke("pull", store.uri, live, *options)
    found = tensors_in(live)
    assert len(list(live.glob("*.safetensors"))) > 2
    assert str(found["h.3"].dtype) == "torch.float16"
    assert "--rename is like" in failure("pull", store.uri, live, "--rename", "abc", status=2)
    assert "progress/step is left out" in invoke("pull", store.uri, live, "--path", "").stdout


def test_in_place(store: Store, tmp_path: Path) -> None:
    live = tmp_path / "live"
    invoke("pull", store.uri, live, "--inplace")
    assert_served(live, 0)
    take(store, 1, "run1/step_1")
    result = document("pull", store.uri, live, "--inplace")
    assert_served(live, 1)
    assert result["written_bytes"] == result["fetched_bytes"] > 0
    assert result["output"] == str(live)
    assert not live.is_symlink()
    assert "all of run1/step_1 is whole" in invoke("pull", store.uri, live, "--verify").stdout
    (live / "casnap-version.json").rename(live / "casnap-changing.json")
    assert "no whole version: a pull with" in failure("pull", store.uri, live, "--verify")
    assert "run1/step_1: 9 tensors" in invoke("pull", store.uri, live, "--inplace").stdout
    assert_served(live, 1)
    assert "with --inplace" in failure("pull", store.uri, live)
    assert "leave out --keep" in failure(
        "pull", store.uri, live, "--inplace", "--keep", 2, status=2
    )
    assert_served(live, 1)


def test_verify(store: Store, tmp_path: Path) -> None:
    live = tmp_path / "live"
    assert "nothing to compare" in failure("pull", store.uri, live, "--verify")
    invoke("pull", store.uri, live)
    assert "all of run1/step_0 is whole" in invoke("pull", store.uri, live, "--verify").stdout
    file = live.resolve() / "model.safetensors"
    info = file.stat()
    with file.open("r+b") as f:
        f.seek(5000)
        f.write(b"\xff")
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    message = failure("pull", store.uri, live, "--verify")
    assert "is damaged: norm. The next pull makes it whole" in message
    invoke("pull", store.uri, live)
    assert_served(live, 0)


def test_what_is_refused(store: Store, tmp_path: Path) -> None:
    live = tmp_path / "live"
    assert "--exec is for --follow" in failure("pull", store.uri, live, "--exec", "true", status=2)
    assert "only reads" in failure("pull", store.uri, live, "--verify", "--follow", status=2)
    assert "is not a casnap store" in failure("pull", tmp_path / "nothing", live)
    assert "no snapshot tagged 'best'" in failure("pull", store.uri, live, "--tag", "best")
    assert not live.is_symlink()
