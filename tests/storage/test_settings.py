"""Settings of a store: the codec of new chunks, which every writer obeys."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import NewStore, Retention, Snapshot, StateDict, Store
from casnap.errors import UnsupportedFormatError
from casnap.format.codec import Codec
from tests.support.cli_calls import document, failure, invoke
from tests.support.garbage import wait_for_collectors
from tests.support.written import put_next_root

CHUNK = 64 << 10


def state(n: int) -> dict[str, StateDict]:
    """Return a state that zstd makes smaller, another one for each number."""
    return {"s": StateDict(x=torch.full((CHUNK,), n))}


def codecs(store: Store, name: str) -> set[int]:
    """Return the codecs that the chunks of a snapshot are stored with."""
    contents = store[name].contents
    path, entry, _ = contents.entry("s/x")
    digests = [digest for digest, _ in contents.chunks(path, entry)]
    places = contents.store.index.find(contents.store.view(), digests)
    return {place.codec for place in places if place is not None}


def put_setting(store: Store, codec: object) -> None:
    """Set a codec as a newer version may."""
    repository = store._view.repository
    assert put_next_root(repository.backend, repository.newest(), settings={"codec": codec})


def take_with_snapshot(folder: Path, name: str) -> None:
    Snapshot.take(folder / name, state(7))


def take_async(folder: Path, name: str) -> None:
    Store(folder).async_take(state(7), name).wait()


def take_from_a_view(folder: Path, name: str) -> None:
    run, _, last = name.rpartition("/")
    Store(folder / run).take(state(7), last)


@pytest.mark.parametrize("take", [take_with_snapshot, take_async, take_from_a_view])
def test_every_writer_obeys_the_codec_of_the_store(tmp_path: Path, take: Any) -> None:
    store = Store(tmp_path / "s", create=NewStore(chunk_size=CHUNK, codec="zstd")).make()
    assert store.settings == {"codec": "zstd", "gc": "auto"}
    take(tmp_path / "s", "run/a")
    assert codecs(store, "run/a") == {Codec.PLANES}


def test_configure(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", create=NewStore(chunk_size=CHUNK)).make()
    assert store.settings == {"codec": "auto", "gc": "auto"}
    store.take(state(1), "a")
    other = Store(tmp_path / "s").make()
    assert store.configure(codec="zstd")
    # No commit that changes nothing.
    seq = store._view.repository.newest().seq
    assert not store.configure(codec="zstd")
    assert not store.configure()
    assert store._view.repository.newest().seq == seq
    other.take(state(2), "b")
    other.take(state(1), "same")
    assert [codecs(store, name) for name in ("a", "b", "same")] == [
        {Codec.RAW},
        {Codec.PLANES},
        {Codec.RAW},
    ]
    assert store.configure(codec="raw")
    other.take(state(3), "c")
    assert codecs(store, "c") == {Codec.RAW}
    with pytest.raises(ValueError, match=r"one of 'auto', 'raw', 'zstd'; got 'ZSTD'"):
        store.configure(codec="ZSTD")


def test_the_codec_of_an_existing_store_stays(tmp_path: Path) -> None:
    """Like its chunk size."""
    Store(tmp_path / "s", create=NewStore(codec="zstd", chunk_size=CHUNK)).make()
    again = Store(tmp_path / "s", create=NewStore(codec="raw", chunk_size=1 << 20)).make()
    assert (again.settings["codec"], again.chunk_size) == ("zstd", CHUNK)
    with pytest.raises(ValueError, match="got 'lz4'"):
        Store(tmp_path / "other", create=NewStore(codec="lz4")).make()
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("codec", ["from-the-future", 7, ["zstd"], None, "ZSTD"])
def test_an_unknown_codec_stops_takes_alone(tmp_path: Path, codec: object) -> None:
    store = Store(tmp_path / "s", create=NewStore(chunk_size=CHUNK)).make()
    store.take(state(1), "a")
    store.take(state(2), "b")
    put_setting(store, codec)
    packs = set((tmp_path / "s/casnap-store/packs").rglob("?" * 32))
    for take in (store.take, store.async_take):
        with pytest.raises(
            UnsupportedFormatError, match=r"update casnap.*casnap config .*codec=raw"
        ):
            take(state(3), "c")
    assert set((tmp_path / "s/casnap-store/packs").rglob("?" * 32)) == packs
    store["a"].restore(state(0))
    store.tag("a", "best")
    store.prune(Retention(keep_last=1))
    store.gc(grace=0)
    assert Store(tmp_path / "s").check(data=True).ok
    assert store.settings == {"codec": codec, "gc": "auto"}
    assert invoke("config", tmp_path / "s").exit_code == 0
    assert store.configure(codec="raw")
    store.take(state(3), "c")


def test_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    made = document("init", folder, "--codec", "zstd")
    assert (made["codec"], made["created"]) == ("zstd", True)
    assert invoke("config", folder).stdout == "codec=zstd\ngc=auto\n"
    assert invoke("config", folder, "codec=raw").stdout == "codec=raw\ngc=auto\n"
    told = document("config", folder)
    assert (told["store"], told["settings"]) == (str(folder), {"codec": "raw", "gc": "auto"})
    assert (told["id"], told["chunk_size_bytes"]) == (made["id"], 1 << 20)
    assert "casnap config" in failure("init", folder, "--codec", "zstd")
    assert document("init", folder, "--codec", "raw")["created"] is False
    assert "write codec=auto" in failure("config", folder, "colour=red", status=2)
    for setting in ("codec", "colour=red", "codec=lz4", "=raw"):
        assert "codec" in failure("config", folder, setting, status=2)
    assert document("config", folder)["settings"] == {"codec": "raw", "gc": "auto"}
    assert "not a casnap store" in failure("config", tmp_path / "none")


def test_the_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was condemned waits as long as the store is set to, unless a collection is told."""
    folder = tmp_path / "s"
    store = Store(folder, create=NewStore(chunk_size=CHUNK)).make()
    assert invoke("config", folder, "gc=12h").stdout == "codec=auto\ngc=43200s\n"
    assert document("config", folder)["settings"]["gc"] == 43200
    assert invoke("config", folder, "gc=43200s").stdout == "codec=auto\ngc=43200s\n"
    store.take(state(1), "a")
    store.delete("a")
    assert store.gc().waiting_packs > 0
    now = time.time()
    for seconds, is_freed in ((43100, False), (43300, True)):
        monkeypatch.setattr(time, "time", lambda s=seconds: now + s)
        would_free = store.gc(dry_run=True).waiting_packs == 0
        assert would_free == is_freed
        assert (document("gc", folder, "--dry-run")["waiting_pack_count"] == 0) == is_freed
        assert store.gc(grace=timedelta(hours=24), dry_run=True).waiting_packs > 0
    store.configure(gc=timedelta(days=2))
    assert store.settings["gc"] == 172800
    assert store.gc(dry_run=True).waiting_packs > 0
    store.configure(gc=0)
    assert invoke("config", folder).stdout == "codec=auto\ngc=0s\n"
    store.configure(gc="off")
    assert store.gc(dry_run=True).waiting_packs > 0
    store.configure(gc=0)
    assert store.gc().freed_bytes > 0


@pytest.mark.parametrize("wrong", ["sometimes", -1, float("nan"), float("inf"), True, "1"])
def test_a_grace_that_is_none(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match="gc, if not 'auto' or 'off', is a time"):
        Store(tmp_path / "s").configure(gc=wrong)


def test_graces_that_a_command_refuses(tmp_path: Path) -> None:
    store = Store(tmp_path / "s").make()
    for wrong in ("gc=-1h", "gc=1", "gc=1y", "gc="):
        failure("config", store.uri, wrong, status=2)
    assert store.settings["gc"] == "auto"


def test_collections_by_themselves_obey_the_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASNAP_GC", "auto")
    store = Store(tmp_path / "s", create=NewStore(chunk_size=CHUNK))
    store.configure(gc=86400)
    for n in range(4):
        store.take(state(n), "a", overwrite=True)
        wait_for_collectors()
    assert len(store._view.repository.newest().condemned) > 2
    assert torch.equal(store["a"].read_object("s/x"), torch.full((CHUNK,), 3))
