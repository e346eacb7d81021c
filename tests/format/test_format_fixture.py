"""A store that this format's first version wrote is read for ever, and written to."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from casnap import RNGState, Snapshot, StateDict, Store
from casnap.format.entries import ContainerEntry, TensorEntry, ValueEntry, payload_of
from tests.support.bitwise import assert_same
from tools import make_fixture
from tools.make_fixture import FOLDER, SNAPSHOTS, app_state, metadata

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

LIMIT = 200_000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a copy of the fixture that may be changed."""
    shutil.copytree(FOLDER, tmp_path / "store")
    make_fixture.allow_settings()
    return Store(tmp_path / "store", create=False)


def blank(content: dict[str, Any]) -> dict[str, Any]:
    """Return a state of the same keys that holds nothing of what was taken."""
    return {key: StateDict() for key in content}


def assert_holds(snapshot: Snapshot, content: dict[str, Any]) -> None:
    state = blank(content)
    snapshot.restore(state)
    for key, expected in content.items():
        assert_same(state[key].data, expected, f"{snapshot.name}: {key}")


def test_the_fixture_is_small() -> None:
    assert sum(p.stat().st_size for p in FOLDER.rglob("*") if p.is_file()) < LIMIT


def test_its_snapshots(store: Store) -> None:
    """The deleted one is gone, the overwritten one is the later one, in the order of commits."""
    assert [s.name for s in store.snapshots()] == [*SNAPSHOTS, "quantized"]
    assert [s.name for s in store.snapshots("run")] == ["run/step_0", "run/step_2", "run/step_3"]
    assert "run/step_1" not in store
    for name, step in SNAPSHOTS.items():
        snapshot = store[name]
        assert snapshot.metadata.user == metadata(step)
        assert snapshot.world_size == 1
        assert snapshot.tags == ()
        assert snapshot.time > 1.7e9
        assert snapshot.stats.logical_bytes > 393_216
        assert snapshot.stats.new_bytes > 0


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_all_is_restored(store: Store, name: str) -> None:
    """Every kind of value comes back to the bit, into states that held nothing of it."""
    assert_holds(store[name], app_state(SNAPSHOTS[name]))


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_tensors_are_restored_in_place(store: Store, name: str) -> None:
    expected = app_state(SNAPSHOTS[name])["weights"]
    state = StateDict(large=torch.zeros(96, 1024), bias=torch.zeros(100), step=None)
    large = state["large"]
    store[name].restore({"weights": state})
    assert state["large"] is large
    assert_same(state.data, expected)


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_quantized_tensors(store: Store) -> None:
    try:
        content = make_fixture.quantized()
    except (AttributeError, RuntimeError):
        pytest.skip("this torch makes no quantized tensors any more")
    assert_holds(store["quantized"], {"quantized": content})


def test_the_generators(store: Store) -> None:
    """What is drawn after a restore is what is drawn after the take."""
    before = RNGState().state_dict()
    try:
        make_fixture.seed_generators()
        expected = random.random(), torch.rand(3).tolist(), np.random.rand()
        store["run/step_0"].restore({"generators": RNGState()})
        assert (random.random(), torch.rand(3).tolist(), np.random.rand()) == expected
    finally:
        RNGState().load_state_dict(before)


def test_single_entries(store: Store) -> None:
    """Reads of one entry, and of a part of one, through a list of digests."""
    for name, step in SNAPSHOTS.items():
        large = app_state(step)["weights"]["large"]
        entry = store[name].get_manifest()["0/weights/large"]
        assert isinstance(entry, TensorEntry)
        assert entry.data.depth == 1
        assert_same(store[name].read_object("0/weights/large"), large)
        part = store[name].read_object("weights/large", index=(slice(10, 90, 7), -1))
        assert_same(part, large[10:90:7, -1])
    values = make_fixture.values()
    assert store["run/step_0"].read_object("values/long_str") == values["long_str"]
    assert_same(store["run/step_0"].get_state_dict_for_key("values"), values)


def test_nothing_of_the_format_is_missing(store: Store) -> None:
    """The fixture holds every kind of entry, payload, node and record, so that all are read."""
    manifest = store["run/step_0"].get_manifest()
    entries = [*manifest.values(), *store["quantized"].get_manifest().values()]
    values = {e.kind for e in entries if isinstance(e, ValueEntry)}
    for kind in ("none", "int", "enum", "object", "packed_list", "packed_tuple", "packed_set"):
        assert kind in values
    assert "pickle" not in values
    kinds = {e.kind for e in entries if isinstance(e, TensorEntry)}
    assert kinds >= {"tensor", "parameter", "ndarray", "numpy_scalar"}
    containers = {e.kind for e in entries if isinstance(e, ContainerEntry)}
    assert containers >= {"dict", "defaultdict", "namedtuple", "deque", "size", "sparse_coo"}
    payloads = [payload_of(entry) for entry in entries]
    assert any(p.inline for p in payloads)
    assert {p.depth for p in payloads if p.digests} == {0, 1}

    contents = store["run/step_0"].contents
    assert len(contents.tree(contents.manifest.shared["many"]).children) > 1
    assert "generators" in contents.manifest.ranks["0"]
    root = store.objects.newest()
    written = {p.name for p in Path(store.uri, "casnap-store/index").iterdir()}
    assert 1 < len(root.segments) < len(written)  # some were merged
    live = [store.objects.index.segment(ref) for ref in root.segments]
    codecs = {place.codec for segment in live for _, place in segment.records}
    assert codecs == {0, 1}


def test_diff_and_usage(store: Store) -> None:
    found = store.diff("run/step_2", "run/step_3")
    assert [c.path for c in found.changes] == ["weights/bias", "weights/large", "weights/step"]
    assert found.changes[1].changed_bytes == 2 * make_fixture.CHUNK
    used = {u.name: u for u in store.usage()}
    assert used.keys() == {*SNAPSHOTS, "quantized"}
    assert all(0 < u.unique_bytes < u.stored_bytes for u in used.values() if u.name != "quantized")


def test_another_snapshot_is_taken(store: Store) -> None:
    """A take finds what is there, in either codec, and all of it stays readable."""
    again = make_fixture.stateful({"weights": app_state(2)["weights"]})
    taken = store.take(again, "run/again", metadata={"x": 1})
    assert taken.stats.new_bytes < 2_000
    store.take(make_fixture.stateful(app_state(9)), "run/step_9")
    store.delete("more/5")
    store.take(make_fixture.stateful(app_state(10)), "run/step_3", overwrite=True)

    later = Store(store.uri, create=False)
    names = [s.name for s in later.snapshots()]
    kept = [n for n in SNAPSHOTS if n not in ("more/5", "run/step_3")]
    assert names == [*kept, "quantized", "run/again", "run/step_9", "run/step_3"]
    for name in kept:
        assert_holds(later[name], app_state(SNAPSHOTS[name]))
    for name, step in (("run/again", 2), ("run/step_9", 9), ("run/step_3", 10)):
        assert_holds(later[name], {"weights": app_state(step)["weights"]})


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_it_is_made_again_alike(tmp_path: Path) -> None:
    """The tool makes what stands in the fixture: the same trees, at other times and places."""
    make_fixture.make(tmp_path / "store")
    made, kept = Store(tmp_path / "store"), Store(FOLDER, create=False)
    for name in SNAPSHOTS:
        new, old = made[name].contents.manifest.shared, kept[name].contents.manifest.shared
        # torch.save and the hash of an object's class may change with torch.
        assert {k: d for k, d in new.items() if k != "values"} == {
            k: d for k, d in old.items() if k != "values"
        }
