"""A pull makes a folder that is always one whole version, and writes only what has changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from casnap import StateDict, Store
from casnap.backends.local_files.file_io import is_cached
from casnap.errors import CasnapError, EntryNotFoundError, FileFormatError, SnapshotNotFoundError
from casnap.serving import PullOptions, verify, writing
from casnap.serving.version import Version
from tests.support.faults import in_child
from tests.support.served import (
    assert_served,
    inodes,
    store_at,
    take,
    tensors_in,
    versions_of,
    weights,
)

SHARDS = PullOptions(max_shard_size=250_000)


def test_a_pull(store: Store, live: Path) -> None:
    report = store.pull(live)
    assert_served(live, 0)
    assert report.switched
    assert sorted(report.changed) == sorted(weights(0))
    assert (report.snapshot, report.folder) == ("step_0", os.path.realpath(live))
    assert report.fetched_bytes == sum(t.nbytes for t in weights(0).values())
    assert str(live.readlink()) == f"live.versions/step_0@{report.commit}"
    again = store.pull(live)
    assert not again.switched
    assert again.fetched_bytes == again.copied_bytes == 0
    assert versions_of(live) == [f"step_0@{report.commit}"]


def test_only_what_has_changed_is_read_and_written(store: Store, live: Path) -> None:
    store.pull(live, options=SHARDS)
    before = inodes(live)
    take(store, 1)
    report = store.pull(live, options=SHARDS)
    assert_served(live, 1)
    assert sorted(report.changed) == ["bias", "layers.1"]
    assert report.fetched_bytes <= 64 << 10 + 20
    after = inodes(live)
    kept = {name for name in before if before[name] == after.get(name)}
    assert len(kept) == sum(name.endswith(".safetensors") for name in before) - 2 + 1
    assert "model.safetensors.index.json" not in kept
    assert report.linked_bytes == sum((live / name).stat().st_size for name in kept)


def test_a_reader_of_the_old_version_goes_on(store: Store, live: Path) -> None:
    store.pull(live)
    old = live.resolve()
    take(store, 1)
    store.pull(live)
    assert_served(old, 0)
    assert_served(live, 1)
    mapped = torch.UntypedStorage.from_file(str(old / "model.safetensors"), False, 8)
    take(store, 2)
    store.pull(live, options=PullOptions(keep=1))
    assert not old.exists()
    assert len(bytes(mapped.tolist())) == 8
    assert len(versions_of(live)) == 1


def test_the_last_versions_stay_if_the_clock_was_set_back(store: Store, live: Path) -> None:
    """Who has loaded the version before goes on with it."""
    store.pull(live)
    os.utime(live.resolve(), (4e9, 4e9))
    for step in range(1, 4):
        before = live.resolve()
        take(store, step)
        store.pull(live)
        assert_served(before, step - 1)
        assert_served(live, step)
        assert len(versions_of(live)) == 2


def test_what_is_gone_before_it_is_deleted(
    store: Store, live: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as what a pull has made that was refused then."""
    real = os.listdir

    def listdir(folder: Any = ".") -> list[str]:
        return [*real(folder), *([".gone.partial"] if isinstance(folder, int) else [])]

    monkeypatch.setattr(os, "listdir", listdir)
    store.pull(live)
    assert_served(live, 0)
    assert not caplog.records


def test_which_snapshot(store: Store, live: Path) -> None:
    take(store, 1, "run1/a")
    take(store, 2, "run2/a")
    take(store, 3, "run1/b")
    store.tag("run1/a", "stable")

    def pulled(source: Store, name: str | None = None, **options: str) -> str:
        return source.pull(live, name, options=PullOptions(**options)).snapshot

    assert pulled(store) == "run1/b"
    assert pulled(store, tag="stable") == "run1/a"
    assert pulled(store, match="run2/*") == "run2/a"
    assert pulled(store, match="*/a") == "run2/a"
    assert pulled(store, "run1") == "run1/b"
    assert pulled(store, "run1", match="[a]") == "run1/a"
    assert pulled(store, "run1/b", match="a") == "run1/b"
    assert pulled(store, "run1/a") == "run1/a"
    assert pulled(Store(Path(store.uri) / "run1"), match="a") == "run1/a"
    assert_served(live, 1)
    with pytest.raises(SnapshotNotFoundError, match="tagged 'best'"):
        pulled(store, tag="best")
    with pytest.raises(SnapshotNotFoundError, match="below 'run3'"):
        pulled(store, "run3")
    assert_served(live, 1)


