"""Stores that were copied file by file while they were written: all states of such copies.

A copy goes through the folders of a store one after the other. So it has each folder as it was at
another time, and the newest root may name what came after its folder was copied.
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

from casnap import NewStore, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import DamagedError
from casnap.format.digest import digest_of
from casnap.format.records import PackId, SealedSegment, SegmentId, pack_key, segment_key
from casnap.integrations.dcp import CasnapReader, CasnapWriter
from casnap.storage import Runs
from casnap.storage.commit_log.roots import read_root
from casnap.view import repository_of
from tests.support.cli_calls import document, invoke
from tests.support.copies import names
from tests.support.damaged import listing_of
from tests.support.faults import CHUNK, files

FOLDERS = ("index", "packs", "roots")


def weights(step: int) -> torch.Tensor:
    return torch.arange(3 * CHUNK // 4, dtype=torch.float32) + 1000 * step


def take(store: Store, step: int) -> None:
    state = StateDict(w=weights(step), frozen=torch.ones(CHUNK))
    store.take({"m": state}, f"step_{step}")


def assert_holds(store: Store, name: str) -> None:
    state = StateDict(w=torch.zeros(3 * CHUNK // 4), frozen=torch.ones(CHUNK))
    store[name].restore({"m": state})
    assert torch.equal(state["w"], weights(int(name.removeprefix("step_"))))


class Source(NamedTuple):
    """A store, and what was in it at each time.

    Attributes:
        times: A folder with the files of each time.
        names: The names of the snapshots at each root.
    """

    times: list[Path]
    names: dict[int, list[str]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Two takes, a collection of the first one, and another take: four times."""
    base = tmp_path_factory.mktemp("cut")
    store = Store(base / "store", create=NewStore(chunk_size=CHUNK)).make()
    found = Source([], {0: []})

    def note() -> None:
        seq = repository_of(store).newest().seq
        found.names.update(dict.fromkeys(range(len(found.names), seq + 1), names(store)))
        to = base / str(len(found.times))
        shutil.copytree(base / "store", to)
        found.times.append(to)

    take(store, 1)
    note()
    take(store, 2)
    note()
    # Nothing is collected in the background.
    Runs(repository_of(store)).forget("step_1", store["step_1"].commit_id)
    store.gc(grace=0)
    note()
    take(store, 3)
    note()
    return found


def cut(source: Source, to: Path, times: tuple[int, ...]) -> Path:
    """Make the copy that has each folder as it was at one of the times."""
    inner = to / "casnap-store"
    inner.mkdir(parents=True)
    shutil.copy(source.times[0] / "casnap-store/casnap.json", inner)
    for folder, time in zip(FOLDERS, times, strict=True):
        shutil.copytree(source.times[time] / "casnap-store" / folder, inner / folder)
    return to


def is_whole(path: Path, seq: int) -> bool:
    """Whether a copy has the files that a root names."""
    backend = LocalBackend(path)
    root = read_root(backend, seq)
    for ref in root.segments:
        key = segment_key(SegmentId(ref.id))
        if backend.size_if_there(key) is None:
            return False
        packs = SealedSegment(backend.read(key), key).packs
        if any(p not in root.condemned and not backend.size_if_there(pack_key(p)) for p in packs):
            return False
    return True


@pytest.mark.parametrize("of_roots", range(4))
def test_each_state_of_a_copy(
    source: Source, tmp_path: Path, of_roots: int, caplog: pytest.LogCaptureFixture
) -> None:
    for number, times in enumerate(itertools.product(range(4), repeat=2)):
        path = cut(source, tmp_path / str(number), (*times, of_roots))
        newest = repository_of(Store(path, create=False)).newest().seq
        before = files(path)
        whole = [seq for seq in range(newest + 1) if is_whole(path, seq)]
        caplog.clear()
        with caplog.at_level(logging.WARNING, "casnap"):
            try:
                listed = names(Store(path, create=False))
            except DamagedError:
                # No root has all that it names.
                assert not any(source.names[seq] for seq in whole)
                continue
        told = [r for r in caplog.records if "is read as of root" in r.getMessage()]
        store = Store(path, create=False)
        if newest in whole:
            assert (listed, told) == (source.names[newest], [])
            assert store.check(data=True).ok
            continue
        if not told:
            # Only chunks of the newest root are missing: its names are known.
            assert listed == source.names[newest]
            assert not store.check().ok
            continue
        assert len(told) == 1
        assert listed == source.names[whole[-1]]
        latest = store.latest()
        assert latest is not None
        assert latest.name == listed[-1]
        for name in listed:
            assert_holds(store, name)
        assert any("is as of root" in warning for warning in store.check().warnings)
        with pytest.raises(DamagedError):
            take(store, 4)
        with pytest.raises(DamagedError, match="Nothing was deleted"):
            store.gc(grace=0)
        assert files(path) == before
        # A repair says what it did; nothing is deleted, and no number is used again.
        report = Store(path).repair()
        assert {key for key in before if "/copies/" not in key} <= files(path)
        assert report.root > newest
        repaired = Store(path)
        if report.restored_root is not None:
            assert report.ok
            assert report.restored_root == whole[-1]
            assert names(repaired) == listed
        else:
            # The index was made anew from the packs.
            assert names(repaired) == source.names[newest]
        if report.ok:
            for name in names(repaired):
                assert_holds(repaired, name)
            take(repaired, 5)
            repaired.gc(grace=0)
            assert repaired.check(data=True).ok
            assert_holds(repaired, "step_5")


