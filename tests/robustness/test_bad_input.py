"""What is no store, no name, no state or no disk: a clear error, and nothing is lost."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from casnap import NewStore, Retention, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import (
    BackendError,
    DamagedError,
    EntryNotFoundError,
    InvalidNameError,
    NotAStoreError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StateError,
    UnsupportedFormatError,
    UnsupportedTypeError,
)
from casnap.format.digest import digest_of
from casnap.integrations.folders import prune_missing_folders
from tests.support.faults import (
    CHUNK,
    app_state,
    assert_store,
    files,
    take,
)
from tests.support.mounts import as_nobody

TINY = {"s": StateDict(x=1)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(tmp_path_factory.mktemp("made") / "base", create=NewStore(chunk_size=CHUNK))
    take(store, 0)
    take(store, 1)
    return Path(store.uri)


@pytest.fixture
def base(made: Path, tmp_path: Path) -> Path:
    """Return a store of two snapshots."""
    return Path(shutil.copytree(made, tmp_path / "base"))


def async_take(store: Store, *args: Any, **options: Any) -> Snapshot:
    return store.async_take(*args, **options).wait()


# --- no store ---------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["missing", "empty", "below/a/file"])
def test_what_is_no_store(tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "below").mkdir()
    (tmp_path / "below/a").touch()
    before = files(tmp_path)
    for open_it in (
        lambda: Store(tmp_path / what, create=False),
        lambda: Snapshot(tmp_path / what / "step"),
        lambda: Snapshot("step", store=tmp_path / what),
    ):
        with pytest.raises(NotAStoreError, match=re.escape(str(tmp_path / what))) as e:
            open_it()
        assert "casnap init" in str(e.value)
    assert files(tmp_path) == before


def test_a_file_is_no_store(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_text("mine")
    for open_it in (
        lambda: Store(file),
        lambda: Store(file, create=False),
        lambda: Snapshot.take(file / "step", TINY),
        lambda: Snapshot.take("step", TINY, store=file),
    ):
        with pytest.raises(NotAStoreError, match="is a file"):
            open_it()
    with pytest.raises(BackendError, match="Not a directory"):
        Store(file / "below").make()
    assert files(tmp_path) == {"model.pt"}
    assert file.read_text() == "mine"


def test_paths_that_name_no_place(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in ("", "\0", "\ud800", str(tmp_path / "a\0b")):
        with pytest.raises(InvalidNameError):
            Store(path).make()
    for path in ("", "/", ".", "..", str(tmp_path / ".."), "file://"):
        with pytest.raises(InvalidNameError, match="name"):
            Snapshot.take(path, TINY)
    for folder in ("a\0b", "loop", "\ud800"):
        with pytest.raises((NotAStoreError, BackendError, InvalidNameError)):
            Snapshot.take(tmp_path / folder / "step", TINY)
    with pytest.raises(InvalidNameError, match="File name too long"):
        Snapshot.take(tmp_path / ("x" * 300) / "step", TINY)
    assert files(tmp_path) == {"loop"}


@pytest.mark.parametrize("uri", ["s4://bucket/run", "gcp://bucket/run"])
def test_places_that_this_version_does_not_know(uri: str) -> None:
    for open_it in (lambda: Store(uri), lambda: Snapshot.take(f"{uri}/step", TINY)):
        with pytest.raises(NotAStoreError, match="nearest: ") as e:
            open_it()
        assert uri.partition("//")[0] in str(e.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"store_id": "\xff"}',
        b'{"format": "new"}',
        b'{"store_id": "short", "chunk_size": 1048576}',
        b'{"store_id": "0123456789abcdef0123456789abcdef", "chunk_size": 1000000}',
        b'{"store_id": "0123456789abcdef0123456789abcdef", "chunk_size": 4611686018427387904}',
        b'{"store_id": "0123456789abcdef0123456789abcdef", "chunk_size": "1 MiB"}',
        b'{"format": 1, "digest": "blake3", "put_if_absent": true, "chunk_size": 65536, '
        b'"store_id": "../../../../../../evil/"}',
    ],
)
def test_a_damaged_configuration(base: Path, content: bytes) -> None:
    whole = (base / "casnap-store/casnap.json").read_bytes()
    (base / "casnap-store/casnap.json").write_bytes(content)
    before = files(base)
    for open_it in (
        lambda: Store(base),
        lambda: Store(base, create=False),
        lambda: Snapshot(base / "step_0"),
        lambda: Snapshot.take(base / "step_2", app_state(2)),
    ):
        with pytest.raises(DamagedError, match=r"casnap\.json is damaged"):
            open_it()
    assert files(base) == before
    (base / "casnap-store/casnap.json").write_bytes(whole)
    assert_store(base, {0, 1})


# --- another version --------------------------------------------------------------------------


def change_configuration(store: Path, **changes: Any) -> None:
    config = json.loads((store / "casnap-store/casnap.json").read_text())
    (store / "casnap-store/casnap.json").write_text(json.dumps({**config, **changes}))


NEWER = [
    ({"format": 2}, "update casnap"),
    ({"digest": "sha3"}, "'sha3', which this casnap does not know; update casnap"),
    ({"digest": ""}, "of a casnap before 1.0"),
]


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(("changes", "words"), NEWER, ids=str)
def test_a_store_of_another_casnap(
    base: Path, changes: dict[str, Any], words: str, empty: bool
) -> None:
    change_configuration(base, **changes)
    if empty:
        # Its layout may be another one: what looks like a creation that was cut off is not ours.
        for folder in ("roots", "packs", "index"):
            shutil.rmtree(base / "casnap-store" / folder)
    before = files(base)
    for open_it in (
        lambda: Store(base),
        lambda: Store(base, create=False),
        lambda: Snapshot(base / "step_0"),
        lambda: Snapshot.take(base / "step_2", app_state(2)),
        lambda: Snapshot.async_take(base / "step_2", app_state(2)),
    ):
        with pytest.raises(UnsupportedFormatError, match=words):
            open_it()
    assert files(base) == before


def test_a_root_of_a_newer_format(base: Path) -> None:
    newest = max((base / "casnap-store/roots/0").iterdir(), key=lambda p: int(p.name))
    record = newest.read_bytes()
    body = record[:7] + b"2" + record[8:-32]
    newest.with_name("3").write_bytes(body + digest_of(body))
    store = Store(base).make()
    for use in (store.snapshots, lambda: take(store, 2), lambda: store.delete("step_0")):
        with pytest.raises(UnsupportedFormatError, match="update casnap"):
            use()


def test_an_unknown_field_of_the_record_is_passed_over(base: Path) -> None:
    change_configuration(base, unknown_field=[1])
    assert_store(base, {0, 1})
    take(Store(base), 2)
    assert_store(base, {0, 1, 2})


# --- no name ----------------------------------------------------------------------------------

NO_NAMES = {
    "is empty": ["", "/", "//"],
    "empty, '.' or '..'": [".", "..", "../a", "a/..", "a/../../b", "a//b", "./a", "a/."],
    "a store uses itself": [
        *("casnap-store", "casnap-store/a", "a/casnap-store/b", "Casnap-Store"),
        *("casnap-snapshot.json", "a/casnap-snapshot.json/b"),
    ],
    "control characters": ["a\nb", "a\0b", "\x1b[2J", "a\x7f", "\ud800", "\udcff"],
    "backslash": ["a\\b"],
    "longer than 255": ["x" * 256, "a/" + "ä" * 128],
    "longer than 1,024": ["/".join(["x" * 200] * 6)],
}


@pytest.mark.parametrize(
    ("name", "why"), [(name, why) for why, names in NO_NAMES.items() for name in names]
)
def test_names_that_cannot_be_used(base: Path, name: str, why: str) -> None:
    store, before = Store(base), files(base)
    for use in (
        lambda: store.take(TINY, name),
        lambda: store.async_take(TINY, name),
        lambda: Snapshot.take(name, TINY, store=base),
        lambda: Snapshot(name, store=base),
        lambda: store[name],
        lambda: store.delete(name),
    ):
        with pytest.raises(InvalidNameError, match=re.escape(why)) as e:
            use()
        assert isinstance(e.value, ValueError)
    assert files(base) == before


@pytest.mark.parametrize("name", ["casnap-store", "casnap-store/a", "a\nb", "a\0b", "x" * 256])
def test_paths_that_end_in_no_name(base: Path, name: str) -> None:
    before = files(base)
    for use in (lambda: Snapshot.take(base / name, TINY), lambda: Snapshot(base / name)):
        with pytest.raises(InvalidNameError):
            use()
    assert files(base) == before


def test_a_name_that_is_taken(base: Path) -> None:
    store, before = Store(base), files(base)
    for use in (
        lambda: store.take(TINY, "step_0"),
        lambda: store.async_take(TINY, "step_0"),
        lambda: Snapshot.take(base / "step_0", TINY),
        lambda: Snapshot.async_take(base / "step_0", TINY),
    ):
        with pytest.raises(SnapshotExistsError, match="overwrite=True") as e:
            use()
        assert isinstance(e.value, FileExistsError)
    assert files(base) == before
    assert_store(base, {0, 1})


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_name_begins_another(base: Path, overwrite: bool) -> None:
    store = Store(base).make()
    store.take(TINY, "run/a/b")
    before = files(base)
    for name in ("run", "run/a", "run/a/b/c", "run/a/b/c/d", "step_0/x"):
        for use in (store.take, store.async_take):
            with pytest.raises(SnapshotExistsError, match=re.escape(repr(name))):
                use(TINY, name, overwrite=overwrite)
    assert files(base) == before
    for name in ("run/a/c", "run/ab", "ru", "step_00", "run/a/b.c"):
        store.take(TINY, name)


def test_a_name_that_is_not_there(base: Path) -> None:
    store = Store(base).make()
    for use in (lambda: store["step_7"], lambda: store.delete("step_7")):
        with pytest.raises(SnapshotNotFoundError, match=r"'step_7'; nearest: step_[01]") as e:
            use()
        assert isinstance(e.value, KeyError)
    with pytest.raises(SnapshotNotFoundError, match="nearest"):
        Snapshot(base / "step_7")
    assert "step_7" not in store
    assert 7 not in store


# --- no state ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [torch.nn.Linear(2, 2), [StateDict()], None, {"x": {"a": 1}}])
def test_what_is_no_app_state(base: Path, state: Any) -> None:
    store, before = Store(base), files(base)
    for use in (store.take, store.async_take):
        with pytest.raises(UnsupportedTypeError, match=r"model|StateDict"):
            use(state, "x")
    with pytest.raises(UnsupportedTypeError):
        store["step_0"].restore(state)
    assert files(base) == before


@pytest.mark.parametrize("store", [5, object(), LocalBackend(Path("/nowhere"))])
def test_what_is_no_store_of_a_snapshot(store: Any) -> None:
    with pytest.raises(TypeError, match=rf"store=.*{type(store).__name__}"):
        Snapshot("x", store=store)
    for use in (Snapshot.take, Snapshot.async_take):
        with pytest.raises(TypeError, match=rf"store=.*{type(store).__name__}"):
            use("x", {}, store=store)


class Plain:
    """Has no safe encoding."""


def test_unknown_objects_and_the_way_out(base: Path) -> None:
    store, before = Store(base), files(base)
    state = {"s": StateDict(deep=[{"x": Plain()}])}
    for use in (store.take, store.async_take):
        with pytest.raises(UnsupportedTypeError, match=r"s/deep/0/x.*allow_pickle"):
            use(state, "x")
    unpicklable = {"s": StateDict(deep=[{"x": lambda: 0}])}
    for allow in (False, True):
        with pytest.raises(UnsupportedTypeError, match="s/deep/0/x"):
            store.take(unpicklable, "x", allow_pickle=allow)
    assert files(base) == before
    snapshot = store.take(state, "x", allow_pickle=True)
    with pytest.raises(UnsupportedTypeError, match="allow_pickle"):
        snapshot.read_object("s/deep/0/x")
    assert isinstance(snapshot.read_object("s/deep/0/x", allow_pickle=True), Plain)


@pytest.mark.parametrize(
    "metadata",
    [
        {1: 2},
        {"a": {None: 1}},
        {"a": [{"b": {1, 2}}]},
        {"a": b"bytes"},
        {"a": torch.ones(2)},
        {"a": np.ones(1)},
        {"a": torch.ones((), device="meta")},
        {"a": np.datetime64(0, "ns")},
        {"a": np.timedelta64(1, "s")},
        {"a": np.bytes_(b"bytes")},
        {"a": np.complex64(1)},
        {"a": Plain()},
        {"a": 1 << 64},
        {"a": 1j},
        {"a": "\ud800"},
        {"\udcff": 1},
        {"a": "x" * (64 << 10)},
        ["a"],
        "text",
    ],
    ids=lambda metadata: repr(metadata)[:20],
)
def test_metadata_that_cannot_be_kept(base: Path, metadata: Any) -> None:
    store, before = Store(base), files(base)
    for use in (store.take, store.async_take):
        with pytest.raises(StateError, match="metadata"):
            use(TINY, "x", metadata=metadata)
    assert files(base) == before
    assert_store(base, {0, 1})


def test_metadata_that_nests_without_end(base: Path) -> None:
    endless: dict[str, Any] = {}
    endless["a"] = endless
    with pytest.raises(StateError, match="nested"):
        Store(base).take(TINY, "x", metadata=endless)


def test_metadata_is_that_of_the_call(base: Path) -> None:
    metadata = {"a": [1, -(1 << 63), 2.5, None, True, "ä"], "b": {"c": (float("inf"), {})}}
    pending = Store(base).async_take(TINY, "x", metadata=metadata)
    metadata["a"].append("later")  # type: ignore[attr-defined]
    assert pending.wait().metadata.user == {
        "a": [1, -(1 << 63), 2.5, None, True, "ä"],
        "b": {"c": [float("inf"), {}]},
    }
    text = "x" * ((64 << 10) - len('{"a":""}'))
    Store(base).take(TINY, "y", metadata={"a": text})
    assert Store(base)["y"].metadata.user == {"a": text}


def test_metadata_of_numpy_and_torch(base: Path) -> None:
    """A loss is given as it comes: each becomes the number that it is."""
    given = {
        "floats": [np.float16(1.5), np.float32(0.1), np.float64(0.1), np.longdouble(2.5)],
        "others": (np.int8(-3), np.uint64((1 << 64) - 1), np.bool_(True), np.str_("a")),
        "arrays": [np.array(2.5, np.float32), np.array(7), np.array(np.nan)],
        "tensors": {
            "loss": torch.tensor(0.1, requires_grad=True) * 1,
            "step": torch.tensor(7),
            "best": torch.tensor(True),
            "scale": torch.nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16)),
        },
    }
    kept = Store(base).take(TINY, "x", metadata=given).metadata.user
    assert math.isnan(kept["arrays"].pop())
    loss = float(np.float32(0.1))
    assert kept == {
        "floats": [1.5, loss, 0.1, 2.5],
        "others": [-3, (1 << 64) - 1, True, "a"],
        "arrays": [2.5, 7],
        "tensors": {"loss": loss, "step": 7, "best": True, "scale": 0.5},
    }
    assert [type(value) for value in kept["others"]] == [int, int, bool, str]
    assert kept["tensors"]["best"] is True
    # A retention knows the metric, too.
    for step, value in ((1, 0.5), (2, 0.1), (3, 0.3)):
        keep = Retention(keep_best=("loss", 1))
        metadata = {"loss": torch.tensor(value)}
        Store(base).take(TINY, f"best/{step}", metadata=metadata, retention=keep)
    assert [s.name for s in Store(base).snapshots("best")] == ["best/2", "best/3"]


def test_a_path_that_is_not_there(base: Path) -> None:
    snapshot = Store(base)["step_0"]
    for path, near in {"0/state/wieght": "state/weight", "stat/bias": "state/bias"}.items():
        with pytest.raises(EntryNotFoundError, match=f"nearest: .*{near}") as e:
            snapshot.read_object(path)
        assert isinstance(e.value, KeyError)
    with pytest.raises(EntryNotFoundError, match="nearest"):
        snapshot.get_state_dict_for_key("stat")
    with pytest.raises((EntryNotFoundError, StateError), match="other"):
        snapshot.restore({"other": StateDict()})


# --- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 1, 1 << 15, (1 << 20) + 1, 3 << 20, 1 << 27])
def test_chunk_sizes_that_are_none(tmp_path: Path, size: int) -> None:
    with pytest.raises(ValueError, match=f"from 64 KiB to 64 MiB, such as .*; got {size}"):
        Store(tmp_path / "store", create=NewStore(chunk_size=size)).make()
    assert not (tmp_path / "store").exists()


def test_arguments_that_mean_nothing_here(tmp_path: Path) -> None:
    path = tmp_path / "run/step"
    for use in (
        lambda: Snapshot.take(path, TINY, pg=object()),
        lambda: Snapshot.async_take(path, TINY, pg=object()),
    ):
        with pytest.raises(StateError, match="init_process_group"):
            use()
    for use in (
        lambda: Snapshot.take(path, TINY, storage_options={"a": 1}),
        lambda: Snapshot(path, storage_options={"a": 1}),
        lambda: Store(tmp_path / "run", storage_options={"a": 1}),
    ):
        with pytest.raises(ValueError, match="is on this machine"):
            use()
    assert files(tmp_path) == set()
    Snapshot.take(path, TINY, pg=None, replicated=["**"], storage_options={})
    with pytest.raises(ValueError, match="open already"):
        Snapshot("step", storage_options={"a": 1}, store=Store(tmp_path / "run"))
    with pytest.raises(ValueError, match="knows how it is reached"):
        Store(LocalBackend(tmp_path / "run"), storage_options={"a": 1}).make()


# --- a folder that cannot be written ----------------------------------------------------------


def test_a_store_that_one_may_only_read(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        assert_store(base, {0, 1})
        store = Store(base).make()
        for write in (
            lambda: take(store, 2),
            lambda: async_take(store, app_state(2), "step_2"),
            lambda: store.delete("step_0"),
            Store(tmp_path / "new").make,
            lambda: Snapshot.take(tmp_path / "new/step", TINY),
        ):
            with pytest.raises(
                BackendError, match=r"[Pp]ermission denied; may this user have it\?"
            ):
                write()
        # A store of root is found by its path.
        assert Snapshot(base / "step_0").name == "step_0"
        assert_store(base, {0, 1})

    before = files(base)
    as_nobody(tmp_path, monkeypatch, work)
    assert files(base) == before


def test_big_endian_machines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot.take(tmp_path / "run" / "step", {"s": StateDict(x=1)})
    monkeypatch.setattr("sys.byteorder", "big")
    for use in (
        lambda: Store(tmp_path / "run"),
        lambda: Snapshot(snapshot.path),
        lambda: Snapshot.take(tmp_path / "run" / "other", {"s": StateDict(x=1)}),
    ):
        with pytest.raises(UnsupportedFormatError, match="big-endian"):
            use()


@pytest.mark.parametrize("verb", ["take", "async_take"])
def test_arguments_of_a_take_in_the_other_order(tmp_path: Path, verb: str) -> None:
    store = Store(tmp_path / "store").make()
    state: Any = TINY
    for call, given, told in (
        (lambda *a: getattr(store, verb)(*a), ("s3", state), "(app_state, name)"),
        (lambda *a: getattr(store, verb)(*a), (state, 3), "(app_state, name)"),
        (lambda *a: getattr(Snapshot, verb)(*a), (state, tmp_path / "x/s"), "(path, app_state)"),
        (lambda *a: getattr(Snapshot, verb)(*a), (3, state), "(path, app_state)"),
    ):
        with pytest.raises(
            UnsupportedTypeError, match=rf"the call is \w+\.{verb}{re.escape(told)}: "
        ):
            call(*given)
    with pytest.raises(UnsupportedTypeError, match="got str as app_state, dict as name"):
        getattr(store, verb)("s3", state)
    assert store.snapshots() == []
    assert not (tmp_path / "x").exists()


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    store: Any = Store(tmp_path / "store").make()
    for call in (lambda n: store[n], store.delete, lambda n: store.tag(n, "t")):
        with pytest.raises(InvalidNameError, match="the name of a snapshot is a str"):
            call(3)


def test_a_plain_file_is_for_import(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "f.pt")
    answer = re.escape(
        f"{tmp_path}/f.pt is a file, not a snapshot in a store; `casnap import {tmp_path}"
    )
    with pytest.raises(NotAStoreError, match=answer):
        Snapshot(tmp_path / "f.pt")
    Store(tmp_path).take(TINY, "s")
    with pytest.raises(SnapshotNotFoundError, match=answer):
        Snapshot(tmp_path / "f.pt")
    with pytest.raises(SnapshotNotFoundError, match="holds no snapshot"):
        Snapshot(tmp_path / "g.pt")


class PathOfBytes:
    """A path-like, but not one of a str."""

    def __fspath__(self) -> bytes:
        return b"x"

    def __repr__(self) -> str:
        return "PathOfBytes()"


NO_PATHS = [b"x", None, 3, 1.5, ["x"], PathOfBytes(), "", "a\0b", "\ud800"]


@pytest.mark.parametrize("path", NO_PATHS, ids=repr)
def test_what_is_no_path(base: Path, path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (base.parent / "here").mkdir()
    monkeypatch.chdir(base.parent / "here")
    store = Store(base)
    before = files(base.parent)
    error, told = (
        (InvalidNameError, r"an empty path|NUL|such a character|does not end in")
        if isinstance(path, str)
        else (TypeError, "a path is a str or a path-like of one, or a URI.*; got an? ")
    )
    for use in (
        lambda: Store(path),
        lambda: Store(path, create=False),
        lambda: store.copy("step_0", to=path),
        lambda: store.copy("step_0", to=path, dry_run=True),
        lambda: store.pull(path, "step_0"),
        lambda: next(iter(store.follow(path, "step_0"))),
        lambda: store["step_0"].export(path),
        lambda: store.import_file(path, "new"),
        # Sources that cannot be used are passed over, and told of.
        *([] if path == "\ud800" else [lambda: store.repair(sources=[path])]),
        *([] if path in (None, "\ud800") else [lambda: Store("with", mirror=path)]),
    ):
        with pytest.raises(error, match=told) as caught:
            use()
        assert "\n" not in str(caught.value)
    if not isinstance(path, str):
        with pytest.raises(TypeError, match=told):
            Snapshot(path)
        with pytest.raises((TypeError, UnsupportedTypeError), match=r"a path is a str|path a str"):
            Snapshot.take(path, TINY)
    assert files(base.parent) == before


@pytest.mark.parametrize("prefix", [b"x", 3, ["x"], "..", "../other", "a\0b", "x" * 300, "\ud800"])
def test_what_is_no_folder_of_snapshots(base: Path, prefix: Any) -> None:
    """A run that looked for its newest snapshot there would begin anew."""
    store = Store(base)
    for use in (
        lambda: store.snapshots(prefix),
        lambda: store.latest(prefix),
        lambda: store.usage(prefix),
        lambda: store.prune(Retention(keep_last=1), prefix=prefix),
        lambda: store.thin({"model": 1}, prefix=prefix),
        lambda: prune_missing_folders(store, prefix=prefix),
    ):
        with pytest.raises(InvalidNameError, match=r"the name of a snapshot|the snapshot name"):
            use()
    assert len(store.snapshots()) == 2


def test_names_that_are_path_likes(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.take(TINY, Path("run/a"))  # type: ignore[arg-type]
    name: Any = Path("run/a")
    assert store[name].name == "run/a"
    assert name in store
    assert tmp_path / "store/run/a" in store
    assert [s.name for s in store.snapshots(Path("run"))] == ["run/a"]  # type: ignore[arg-type]
    store.tag(name, "t")
    store.publish("best", name)
    assert store.tagged("best").name == "run/a"
    store.delete(name)
    assert store.latest() is None


def test_an_empty_commit_id_deletes_nothing(base: Path) -> None:
    with pytest.raises(SnapshotNotFoundError, match="deleted or replaced"):
        Store(base).delete("step_0", commit_id="")
    assert "step_0" in Store(base)


@pytest.mark.parametrize("tag", [b"x", None, 3, ["x"]])
def test_what_is_no_tag(base: Path, tag: Any) -> None:
    store = Store(base)
    for use in (
        lambda: store.tag("step_0", tag),
        lambda: store.untag("step_0", tag),
        lambda: store.publish(tag, "step_0"),
        lambda: store.tagged(tag),
        lambda: store.tag_moves(tag),
    ):
        with pytest.raises(InvalidNameError, match=r"is of type .*choose another, like 'best'"):
            use()
    for snapshot in (tag, None):
        with pytest.raises(InvalidNameError, match="the name of a snapshot is a str"):
            store.publish("best", snapshot)


@pytest.mark.parametrize("path", [b"x", None, 3, ["x"], Path("model")])
def test_what_is_no_path_in_a_snapshot(base: Path, path: Any) -> None:
    snapshot = Store(base)["step_0"]
    for use in (snapshot.__getitem__, snapshot.read_object, snapshot.handles):
        with pytest.raises(TypeError, match=r"a path in a snapshot is a str.*; got an? "):
            use(path)


@pytest.mark.parametrize("globs", ["model/*", True, b"model/*", [b"model/*"], ["model/*", None]])
@pytest.mark.parametrize("option", ["replicated", "per_rank"])
def test_what_is_no_list_of_globs(base: Path, option: str, globs: Any) -> None:
    """They would match nothing, or as a list of characters all, without a word."""
    store, before = Store(base), files(base)
    with pytest.raises(TypeError, match=rf"{option} is a list of globs, such as \['model/"):
        store.take({"s": StateDict(x=1)}, "x", **{option: globs})
    assert files(base) == before
