"""Which store can be the mirror of another one, and which is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from casnap import MirrorOptions, NewStore, Retention, Store
from casnap.backends import MemoryBackend
from casnap.errors import InvalidNameError, MirrorError, NotAStoreError, StoreError
from tests.support.cli_calls import failure, invoke
from tests.support.copies import mirrored, names
from tests.support.faults import CHUNK, take
from tests.support.faulty import Fault, FaultyBackend, fail


def test_another_store_in_place_of_the_mirror(tmp_path: Path) -> None:
    store = mirrored(tmp_path / "here", tmp_path / "there")
    take(store, 1)
    store.wait_mirrored(60)
    assert store.mirror is not None
    # A Store learns nothing of its mirror while another one of this host copies to it.
    store.mirror.stop()
    there = Store(tmp_path / "there").id
    shutil.move(tmp_path / "there", tmp_path / "moved")
    with pytest.raises(MirrorError, match=f"(?s){there}.*no store.*mirror=none"):
        mirrored(tmp_path / "here", tmp_path / "there")
    assert not (tmp_path / "there").exists()
    # It is known by its id, wherever it is.
    mirrored(tmp_path / "here", tmp_path / "moved").wait_mirrored(60)
    other = Store(tmp_path / "there", create=NewStore(chunk_size=CHUNK)).make().id
    with pytest.raises(MirrorError, match=f"{there}.*{other}"):
        mirrored(tmp_path / "here", tmp_path / "there")
    assert names(Store(tmp_path / "there")) == []
    shown = invoke("config", tmp_path / "here").stdout
    assert shown == f"codec=auto\ngc=auto\nmirror={tmp_path / 'there'}\n"
    assert invoke("config", tmp_path / "here", "mirror=none").stdout == "codec=auto\ngc=auto\n"
    mirrored(tmp_path / "here", tmp_path / "there").wait_mirrored(60)
    assert names(Store(tmp_path / "there")) == ["step_1"]
    wrong = failure("config", tmp_path / "here", "codec=zstd", "mirror=x", status=2)
    assert "mirror can only be" in wrong
    assert store.settings["codec"] == "auto"


def test_forgetting_a_mirror_frees_what_it_lacks(tmp_path: Path, there: FaultyBackend) -> None:
    store = mirrored(tmp_path / "here", there)
    store.wait_mirrored(60)
    with there.during(Fault(fail(), times=None)):
        for step in range(3):
            take(store, step)
        assert store.mirror is not None
        store.mirror.stop()
        assert Store(tmp_path / "here").configure(mirror="none")
        store.prune(Retention(keep_last=1))
    assert names(store) == ["step_2"]
    assert store.settings == {"codec": "auto", "gc": "auto"}


def test_places_that_cannot_be_a_mirror(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path / "here", create=NewStore(chunk_size=CHUNK)).make()
    take(store, 1)
    (tmp_path / "file").write_text("x")
    Store(tmp_path / "large", create=NewStore(chunk_size=1 << 20)).make()
    shutil.copytree(tmp_path / "here", tmp_path / "copied")
    bad: dict[Any, tuple[type[Exception], str]] = {
        tmp_path / "here": (MirrorError, "itself, or a copy"),
        tmp_path / "copied": (MirrorError, "itself, or a copy"),
        tmp_path / "here/run": (MirrorError, "itself, or a copy"),
        tmp_path / "file": (NotAStoreError, "is a file"),
        tmp_path / "large": (StoreError, "chunks of"),
        "ftpx://nowhere/x": (StoreError, "ftpx"),
        "": (InvalidNameError, "empty path"),
        7: (TypeError, "or a URI"),
    }
    for place, (kind, text) in bad.items():
        with pytest.raises(kind, match=text):
            mirrored(tmp_path / "here", place)
    assert "tried again" not in caplog.text
    assert store.settings == {"codec": "auto", "gc": "auto"}
    with pytest.raises(MirrorError, match="is a view of"):
        mirrored(tmp_path / "here/run", tmp_path / "there")
    with pytest.raises(TypeError, match="retention"):
        mirrored(tmp_path / "here", tmp_path / "there", retention=3)
    with pytest.raises(ValueError, match="remote"):
        mirrored(tmp_path / "here", tmp_path / "there", storage_options={"key": "x"})
    with pytest.raises(TypeError, match="storage_options is a dict"):
        MirrorOptions("s3://bucket/run", storage_options=3)  # type: ignore[arg-type]
    assert hash(MirrorOptions("s3://bucket/run", storage_options={"key": "x"}))
    # This is noticed without a server.
    with pytest.raises(StoreError, match="deadlin"):
        mirrored(tmp_path / "here", "s3://bucket/run", storage_options={"casnap": {"deadlin": 1}})


def test_a_mirror_in_memory(tmp_path: Path) -> None:
    store = mirrored(tmp_path / "here", MemoryBackend("mirror"))
    take(store, 1)
    store.wait_mirrored(60)
    assert store.mirror is not None
    assert store.latest().path == str(tmp_path / "here/step_1")  # type: ignore[union-attr]
