"""Places that only fsspec knows: no put-if-absent, one request after the other."""

from __future__ import annotations

import sys
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
from casnap.backends.any_fsspec import FsspecClient
from casnap.backends.client import Page
from casnap.backends.remote import RemoteBackend
from casnap.errors import BackendError, NotAStoreError, StoreError
from casnap.testing.backend_suite import BackendSuite
from tests.support.cli_calls import document, failure
from tests.support.unavailable import unavailable


class _Memory(MemoryFileSystem):
    protocol = "casnapmemory"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]


class _Folder(LocalFileSystem):
    """Unlike memory, it can rename."""

    protocol = "casnapfolder"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("casnapfolder://").rstrip("/")


@pytest.fixture
def memory(tmp_path_factory: pytest.TempPathFactory) -> str:
    fsspec.register_implementation("casnapmemory", _Memory, clobber=True)
    return f"casnapmemory://{tmp_path_factory.mktemp('memory')}"


class TestMemoryOfFsspec(BackendSuite):
    @pytest.fixture
    def backend(self, memory: str) -> Backend:
        backend = backend_at(memory)
        backend.exclusive = True
        return backend


class TestFolderOfFsspec(BackendSuite):
    @pytest.fixture
    def backend(self, tmp_path_factory: pytest.TempPathFactory) -> Backend:
        fsspec.register_implementation("casnapfolder", _Folder, clobber=True)
        backend = backend_at(f"casnapfolder://{tmp_path_factory.mktemp('folder')}")
        backend.exclusive = True
        return backend


def test_a_place_without_put_if_absent(memory: str) -> None:
    with pytest.raises(BackendError, match="exclusive"):
        backend_at(memory).put_if_absent("x", b"x")


class _Azure(_Memory):
    """It has containers."""

    protocol = "abfs"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("abfs://").strip("/")


def test_azure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not said that Azure does not honour what casnap does not ask it for."""
    monkeypatch.setitem(_registry, "abfs", _Azure)
    with unavailable("no_bucket", match="the container nowhere does not exist"):
        Store("abfs://nowhere/x", create=False).make()
    _Azure().mkdir("/here")
    with pytest.raises(NotAStoreError, match="make one"):
        Store("abfs://here/x", create=False).make()
    with pytest.raises(StoreError, match=r"does not know how to .* on abfs://") as caught:
        Store("abfs://here/x").make()
    assert "does not honour" not in str(caught.value)
    assert Store("abfs://here/x", exclusive=True).snapshots() == []


def test_a_package_of_fsspec_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BackendError, match=r"reaches hdfs://.* pyarrow .*s3:// and gs:// are what"):
        Store("hdfs://host/x").make()


@pytest.mark.usefixtures("memory")
def test_an_import_makes_a_store_there_for_the_only_writer(tmp_path: Path) -> None:
    target = f"casnapmemory://{tmp_path.name}/run/a"
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