def pack_of_table(path: Path) -> Path:
    root = repository_of(Store(path, create=False)).newest()
    assert root.table is not None
    assert root.table.hint is not None
    return path / "casnap-store" / pack_key(PackId(root.table.hint.pack))


def lose_table(path: Path, *, keep: float = 0.0) -> None:
    """Delete the pack that holds the newest table, or cut it off."""
    pack = pack_of_table(path)
    content = pack.read_bytes()
    pack.unlink()
    if keep:
        pack.write_bytes(content[: int(keep * len(content))])


@pytest.fixture
def path(source: Source, tmp_path: Path) -> Path:
    """Return a copy of the store after two takes, of which the last table is lost."""
    path = cut(source, tmp_path / "copy", (1, 1, 1))
    lose_table(path)
    return path


def test_the_commands(path: Path) -> None:
    assert "step_1" in invoke("ls", path).stdout
    assert document("ls", path)["snapshots"][0]["name"] == "step_1"
    dry = json.loads(invoke("repair", path, "--dry-run", "--json", status=1).stdout)
    assert dry["restored_root"] == 1
    said = invoke("repair", path, "--dry-run", status=1).stdout
    assert "root 1, the newest whole one, would be the last again" in said
    assert invoke("check", path, status=1).stdout.count("is as of root 1") == 1
    said = invoke("repair", path, "--yes", status=1).stdout
    assert "root 1, the newest whole one, is the last again" in said
    assert "all that is listed is whole" in said
    assert "that roots 2 to 2 added are given up" in said.replace("\n", " ")
    invoke("check", path, "--data")
    assert document("repair", path, "--yes")["restored_root"] is None


def test_what_is_read_goes_on_where_it_is_repaired_meanwhile(path: Path, tmp_path: Path) -> None:
    store = Store(path, create=False)
    assert names(store) == ["step_1"]
    # What can be read can be copied out.
    assert store.copy("step_1", to=tmp_path / "other").copied == ["step_1"]
    Store(path).repair()
    take(Store(path), 7)
    assert names(store) == ["step_1", "step_7"]
    assert_holds(store, "step_7")
    take(store, 8)
    assert names(Store(path)) == ["step_1", "step_7", "step_8"]


@pytest.mark.parametrize("keep", [0.0, 0.1])
def test_what_is_read_goes_on_where_the_rest_is_copied_meanwhile(
    source: Source, tmp_path: Path, keep: float
) -> None:
    path = cut(source, tmp_path / "copy", (1, 1, 1))
    pack = pack_of_table(path)
    content = pack.read_bytes()
    lose_table(path, keep=keep)
    store = Store(path, create=False)
    assert names(store) == ["step_1"]
    pack.write_bytes(content)
    assert names(store) == ["step_1", "step_2"]
    assert_holds(store, "step_2")


def test_what_is_read_goes_back_again_where_a_newer_root_is_copied_alone(
    source: Source, tmp_path: Path
) -> None:
    path = cut(source, tmp_path / "copy", (0, 0, 0))
    store = Store(path, create=False)
    for time in (0, 1, 3):
        roots = source.times[time] / "casnap-store/roots"
        shutil.copytree(roots, path / "casnap-store/roots", dirs_exist_ok=True)
        assert names(store) == ["step_1"]


