"""The client for URIs other than ``s3://`` and ``gs://``, by the methods of any fsspec file system.

The ``pipe_file`` of some object stores, such as Azure's, knows ``mode="create"``. These stores may
honour put-if-absent; each host finds out by a probe. On all other file systems, only one process at
a time may write.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from casnap.backends.remote.client import (
    BehindItsEndError,
    Client,
    Page,
    Sink,
    Source,
    TransientError,
    valid_options,
)
from casnap.backends.uris import without_secrets
from casnap.errors import BackendError, PlaceError, UnavailableError
from casnap.format.digest import digest_of
from casnap.format.names import STORE_FOLDER
from casnap.runtime.typing import override

T = TypeVar("T")

# Statuses of HTTP at which a library may give up, though the next attempt may succeed.
_MAY_PASS = frozenset({408, 409, 412, 429, 500, 502, 503, 504})
# The schemes whose first folder is a container, which somebody has to make.
_WITH_CONTAINERS = frozenset({"az", "abfs", "abfss"})


class FsspecClient(Client):
    """Makes requests by a file system of fsspec.

    Each call runs on a thread, since most of them block.

    Args:
        uri: The URI of the place.
        storage_options: The arguments of the file system.
    """

    deletes = 1

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        self._uri = uri
        options = {**storage_options, "use_listings_cache": False, "skip_instance_cache": True}
        with valid_options(uri):
            self._fs, root = fsspec.url_to_fs(uri, **options)
        self._root = root.rstrip("/")
        self._may_lack_container = uri.partition("://")[0] in _WITH_CONTAINERS
        self._options = digest_of(repr(sorted(storage_options.items())).encode()).hex()
        # Whether mv() renames. If it copies, a move can be half done. Then the file system is taken
        # for an object store, which puts objects whole.
        self._renames = type(self._fs).mv is not AbstractFileSystem.mv
        # The pipe_file() of fsspec itself looks first and then puts, which is not atomic.
        self.puts_if_absent = not self._renames and _has_own_pipe_file(self._fs)

    async def _do(self, key: str, call: Callable[..., T], *arguments: Any) -> T:
        place = f"{self._uri}/{key}"
        try:
            return await asyncio.to_thread(call, *arguments)
        except (FileNotFoundError, NotADirectoryError) as e:
            await self._check_container()
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
            detail = f"{type(e).__name__}: {without_secrets(str(e))}"
            status = getattr(e, "status_code", None)
            if status == 416:
                raise BehindItsEndError(place) from e
            if status in _MAY_PASS:
                raise TransientError(detail) from e
            # The error may say nothing about the object.
            raise UnavailableError(f"{place}: {detail}", reason="unreachable") from e

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    @override
    async def endpoint(self) -> str:
        # An option alone may name the host. The options are hashed, since some are secrets.
        return self._options

    @override
    async def put(self, key: str, source: Source, *, if_absent: bool = False) -> str:
        # An object that is there raises an error like any other. The caller looks whose it is.
        write = partial(self._fs.pipe_file, mode="create") if if_absent else self._put
        await self._do(key, write, self._path(key), bytes(source.content))
        source.nbytes += len(source.content)
        return ""

    def _put(self, path: str, content: bytes) -> None:
        if not self._renames:
            self._fs.pipe_file(path, content)
            return
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
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
    async def get(self, key: str, run: tuple[int, int] | None, sink: Sink) -> int | None:
        if run is None:
            sink.expect(await self.size(key))
            content = await self._do(key, self._fs.cat_file, self._path(key))
            sink.take(content)
            return len(content)
        start, stop = run
        fetch = partial(self._fs.cat_file, start=start, end=stop)
        try:
            content = await self._do(key, fetch, self._path(key))
        except BehindItsEndError:
            return start
        if len(content) > stop - start:
            raise BackendError(f"{self._uri}/{key}: this file system cannot read a part of a file")
        sink.take(content)
        # Only an answer that is shorter than its run tells how long the object is.
        return start + len(content) if len(content) < stop - start else None

    @override
    async def size(self, key: str) -> int:
        info = await self._do(key, self._fs.info, self._path(key))
        if info["type"] != "file":
            raise FileNotFoundError(f"{self._uri}/{key}")
        return int(info["size"])

    @override
    async def list(self, prefix: str, *, deep: bool, after: str | None) -> Page:
        folder = self._path(prefix).rstrip("/")
        sizes: dict[str, int] = {}
        folders: list[str] = []
        skip = len(self._root) + 1
        with suppress(FileNotFoundError):
            if deep:
                by_path = await self._do(prefix, partial(self._fs.find, detail=True), folder)
                infos = list(by_path.values())
            else:
                infos = await self._do(prefix, self._fs.ls, folder, True)
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
        """Check that the container of the URI exists, unless an earlier check has shown this.

        Raises:
            UnavailableError: The container does not exist.
        """
        if self._may_lack_container:
            container = self._root.lstrip("/").partition("/")[0]
            # Not exists(), which takes an error for "no".
            self._may_lack_container = False
            try:
                await self._do("", self._fs.info, container)
            except FileNotFoundError:
                self._may_lack_container = True
                raise UnavailableError(
                    f"{self._uri}: the container {container} does not exist", reason="no_bucket"
                ) from None

    @override
    async def copy(self, key: str, to: str) -> None:
        # By way of this host: a file system that copies by itself may do so in parts, or later.
        content = await self._do(key, self._fs.cat_file, self._path(key))
        await self._do(to, self._put, self._path(to), content)

    @override
    async def delete(self, keys: Sequence[str]) -> Mapping[str, TransientError | PlaceError]:
        for key in keys:
            with suppress(FileNotFoundError):
                await self._do(key, self._fs.rm_file, self._path(key))
        return {}

    @override
    async def is_object(self) -> bool:
        # Not isfile(), which takes an error for "no".
        try:
            info = await self._do("", self._fs.info, self._root)
        except FileNotFoundError:
            return False
        return bool(info["type"] == "file")

    @override
    async def close(self) -> None:
        """Do nothing: the file systems of fsspec close their connections themselves."""


def _has_own_pipe_file(fs: AbstractFileSystem) -> bool:
    if isinstance(fs, AsyncFileSystem):
        return type(fs)._pipe_file is not AsyncFileSystem._pipe_file
    return type(fs).pipe_file is not AbstractFileSystem.pipe_file
