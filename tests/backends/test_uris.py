"""What URIs of remote places mean, and which are refused before a server is asked anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from casnap import Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.backends.uris import store_uri
from casnap.errors import CasnapError, InvalidNameError, NotAStoreError, StoreError
from tests.support.remote import RemoteDouble

TINY = {"s": StateDict(x=1)}


@pytest.mark.parametrize(
    ("path", "store", "name"),
    [
        ("s3://bucket/run1/step_1", "s3://bucket/run1", "step_1"),
        ("s3://bucket/run1/step_1///", "s3://bucket/run1", "step_1"),
        ("s3://bucket/step_1", "s3://bucket", "step_1"),
        ("S3://Bucket/Run/Step", "s3://Bucket/Run", "Step"),
        ("gs://bucket/a/b/c/step", "gs://bucket/a/b/c", "step"),
        ("s3://bucket/ckpts//run1/step_1", "s3://bucket/ckpts", "run1/step_1"),
        ("s3://bucket//run1/step_1/", "s3://bucket", "run1/step_1"),
        ("s3://bucket/a?b#c/1%25 é名/step 1?#%", "s3://bucket/a?b#c/1%25 é名", "step 1?#%"),
        ("abfs://box@account.windows.net/a/b", "abfs://box@account.windows.net/a", "b"),
        ("hdfs://host:8020/a/b", "hdfs://host:8020/a", "b"),
    ],
)
def test_a_snapshot_has_its_parent_as_store(path: str, store: str, name: str) -> None:
    uri = store_uri(path)
    assert uri is not None
    found = uri.as_snapshot()
    assert (found.store, found.name) == (store, name)


@pytest.mark.parametrize(
    ("uri", "store", "name", "is_bucket"),
    [
        ("s3://bucket", "s3://bucket", "", True),
        ("s3://bucket/", "s3://bucket", "", True),
        ("s3://bucket/run1/", "s3://bucket/run1", "", False),
        ("s3://bucket//run1", "s3://bucket", "run1", True),
        ("gs://bucket/ckpts//run1/", "gs://bucket/ckpts", "run1", False),
    ],
)
def test_a_store(uri: str, store: str, name: str, is_bucket: bool) -> None:
    found = store_uri(uri)
    assert found is not None
    assert (found.store, found.name, found.is_bucket) == (store, name, is_bucket)


@pytest.mark.parametrize("path", ["run/step", "/run/step", "file:///run/step", "./s3:/run/step"])
def test_local_paths(path: str) -> None:
    assert store_uri(path) is None


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("s3:/bucket/run/step", "begins with s3:// and"),
        (Path("s3://bucket/run/step"), "a Path drops one"),
        ("s3://", "names no bucket"),
        ("gs:///run/step", "names no bucket"),
        ("https://bucket.s3.amazonaws.com/run/step", "endpoint_url"),
        ("s3://bucket/../run/step", "'.' or '..'"),
        ("s3://bucket/./run/step", "'.' or '..'"),
        ("s3://bucket/a\nb/step", "do not print"),
        ("s3://arn:aws:s3::123456789012:accesspoint/m.mrap/run/step", "multi-region"),
        ("s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/a/run/step", "alias"),
    ],
)
def test_uris_that_are_refused(uri: str | Path, problem: str) -> None:
    for use in (
        lambda: Store(uri),
        lambda: Snapshot(uri),
        lambda: Snapshot.take(uri, {"s": StateDict(x=1)}),
        lambda: Snapshot("step", store=uri),
    ):
        with pytest.raises(NotAStoreError) as caught:
            use()
        assert problem in str(caught.value)


def test_credentials_in_a_uri_are_refused_and_not_shown() -> None:
    for uri in ("s3://KEYID:hunter2@bucket/run/step", "s3://KEYID:hunter2/x@bucket/run/step"):
        with pytest.raises(NotAStoreError, match="credentials") as caught:
            Store(uri).make()
        assert "hunter2" not in str(caught.value)
        assert "KEYID" not in str(caught.value)


def test_signatures_in_a_uri_are_not_shown(tmp_path: Path) -> None:
    """A signed URL opens an object to whoever reads it in a log."""
    Store(tmp_path / "store").take({"s": StateDict(x=1)}, "a")
    for url in (
        "https://b.host/x?X-Amz-Credential=KEY&X-Amz-Signature=hunter2",
        "s3://b/x?sig=hunter2",
    ):
        for use in (
            lambda url=url: Store(url),
            lambda url=url: Snapshot(url),
            lambda url=url: Store(tmp_path / "store").import_file(url, "b"),
            lambda url=url: Store(tmp_path / "store")["a"].export(url),
            lambda url=url: Store("s3://b/x", storage_options={"endpoint_url": url}).latest(),
        ):
            with pytest.raises(CasnapError) as caught:
                use()
            assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("path", ["s3://bucket", "gs://bucket/", "s3://b/"])
def test_what_is_no_name(path: str) -> None:
    with pytest.raises(InvalidNameError):
        Snapshot(path)


def test_a_prefix_that_is_no_name() -> None:
    with pytest.raises(CasnapError, match="casnap-store"):
        Store("s3://bucket/ckpts//casnap-store/x").make()


@pytest.mark.parametrize("text", ["simplecache::s3://key:secret@bucket/run", "my_s3://bucket/run"])
def test_what_looks_like_a_uri_is_no_local_path(text: str) -> None:
    with pytest.raises(NotAStoreError, match="is not a URI scheme") as caught:
        store_uri(text)
    assert "secret" not in str(caught.value)


def test_a_wrong_option_is_no_damage() -> None:
    """Neither the first time, nor later, when another call may be the first one that fails."""
    options = {"key": "key", "secret": "secret", "no_such_option": 1}
    for _ in range(4):
        with pytest.raises(StoreError, match=r"wrong storage_options.*no_such_option"):
            Store("s3://bucket/run", storage_options=options).make()


@pytest.mark.parametrize("name", ["Casnap-Store/0/5", "a/CASNAP-STORE", "a/Casnap-Snapshot.JSON"])
def test_names_that_some_places_do_not_tell_apart(tmp_path: Path, name: str) -> None:
    """Where letter case does not count, a marker would lie among the objects of the store."""
    source = Store(tmp_path / "source")
    source.take(TINY, "step")
    for backend in (LocalBackend(tmp_path / "near"), RemoteDouble(str(tmp_path / "far"))):
        store = Store(backend)
        uses: list[Callable[[], object]] = [
            partial(store.take, TINY, name),
            partial(store.async_take, TINY, name),
            partial(source.copy, "step", to=store, rename=name),
        ]
        before = backend.sizes("")
        for use in uses:
            with pytest.raises(InvalidNameError, match="store uses itself"):
                use()
        assert backend.sizes("") == before
        store.take(TINY, "index/roots")


@pytest.mark.parametrize("place", ["memory://views", "local"])
def test_what_is_printed_opens_the_same_again(place: str, tmp_path: Path) -> None:
    """A view, a snapshot with a longer name, and one right in the store."""
    uri = str(tmp_path / "ckpts") if place == "local" else place
    slashes = "/" if place == "local" else "//"
    whole = Store(uri)
    whole.take(TINY, "run1/step_1")
    whole.take(TINY, "step_1")
    view = Store(f"{uri}{slashes}run1")
    assert repr(view) == f"Store('{uri}{slashes}run1')"
    again = eval(repr(view), {"Store": Store})
    assert (again.id, again.prefix) == (whole.id, "run1")
    for snapshot in (view["step_1"], whole["run1/step_1"], whole["step_1"]):
        same = eval(repr(snapshot), {"Snapshot": Snapshot})
        assert same.commit_id == snapshot.commit_id
    pending = view.async_take(TINY, "step_2")
    taken = pending.wait()
    assert Snapshot(pending.path).commit_id == taken.commit_id


# --- the URIs of files ---


def test_the_uris_of_a_folder_of_this_machine(tmp_path: Path) -> None:
    Store(tmp_path / "store").take(TINY, "a")
    for uri in (
        f"file://{tmp_path}/store",
        f"file:///{tmp_path}/store",
        f"file:{tmp_path}/store",
        f"FILE://LocalHost{tmp_path}/store/",
        Path(f"file://{tmp_path}/store"),
    ):
        assert Store(uri, create=False).uri == str(tmp_path / "store")
        assert Snapshot(f"{uri}/a").path == str(tmp_path / "store/a")
        assert Store(tmp_path / "store")[f"{uri}/a"].name == "a"
    Snapshot.take(f"file://localhost{tmp_path}/store/b", TINY)
    Store(tmp_path / "store").copy(to=f"file:{tmp_path}/copy")
    assert {s.name for s in Store(tmp_path / "copy").snapshots()} == {"a", "b"}
    assert {p.name for p in tmp_path.iterdir()} == {"store", "copy"}


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("file://host/run/step", "host 'host'.*three slashes"),
        ("file://ckpts", "host 'ckpts'.*three slashes"),
        ("file://~/ckpts/step", "host '~'"),
        ("file://", "names nothing"),
        ("file://{}/a%20b/step", "take %20 in a URI.*give the path alone"),
        ("file:{}/a%2Fb/step", "take %2F in a URI.*give the path alone"),
    ],
)
def test_uris_of_files_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, told: str
) -> None:
    """Neither is a folder made that is called "file:", nor a second store for one place."""
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "store")
    store.take(TINY, "a")
    uri = uri.format(tmp_path)
    for use in (
        lambda: Store(uri).make(),
        lambda: Snapshot.take(uri, TINY),
        lambda: Snapshot(uri),
        lambda: store.copy(to=uri),
        lambda: store.pull(uri, "a"),
        lambda: store.import_file(uri, "a"),
        lambda: store.take(TINY, uri),
    ):
        with pytest.raises(InvalidNameError, match=told):
            use()
    assert list(tmp_path.iterdir()) == [tmp_path / "store"]


def test_a_percent_sign_that_is_no_escape(tmp_path: Path) -> None:
    Snapshot.take(f"file://{tmp_path}/50%/step", TINY)
    Snapshot.take(tmp_path / "a%20b/step", TINY)
    assert {p.name for p in tmp_path.iterdir()} == {"50%", "a%20b"}
    with pytest.raises(InvalidNameError, match="%20"):
        Snapshot((tmp_path / "a b/step").as_uri())