def test_what_an_older_root_does_not_have_is_not_called_absent(tmp_path: Path) -> None:
    """A run that began after it would begin anew."""
    for name in ("old/step_1", "new/step_1"):
        Store(tmp_path / "store").take({"m": StateDict(step=1)}, name)
    path = Path(shutil.copytree(tmp_path / "store", tmp_path / "copy"))
    lose_table(path)
    store = Store(path, create=False)
    assert names(store) == ["old/step_1"]
    for look in (
        lambda: store.latest("new"),
        lambda: Store(path / "new", create=False).latest(),
        lambda: store["new/step_1"],
        lambda: "new/step_1" in store,
    ):
        with pytest.raises(DamagedError, match=r"only as of root 1, .* Root 2 may have one"):
            look()
    latest = store.latest("old")
    assert latest is not None
    assert latest.name == "old/step_1"


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("lost", ["table", "segment"])
def test_a_tag_is_looked_for_as_of_the_whole_root(
    tmp_path: Path, lost: str, *, published: bool
) -> None:
    store = Store(tmp_path / "store")
    for step in (1, 2):
        take(store, step)
    if published:
        store.publish("stable", "step_1")
    else:
        store.tag("step_1", "stable")
    take(store, 3)
    store.tag("step_3", "later")
    path = Path(shutil.copytree(tmp_path / "store", tmp_path / "copy"))
    if lost == "table":
        lose_table(path)
    else:
        segments = (path / "casnap-store/index").iterdir()
        max(segments, key=lambda segment: segment.name).unlink()
    assert Store(path, create=False).tagged("stable").name == "step_1"
    copy = Store(path, create=False)
    assert_holds(copy, copy.tagged("stable").name)
    with pytest.raises(DamagedError, match=r"no snapshot tagged 'absent'"):
        copy.tagged("absent")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_reads_as_of_the_whole_root_too(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"w": weights(step)}, storage_writer=CasnapWriter(tmp_path / f"store/step_{step}"))
    path = Path(shutil.copytree(tmp_path / "store", tmp_path / "copy"))
    segments = (path / "casnap-store/index").iterdir()
    max(segments, key=lambda segment: segment.name).unlink()
    state = {"w": torch.zeros_like(weights(1))}
    dcp.load(state, storage_reader=CasnapReader(path / "step_1"))
    assert torch.equal(state["w"], weights(1))


@pytest.mark.parametrize("keep", [0.0, 0.1])
def test_a_copy_with_gaps(tmp_path: Path, keep: float) -> None:
    """A pack that is cut off, and a root that is lost: its number is not taken."""
    for step in (1, 2, 3):
        take(Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK)), step)
    path = Path(shutil.copytree(tmp_path / "store", tmp_path / "copy"))
    gap = path / "casnap-store/roots/0/2"
    lose_table(path, keep=keep)
    gap.unlink()
    store = Store(path)
    assert names(store) == ["step_1"]
    assert_holds(store, "step_1")
    with pytest.raises(DamagedError):
        take(store, 4)
    report = Store(path).repair()
    assert (report.ok, report.restored_root) == (True, 1)
    assert report.root > 3
    take(Store(path), 4)
    assert names(Store(path)) == ["step_1", "step_4"]
    assert not gap.exists()


def test_whole_chunks_stay_listed(tmp_path: Path) -> None:
    """The chunks of the snapshots that are lost: a later take of the same weights finds them."""
    for step in (1, 2, 3):
        take(Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK)), step)
    path = Path(shutil.copytree(tmp_path / "store", tmp_path / "copy"))
    lose_table(path)
    report = Store(path).repair()
    assert (report.ok, report.restored_root) == (True, 2)
    assert names(Store(path)) == ["step_1", "step_2"]
    listing = listing_of(path)
    assert all(listing.of(digest_of(w.numpy().tobytes())) for w in weights(3).split(CHUNK // 4))
    take(Store(path), 3)
    assert Store(path)["step_3"].stats.new_bytes < CHUNK
    assert Store(path).check(data=True).ok


def test_an_empty_older_root_does_not_do(source: Source, tmp_path: Path) -> None:
    """A run would begin anew."""
    path = cut(source, tmp_path / "copy", (0, 0, 0))
    lose_table(path)
    with pytest.raises(DamagedError):
        Store(path).latest()
    report = Store(path).repair()
    assert not report.ok
    assert report.restored_root is None
    with pytest.raises(DamagedError):
        Store(path).latest()


def test_damage_of_another_kind_is_no_reason_to_go_back(source: Source, tmp_path: Path) -> None:
    """The files are all there: what is wrong in them is told."""
    path = cut(source, tmp_path / "copy", (1, 1, 1))
    pack = pack_of_table(path)
    pack.write_bytes(bytes(pack.stat().st_size))
    with pytest.raises(DamagedError):
        Store(path).latest()
    assert Store(path).repair().restored_root is None


def test_a_check_says_which_snapshots_are_read_meanwhile(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    take(store, 1)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    take(store, 2)
    shutil.copytree(
        tmp_path / "store/casnap-store/roots",
        tmp_path / "copy/casnap-store/roots",
        dirs_exist_ok=True,
    )
    report = Store(tmp_path / "copy").check()
    assert {hurt.snapshot for hurt in report.hurts} == {"*"}
    read_as_of = (
        "until a repair, the store is read as of root 1, the newest whole one; its snapshots"
    )
    assert any(text.startswith(read_as_of) for text in report.warnings)
    shown = invoke("check", tmp_path / "copy", status=1).stdout
    assert "hurts all snapshots of the newest root" in shown
