"""Places that only fsspec knows: no put-if-absent, one request after the other."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from safetensors.numpy import save_file

from casnap import Store
from casnap.backends import Backend, backend_at
from casnap.backends.remote.any_fsspec import FsspecClient
from casnap.backends.remote.backend import RemoteBackend
from casnap.backends.remote.client import Page
from casnap.errors import BackendError, NotAStoreError, StoreError
from casnap.testing.backend_suite import BackendSuite
from tests.support.cli_calls import document, failure
from tests.support.unavailable import unavailable


class _Memory(MemoryFileSystem):
    """An object store that honours put-if-absent: each call is done as a whole."""

    protocol = "casnapmemory"
    lock = threading.RLock()
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        with self.lock:
            super().pipe_file(path, value, mode, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        with self.lock:
            found: list[Any] = super().ls(path, detail, **kwargs)
            return found


class _Folder(LocalFileSystem):
    """Unlike memory, it can rename."""

    protocol = "casnapfolder"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("casnapfolder://").strip("/")


@pytest.fixture
def memory(tmp_path_factory: pytest.TempPathFactory) -> str:
    fsspec.register_implementation("casnapmemory", _Memory, clobber=True)
    return f"casnapmemory://{tmp_path_factory.mktemp('memory').name}"


class TestMemoryOfFsspec(BackendSuite):
    @pytest.fixture
    def backend(self, memory: str) -> Backend:
        return backend_at(memory)


class TestFolderOfFsspec(BackendSuite):
    @pytest.fixture
    def backend(self, folder: str) -> Backend:
        backend = backend_at(folder)
        backend.exclusive = True
        return backend


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    fsspec.register_implementation("casnapfolder", _Folder, clobber=True)
    return f"casnapfolder:/{tmp_path_factory.mktemp('folder')}"


def test_a_place_without_put_if_absent(folder: str) -> None:
    """Files that are renamed into place are not created so: one process at a time may write."""
    with pytest.raises(BackendError, match="exclusive"):
        backend_at(folder).put_if_absent("x", b"x")
    with pytest.raises(StoreError, match=r"does not know how to .* on casnapfolder://") as caught:
        Store(folder).make()
    assert "does not honour" not in str(caught.value)
    assert Store(folder, exclusive=True).snapshots() == []


class _Overwriting(_Memory):
    """It takes the condition, and ignores it."""

    protocol = "casnapoverwriting"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value)


def test_the_probe_decides_whether_an_object_store_keeps_writers_apart(memory: str) -> None:
    assert Store(memory).make().snapshots() == []
    fsspec.register_implementation("casnapoverwriting", _Overwriting, clobber=True)
    with pytest.raises(StoreError, match="does not honour put-if-absent"):
        Store("casnapoverwriting://bucket/x").make()


class _Azure(_Memory):
    """It has containers."""

    protocol = "abfs"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("abfs://").strip("/")


def test_a_container_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_registry, "abfs", _Azure)
    with unavailable("no_bucket", match="the container nowhere does not exist"):
        Store("abfs://nowhere/x", create=False).make()
    _Azure().mkdir("/here")
    with pytest.raises(NotAStoreError, match="make one"):
        Store("abfs://here/x", create=False).make()
    assert Store("abfs://here/x").make().snapshots() == []


def test_a_package_of_fsspec_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BackendError, match=r"reaches hdfs://.* pyarrow .*s3:// and gs:// are what"):
        Store("hdfs://host/x").make()


def test_an_import_makes_a_store_there_for_the_only_writer(folder: str, tmp_path: Path) -> None:
    target = f"{folder}/run/a"
    source = tmp_path / "model.safetensors"
    save_file({"w": np.arange(3.0)}, source)
    assert "pass --exclusive" in failure("import", source, target)
    assert document("import", source, target, "--exclusive")["tensor_count"] == 1


class _Paged(FsspecClient):
    """Lists five objects at a time."""

    async def list(self, prefix: str, *, deep: bool, after: str | None) -> Page:
        page = await super().list(prefix, deep=deep, after=None)
        begin = int(after or 0)
        keys = sorted(page.sizes)
        sizes = {key: page.sizes[key] for key in keys[begin : begin + 5]}
        return Page(sizes, page.folders, str(begin + 5) if begin + 5 < len(keys) else None)


@pytest.mark.parametrize(("folders", "each", "requests"), [(1, 5, 1), (9, 1, 2), (3, 10, 8)])
def test_large_listings_are_read_side_by_side(
    memory: str, folders: int, each: int, requests: int
) -> None:
    """A folder of full folders by folder; else one page after the other."""
    backend = RemoteBackend(memory, lambda: _Paged(memory, {}))
    expected = {f"packs/{f:02x}/{n}": f + n for f in range(folders) for n in range(each)}
    for key, size in expected.items():
        backend.write(key, bytes(size))
    assert backend.sizes("packs") == expected
    assert backend.requests["list"] == requests