def test_a_version_that_is_kept_is_not_written_again(store: Store, live: Path) -> None:
    store.tag("step_0", "stable")
    first = store.pull(live)
    take(store, 1)
    store.pull(live)
    back = store.pull(live, options=PullOptions(tag="stable"))
    assert (back.folder, back.switched, back.fetched_bytes) == (first.folder, True, 0)
    assert sorted(back.changed) == ["bias", "layers.1"]
    assert_served(live, 0)


def test_names_dtypes_and_ties(store: Store, live: Path) -> None:
    shared = torch.rand(40_000)
    take(store, 1, head=shared, embed=shared, ids=torch.arange(10))
    options = PullOptions(
        rename=[r"s/^layers\.(\d+)/blocks.\1.weight/", "s|norm|final_norm|"],
        dtype="bfloat16",
        tied=["head"],
    )
    report = store.pull(live, options=options)
    assert report.equal == {}
    found = tensors_in(live)
    assert "head" not in found
    assert {"blocks.3.weight", "final_norm", "embed", "ids"} <= found.keys()
    assert found["ids"].dtype == torch.int64
    assert torch.equal(found["embed"], shared.bfloat16())
    assert torch.equal(found["final_norm"], weights(1)["norm"].bfloat16())
    assert torch.equal(found["blocks.1.weight"], weights(1)["layers.1"])
    record = json.loads((live / "casnap-version.json").read_text())
    assert not record["exact"]
    assert record["tied"] == {"head": "embed"}
    assert record["mapping"]["dtype"] == "bfloat16"
    assert record["tensors"]["embed"]["cast_from"] == "float32"
    assert "cast_from" not in record["tensors"]["blocks.1.weight"]
    assert verify(live) == []

    take(store, 2, head=shared, embed=shared, ids=torch.arange(10))
    report = store.pull(live, options=options)
    assert sorted(report.changed) == ["bias", "blocks.1.weight"]
    assert report.fetched_bytes < 80_000
    assert verify(live) == []
    # The same snapshot, otherwise: another version.
    assert store.pull(live).equal == {"head": "embed"}
    assert tensors_in(live)["embed"].dtype == torch.float32
    assert verify(live) == []


def test_tensors_that_come_and_go(store: Store, live: Path) -> None:
    store.pull(live, options=SHARDS)
    take(store, 1, added=torch.rand(30_000), norm=torch.rand(7))
    report = store.pull(live, options=SHARDS)
    assert {"added", "norm"} <= set(report.changed)
    assert torch.equal(tensors_in(live)["layers.2"], weights(1)["layers.2"])
    take(store, 2)
    store.pull(live, options=SHARDS)
    assert_served(live, 2)


def test_small_files_but_none_that_a_loader_could_unpickle(store: Store, live: Path) -> None:
    files = {
        "config.json": "{}",
        "tokenizer.json": b"x" * 100_000,
        "training_args.bin": b"pickle",
        "model.safetensors": b"mine",
        "casnap-version.json": "{}",
        "../outside.json": "{}",
        ".hidden": "",
        "number": 1,
        "model card, v+1 (2).md": "kept",
        "配置.json": "{}",
        # Such a name made each pull fail.
        "": "no name",
        **dict.fromkeys(("..", "-rf", " ", 'a"b.json', "$(x).json", "a\x9bb", "a\nb"), "{}"),
        **dict.fromkeys(("Casnap-chunks", "x" * 256, "é" * 128, "\ud800"), "{}"),
    }
    store.take({"model": StateDict(w=torch.ones(9)), "files": StateDict(files)}, "s")
    store.pull(live)
    names = {"config.json", "tokenizer.json", "model.safetensors", "配置.json"}
    names |= {"model card, v+1 (2).md"}
    assert inodes(live).keys() == names | {"casnap-version.json", "casnap-chunks"}
    assert (live / "tokenizer.json").read_bytes() == b"x" * 100_000
    assert verify(live) == []


