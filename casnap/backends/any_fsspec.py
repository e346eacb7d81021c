"""Any other URI of fsspec, through the methods that all of its file systems have.

None of them can put an object only if it is absent, so one process at a time may write.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from casnap.backends.client import (
    Client,
    ObjectStat,
    Page,
    Sink,
    Source,
    TakenError,
    TransientError,
    valid_options,
    without_secrets,
)
from casnap.errors import BackendError, UnavailableError
from casnap.format.digest import digest_of
from casnap.format.names import STORE_FOLDER
from casnap.runtime.fork import PerProcess
from casnap.runtime.typing import override

T = TypeVar("T")

# The schemes whose first folder is a container, which somebody has to make.
_WITH_CONTAINERS = frozenset({"az", "abfs", "abfss"})
# What is in memory is one dictionary, which a thread may not change while another one lists it.
_memory = PerProcess(threading.Lock)


class FsspecClient(Client):
    """Calls of a file system of fsspec, each on a thread, since most of them block.

    Args:
        uri: Where the objects are.
        storage_options: The arguments of the file system.
    """

    puts_if_absent = False
    deletes = 1

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        self._uri = uri
        options = {**storage_options, "use_listings_cache": False, "skip_instance_cache": True}
        with valid_options(uri):
            self._fs, root = fsspec.url_to_fs(uri, **options)
        self._root = root.rstrip("/")
        # Until the container is known to be there.
        self._is_in_container = uri.partition("://")[0] in _WITH_CONTAINERS
        self._options = digest_of(repr(sorted(storage_options.items())).encode()).hex()
        # Else moving is copying, and a copy can be half done: then the file system is taken for an
        # object store, which puts objects whole.
        self._renames = type(self._fs).mv is not AbstractFileSystem.mv

    async def _do(self, key: str, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        place = f"{self._uri}/{key}"
        try:
            return await asyncio.to_thread(self._alone, partial(call, *arguments, **named))
        except (FileNotFoundError, NotADirectoryError) as e:
            raise FileNotFoundError(place) from e
        except PermissionError as e:
            raise UnavailableError(
                f"{place}: not allowed: {without_secrets(str(e))}", reason="denied"
            ) from e
        except IsADirectoryError as e:
            raise BackendError(f"{place} is a folder, not an object") from e
        except (OSError, EOFError, asyncio.TimeoutError) as e:
            raise TransientError(f"{type(e).__name__}: {without_secrets(str(e))}") from e
        except Exception as e:  # what a library of a file system raises
            raise BackendError(f"{place}: {type(e).__name__}: {without_secrets(str(e))}") from e

    def _alone(self, call: Callable[[], T]) -> T:
        in_memory = isinstance(self._fs, MemoryFileSystem)
        with _memory.value if in_memory else nullcontext():
            return call()

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    @override
    async def endpoint(self) -> str:
        # The host may be told by an option alone. Among them are secrets, too.
        return self._options

    @override
    async def put(self, key: str, source: Source, *, if_absent: bool = False) -> str:
        if if_absent:
            raise TakenError("put-if-absent is not asked for here")
        await self._do(key, self._put, self._path(key), bytes(source.content))
        source.nbytes += len(source.content)
        return ""

    def _put(self, path: str, content: bytes) -> None:
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        if not self._renames:
            self._fs.pipe_file(path, content)
            return
        folder = self._path(f"{STORE_FOLDER}/tmp")
        temporary = f"{folder}/{os.urandom(12).hex()}"
        self._fs.makedirs(folder, exist_ok=True)
        try:
            self._fs.pipe_file(temporary, content)
            self._fs.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    @override
    async def get(self, key: str, run: tuple[int, int] | None, sink: Sink) -> ObjectStat:
        if run is None:
            sink.expect((await self.look(key)).size or 0)
            content = await self._do(key, self._fs.cat_file, self._path(key))
            sink.take(content)
            return ObjectStat(len(content))
        start, stop = run
        content = await self._do(key, self._fs.cat_file, self._path(key), start=start, end=stop)
        if len(content) > stop - start:
            raise BackendError(f"{self._uri}/{key}: this file system cannot read a part of a file")
        sink.take(content)
        # Only a run that is cut off tells how long the object is.
        return ObjectStat(start + len(content) if len(content) < stop - start else None)

    @override
    async def look(self, key: str) -> ObjectStat:
        info = await self._do(key, self._fs.info, self._path(key))
        if info["type"] != "file":
            raise FileNotFoundError(f"{self._uri}/{key}")
        return ObjectStat(int(info["size"]))

    @override
    async def list(self, prefix: str, *, deep: bool, after: str | None) -> Page:
        folder = self._path(prefix).rstrip("/")
        sizes: dict[str, int] = {}
        folders: list[str] = []
        skip = len(self._root) + 1
        with suppress(FileNotFoundError):
            if deep:
                by_path = await self._do(prefix, self._fs.find, folder, detail=True)
                infos = list(by_path.values())
            else:
                infos = await self._do(prefix, self._fs.ls, folder, detail=True)
            for info in infos:
                name = info["name"].rstrip("/")
                if not name.startswith(f"{folder}/"):
                    continue
                if info["type"] == "file":
                    sizes[name[skip:]] = int(info["size"])
                else:
                    folders.append(name[skip:])
        if not sizes and not folders:
            await self._check_container()
        return Page(sizes, folders, None)

    async def _check_container(self) -> None:
        """Check, once, that it is not the container that is missing."""
        if self._is_in_container:
            container = self._root.lstrip("/").partition("/")[0]
            if not await self._do("", self._fs.exists, container):
                raise UnavailableError(
                    f"{self._uri}: the container {container} does not exist", reason="no_bucket"
                )
            self._is_in_container = False

    @override
    async def copy(self, key: str, to: str, source: ObjectStat) -> ObjectStat:
        await self._do(key, self._copy, self._path(key), self._path(to))
        return ObjectStat(None)

    def _copy(self, path: str, to: str) -> None:
        if self._renames:
            self._put(to, self._fs.cat_file(path))
            return
        self._fs.makedirs(to.rpartition("/")[0], exist_ok=True)
        self._fs.cp_file(path, to)

    @override
    async def delete(self, keys: Sequence[str]) -> Mapping[str, TransientError | BackendError]:
        for key in keys:
            with suppress(FileNotFoundError):
                await self._do(key, self._fs.rm_file, self._path(key))
        return {}

    @override
    async def is_object(self) -> bool:
        return await self._do("", self._fs.isfile, self._root)

    @override
    async def close(self) -> None:
        """Do nothing: file systems of fsspec close what they have opened."""
