"""What a notebook and a shell show of the objects of casnap, and complete."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from casnap import RNGState, Snapshot, StateDict, Store
from casnap.errors import SnapshotExistsError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def take(store: Store) -> Snapshot:
    state = {"model": torch.nn.Linear(3, 2), "odd": StateDict({"\x1b[2J": 1, "many": [{}] * 30})}
    return store.take(state, "run/step_7")


def test_a_manifest_is_a_tree_with_sizes(store: Store) -> None:
    manifest = take(store).get_manifest()
    lines = repr(manifest).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["model", "OrderedDict", "of", "2", "32", "B"],
        ["bias", "float32", "[2]", "8", "B"],
        ["weight", "float32", "[2,", "3]", "24", "B"],
    ]
    assert lines[-1] == "      … 10 more"
    assert repr(manifest).replace("\n", "").isprintable()
    html = manifest._repr_html_()
    assert html.startswith("<table><tr>")
    assert "float32 [2, 3]" in html
    assert len(html.split("<tr>")) == len(lines) + 1


def test_a_large_manifest_is_shown_in_part(store: Store) -> None:
    state = {f"key {i}": StateDict({str(j): {"x": 1} for j in range(20)}) for i in range(20)}
    lines = repr(store.take(state, "large").get_manifest()).splitlines()
    assert len(lines) == 201
    assert lines[-1] == "…"


def test_pending_takes_say_how_they_stand(store: Store) -> None:
    pending = store.async_take({"s": StateDict(x=1)}, "a")
    assert repr(pending).startswith(f"<PendingSnapshot '{store.uri}/a': ")
    pending.wait()
    assert repr(pending) == f"<PendingSnapshot '{store.uri}/a': stored>"
    tried = store.try_async_take({"s": StateDict(x=1)}, "b")
    tried.wait()
    assert repr(tried) == f"<PendingTry '{store.uri}/b': stored>"
    first = store.async_take({"s": StateDict(x=1)}, "c", max_pending=2)
    second = store.async_take({"s": StateDict(x=1)}, "c", max_pending=2)
    first.wait()
    with pytest.raises(SnapshotExistsError):
        second.wait()
    assert repr(second) == f"<PendingSnapshot '{store.uri}/c': failed: SnapshotExistsError>"


def test_a_mirror_and_a_random_state_say_what_they_are(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", mirror=tmp_path / "mirror")
    assert store.mirror is not None
    assert repr(store.mirror) == f"<Mirror '{tmp_path}/mirror' of '{tmp_path}/store'>"
    store.mirror.stop()
    assert repr(store.mirror) == f"<Mirror '{tmp_path}/mirror' of '{tmp_path}/store', stopped>"
    assert repr(RNGState()) == "RNGState()"


def test_names_and_paths_are_completed(store: Store) -> None:
    snapshot = take(store)
    assert store._ipython_key_completions_() == ["run/step_7"]
    paths = snapshot._ipython_key_completions_()
    assert {"model", "model/bias", "model/weight", "odd/many/29"} <= {*paths}
    assert all(path in snapshot for path in paths)