@pytest.mark.parametrize("in_place", [False, True])
def test_no_name_of_a_snapshot_is_more_than_a_name(
    store: Store, live: Path, in_place: bool
) -> None:
    """Commands put the folder into JSON, URLs and shells, and engines get its name."""
    take(store, 1, 'run/épo che=1", "x": "$(id)`id`\';<b>&%2e\x9b')
    report = store.pull(live, options=PullOptions(in_place=in_place))
    assert Version.name_of(Path(report.folder)) == (
        f"_po_che=1____x______id__id____b___2e_@{report.commit}"
    )
    take(store, 2, "run/" + "y" * 250)
    report = store.pull(live, options=PullOptions(in_place=in_place))
    assert Version.name_of(Path(report.folder)) == f"{'y' * 180}@{report.commit}"


def test_an_adapter_is_named_as_peft_looks_for_it(store: Store, live: Path) -> None:
    files = StateDict({"adapter_config.json": "{}"})
    adapter = {
        f"q_proj.lora_{x}.weight": torch.full((50, 50), float(i)) for i, x in enumerate("AB")
    }
    store.take({"model": StateDict(adapter), "files": files}, "a")
    store.pull(live, options=SHARDS)
    own = {"casnap-version.json", "casnap-chunks"}
    assert inodes(live).keys() == own | {"adapter_config.json", "adapter_model.safetensors"}
    assert verify(live) == []
    adapter["q_proj.lora_B.weight"] += 1
    store.take({"model": StateDict(adapter), "files": files}, "b")
    assert store.pull(live, options=SHARDS).changed == ["q_proj.lora_B.weight"]
    found = load_file(live / "adapter_model.safetensors")
    assert found.keys() == adapter.keys()
    assert all(found[name].equal(adapter[name]) for name in adapter)
    # A whole model that PEFT has wrapped is no adapter: it would be taken for an empty one.
    wrapped = StateDict(adapter | {"q_proj.base_layer.weight": torch.ones(50)})
    store.take({"model": wrapped, "files": files}, "c")
    store.pull(live)
    assert inodes(live).keys() == own | {"adapter_config.json", "model.safetensors"}


def test_a_version_is_in_memory_when_it_is_switched_to(disk_path: Path) -> None:
    store, live = Store(disk_path / "store"), disk_path / "live"
    weights = torch.arange(4 << 20)
    for step in range(2):
        weights[step << 21 :] += 1
        store.take({"model": StateDict(w=weights)}, f"step_{step}")
        store.pull(live)
        with (live / "model.safetensors").open("rb") as file:
            file.read(1)
            if not is_cached(file.fileno(), 0):
                pytest.skip("this file system does not say what is in memory")
            places = range(0, os.fstat(file.fileno()).st_size, 1 << 20)
            assert all(is_cached(file.fileno(), place) for place in places), step


def test_what_safetensors_cannot_hold_is_told(store: Store, live: Path) -> None:
    store.take({"model": StateDict(w=torch.ones(3), note="x")}, "s")
    assert store.pull(live).left_out == ["model/note"]
    with pytest.raises(FileFormatError, match="no tensor"):
        store.pull(live, "step_0", options=PullOptions(path="progress"))
    with pytest.raises(EntryNotFoundError, match="nearest"):
        store.pull(live, options=PullOptions(path="modle"))
    with pytest.raises(FileFormatError, match="the same name 'x'"):
        store.pull(live, "step_0", options=PullOptions(rename=["s/.*/x/"]))
    assert tensors_in(live)["w"].tolist() == [1, 1, 1]


def test_metadata_that_json_has_no_number_for(store: Store, live: Path) -> None:
    metadata = {"loss": float("nan"), "é": [1, {"x": None}]}
    store.take({"model": StateDict(w=torch.ones(3))}, "s", metadata=metadata)
    store.pull(live)
    record = json.loads((live / "casnap-version.json").read_text())
    assert record["metadata"] == {"loss": None, "é": [1, {"x": None}]}
    assert not store.pull(live).switched


