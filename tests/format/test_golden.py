"""Stores that earlier versions made: each is read, checked, collected, copied and added to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.errors import UnsupportedFormatError
from casnap.format.names import STORE_FOLDER, component_of
from tests.support.golden import GOLDEN, UNSUPPORTED, WITNESSED, described, health_of, unpack
from tests.support.read_alike import assert_read_alike
from tests.support.remote import RemoteDouble

NOTES = {"recoded", "rewound", "thinned", "thin", "unmirrored", "succeeded", "follows", "from"}
NOTES |= {"unhealthy"}
# None of these is ever changed, or made anew. A later version may add some.
MADE = {
    "chains.json": "f2c3ed9990f198f025ada549cce5e781",
    "chains.tar.xz": "174d5a9b9b0679b5fb011cb974f196ff",
    "codecs.json": "2595582272d4d03b6cc0c230e6b3b1d0",
    "codecs.tar.xz": "64b056ecad9380816dc4249cad821b34",
    "copied.json": "e7797aba47f2a6ebf8955eb6f469fbf4",
    "copied.tar.xz": "53572c6dcb9538b2e7249aa3f046f916",
    "environment.json": "603344461d64f141c34cb0098ee2f6bc",
    "environment.tar.xz": "3a5ecd505665d66780e6c59453051964",
    "forged.json": "bc7b5f5f598c2e906ee3a066dc9708c4",
    "forged.tar.xz": "c2608b6ec63f84727637656d700e74a7",
    "health.json": "10d1d9a5f668a9b5a4cd4fb5ae2f474a",
    "health.tar.xz": "f42708e7c38b568fd45611fda08d8df3",
    "kinds.json": "8a042455832340053e5bb276e89ca0dd",
    "kinds.tar.xz": "823a6f350310eed001a049f8a85b5c3f",
    "later.json": "5285c957acc7f05e5e0c82cd0ba470f4",
    "later.tar.xz": "81e6e8a1caa9b6859d39cecfb00aaf05",
    "levels.json": "cd6c28ab4778dcfff653d1ce39cde2f7",
    "levels.tar.xz": "c72efb9f664b48f8d6eeb12a2a0c4292",
    "many.json": "43b96937f63d6500aa9a3d412f5c21fd",
    "many.tar.xz": "d852423cd582b8fc9e49eeebd5c3478a",
    "ranks.json": "5a78ce097c83805a7491eef4c399e4b2",
    "ranks.tar.xz": "05e77baf45473747cb7ee2c62c1b58c0",
    "remote.json": "d233004dd0a01cdf52ae9b91658fa9b2",
    "remote.tar.xz": "4c4038b09083d4dd13c8e6b6662e4fad",
    "small.json": "49a8cd203fea93c25867d06f67ec0f39",
    "small.tar.xz": "9c8cd7f45e9c6de81ecba488b48aea35",
    "witness.json": "9abaa1a17df6158cbb3941260296ea33",
    "witness.tar.xz": "8e462091d5981a5608f77739cbddb554",
}


def restored(store: Store, name: str, rank: int, keys: list[str]) -> Any:
    """Return what a rank gets, described as it was when it was taken."""
    components = {key: component_of(key) for key in keys}
    assert set(store[name].contents.trees(rank)) == set(components.values())
    return {key: _read(store[name], f"{rank}/{part}") for key, part in components.items()}


def _read(snapshot: Snapshot, path: str) -> Any:
    try:
        return described(snapshot.read_object(path, allow_pickle=True))
    except UnsupportedFormatError as e:
        assert "update casnap" in str(e)  # noqa: PT017
        return UNSUPPORTED


def check_all(store: Store, document: dict[str, Any], prefix: str = "") -> None:
    for name, expected in document["snapshots"].items():
        snapshot = store[prefix + name]
        assert snapshot.commit_id == expected["commit"]
        assert snapshot.metadata.user == expected["metadata"]
        assert list(snapshot.tags) == expected["tags"]
        if snapshot.row.features:
            with pytest.raises(UnsupportedFormatError, match="update casnap"):
                snapshot.contents.trees(0)
            continue
        assert list(snapshot.thinned) == expected["thinned"]
        assert snapshot.world_size == expected["world_size"]
        assert snapshot.environment == expected.get("environment", {})
        assert health_of(snapshot) == expected.get("health", {})
        for rank, keys in enumerate(expected["ranks"]):
            assert restored(store, prefix + name, rank, list(keys)) == keys


# Newer versions of torch say that these dtypes go; stores that hold them stay.
pytestmark = pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")


@pytest.fixture(params=sorted(path.name.split(".")[0] for path in GOLDEN.glob("*.tar.xz")))
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Store, dict[str, Any]]:
    document = unpack(request.param, tmp_path / "store")
    return Store(tmp_path / "store", create=False), document


def test_none_was_made_anew() -> None:
    found = {path.name: blake3(path.read_bytes()).hexdigest()[:32] for path in GOLDEN.iterdir()}
    assert found == MADE
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) < 200_000


def test_what_they_have(tmp_path: Path) -> None:
    codecs: set[int] = set()
    notes: set[str] = set()
    copies = condemned = hinted = 0
    for archive in GOLDEN.glob("*.tar.xz"):
        name = archive.name.split(".")[0]
        unpack(name, tmp_path / name)
        store = Store(tmp_path / name, create=False)
        root = store._view.repository.newest()
        segments = [store._view.repository.index.segment(ref) for ref in root.segments]
        codecs |= {place.codec for segment in segments for _, place in segment.records}
        notes |= {note for snapshot in store.snapshots() for note in snapshot.row.notes}
        copies += len(root.copies)
        condemned += len(root.condemned)
        packs = (tmp_path / name / STORE_FOLDER).glob("packs/*/*")
        hinted += sum(b"CASNAPh1" in pack.read_bytes() for pack in packs)
    assert codecs == {0, 1, 2, 9}, "the last one is of no version so far"
    assert notes >= NOTES
    assert copies == 1
    assert condemned >= 1
    assert hinted >= 1


def test_it_is_read(golden: tuple[Store, dict[str, Any]]) -> None:
    store, document = golden
    assert {s.name for s in store.snapshots()} == set(document["snapshots"])
    assert store.settings == document["settings"]
    for name, expected in document["snapshots"].items():
        assert described(store[name].row.notes) == expected["notes"]
    check_all(store, document)
    assert store.check(data=True).ok


def test_a_witness_is_met(tmp_path: Path) -> None:
    unpack("witness", tmp_path)
    store = Store(tmp_path, create=False)
    for name in ("run/0", "run/2"):
        report = store.witness(WITNESSED, name)
        assert (report.stored, report.equal) == (False, True)


def test_it_is_read_in_a_bucket(golden: tuple[Store, dict[str, Any]], tmp_path: Path) -> None:
    bucket = RemoteDouble(str(tmp_path))
    place = tmp_path / "store" / STORE_FOLDER
    for path in (path for path in place.rglob("*") if path.is_file()):
        bucket.write(str(path.relative_to(place)), path.read_bytes())
    check_all(Store(bucket), golden[1])


def test_it_is_copied(golden: tuple[Store, dict[str, Any]], tmp_path: Path) -> None:
    store, document = golden
    copy = Store(tmp_path / "copy", create=NewStore(chunk_size=store.chunk_size)).make()
    for name, expected in list(document["snapshots"].items()):
        if UNSUPPORTED in json.dumps(expected):
            with pytest.raises(UnsupportedFormatError, match="update casnap"):
                store.copy(name, to=copy, rename=f"of/{name}")
            store.delete(name)
            del document["snapshots"][name]
    store.copy(to=copy, rename="of")
    check_all(copy, document, "of/")
    assert copy.check(data=True).ok


def test_it_is_added_to_and_collected(golden: tuple[Store, dict[str, Any]]) -> None:
    store, document = golden
    before = store.check(data=True).unsupported
    assert bool(before) == (UNSUPPORTED in json.dumps(document))
    weight = torch.arange(30_000)
    for step in range(3):
        store.take({"m": StateDict(w=weight + step, x={("a", 1): step})}, f"new/{step}")
    name = next(iter(document["snapshots"]))
    store.tag(name, "later")
    store.delete("new/1")
    store.gc(grace=0, repack=1.0)
    document["snapshots"][name]["tags"] = sorted([*document["snapshots"][name]["tags"], "later"])
    check_all(store, document)
    assert torch.equal(store["new/2"].read_object("m/w"), weight + 2)
    report = store.check(data=True)
    assert report.ok
    assert [d.hurts for d in report.unsupported] == [d.hurts for d in before]


def test_it_is_read_without_casnap(golden: tuple[Store, dict[str, Any]], tmp_path: Path) -> None:
    count = assert_read_alike(tmp_path / "store")
    assert count >= 2 * len(golden[1]["snapshots"])