def test_blocks_that_a_file_system_shares(
    store: Store, live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on XFS and Btrfs: only what has changed is written, and what is shared is verified."""

    def ioctl(fd: int, request: int, source: int) -> None:
        assert request == 0x40049409  # FICLONE
        os.ftruncate(fd, os.fstat(source).st_size)
        os.copy_file_range(source, fd, os.fstat(source).st_size, 0, 0)

    written: list[int] = []

    def write_cached(fd: int, view: memoryview, offset: int) -> None:
        written.append(len(view))
        real(fd, view, offset)

    store.pull(live)
    monkeypatch.setattr(writing.fcntl, "ioctl", ioctl)
    real = writing.write_cached
    monkeypatch.setattr(writing, "write_cached", write_cached)
    for step in (1, 2):
        take(store, step)
        written.clear()
        file = live.resolve() / "model.safetensors"
        if step == 2:
            info = file.stat()
            with file.open("r+b") as f:
                f.seek(200_000)
                f.write(b"tampered")
            os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
        report = store.pull(live)
        assert_served(live, step)
        assert report.fetched_bytes <= step * (64 << 10) + 20
        assert sum(written) < 100_000 + step * (64 << 10)


@pytest.mark.parametrize("rename", ["s/a/b", "y/a/b/", "s/(/x/", r"s/a/\1/", "sxaxbx"])
def test_malformed_renames(rename: str) -> None:
    with pytest.raises(ValueError, match="rename="):
        PullOptions(rename=[rename])


def test_nothing_else_is_replaced(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    with pytest.raises(FileFormatError, match="no pull made it"):
        store.pull(folder)
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(FileFormatError, match="no pull made it"):
        store.pull(link)
    assert link.resolve() == folder
    (tmp_path / "elsewhere").symlink_to(Path(store.uri) / "casnap-store/packs")
    for place in (
        Path(store.uri) / "casnap-store/live",
        tmp_path / "elsewhere/live",
        tmp_path / "casnap-store",
    ):
        for in_place in (False, True):
            with pytest.raises(FileFormatError, match="inside of a store, where only casnap"):
                store.pull(place, options=PullOptions(in_place=in_place))
    assert store.check().ok
    with pytest.raises(FileFormatError, match="is a URI"):
        store.pull("s3://bucket/live")
    beside = tmp_path / "live.versions" / "mine"
    beside.mkdir(parents=True)
    for step in (1, 2):
        take(store, step)
        store.pull(tmp_path / "live", options=PullOptions(keep=1))
    assert beside.exists()


@pytest.mark.parametrize("plant", ["link to a folder", "link to a file", "hard link"])
def test_a_link_that_was_planted_leads_nowhere(store: Store, tmp_path: Path, plant: str) -> None:
    """Who may write beside the folder cannot have a file written, or deleted, elsewhere."""
    theirs, versions = tmp_path / "theirs", tmp_path / "live.versions"
    theirs.mkdir()
    for name in ("letter", ".mine.partial"):
        (theirs / name).write_text("dear all")
    if plant == "link to a folder":
        versions.symlink_to(theirs)
    else:
        versions.mkdir()
        if plant == "hard link":
            (versions / ".lock").hardlink_to(theirs / "letter")
        else:
            (versions / ".lock").symlink_to(theirs / "letter")
    with pytest.raises(FileFormatError, match="no pull made it"):
        store.pull(tmp_path / "live")
    assert {path.name for path in theirs.iterdir()} == {"letter", ".mine.partial"}
    assert {path.read_text() for path in theirs.iterdir()} == {"dear all"}


def test_a_second_process_is_refused(store: Store, live: Path) -> None:
    events = store.follow(live)
    assert next(events).event == "switched"

    def pull() -> None:
        with pytest.raises(CasnapError, match=f"the process {os.getppid()} pulls"):
            Store(store.uri).pull(live)

    assert in_child(pull) == 0
    events.close()
    take(store, 1)
    store.pull(live)
    assert_served(live, 1)


def test_the_version_that_was_current_last_stays(tmp_path: Path) -> None:
    store, options = store_at(tmp_path / "store"), PullOptions(tag="stable")
    folders = []
    for step in (0, 1, 0, 2):
        if len(folders) != 2:
            take(store, step)
        store.publish("stable", f"step_{step}")
        folders.append(Path(store.pull(tmp_path / "live", options=options).folder))
    # Who follows has the one of step 0 loaded, though that of step 1 is newer.
    assert folders[0] == folders[2]
    assert folders[0].exists()
    assert not folders[1].exists()
