"""``s3://``: requests to S3 and compatible servers, by s3fs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
import botocore.exceptions
from botocore.handlers import add_expect_header
from s3fs import S3FileSystem

from casnap.backends.bodies import Body, receive
from casnap.backends.bucket_rules import s3_warnings
from casnap.backends.client import (
    BehindItsEndError,
    Client,
    ObjectStat,
    Page,
    Sink,
    Source,
    TransientError,
    kept_of,
    valid_options,
    without_secrets,
)
from casnap.backends.retries import Retries
from casnap.backends.s3_errors import delete_error, typed
from casnap.errors import (
    BackendError,
    StoreError,
    UnavailableError,
)
from casnap.runtime.environment import aws_endpoint, aws_files, variables
from casnap.runtime.fork import PerProcess
from casnap.runtime.typing import override

# Connections of one process at a time. Each store bounds its requests, so there is no wait for one.
_CONNECTIONS = 512
# What s3fs makes of errors, and what aiohttp raises in the middle of a body.
_ERRORS = (
    OSError,
    asyncio.TimeoutError,
    aiohttp.ClientError,
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.ClientError,
)
# What a copy is given of its source; the answer and the request have the same names.
_KEPT = ("StorageClass", "ServerSideEncryption", "SSEKMSKeyId", "BucketKeyEnabled")


class S3Client(Client):
    """Single requests to one bucket, below one prefix.

    Args:
        uri: ``s3://bucket/prefix``.
        storage_options: The arguments of ``s3fs.S3FileSystem``.
        retries: Gives the time for making a connection.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, Any], retries: Retries) -> None:
        self._uri = uri
        options = _options(storage_options, retries)
        with valid_options(uri):
            self._fs = S3FileSystem(**options)
        # It would try some errors again, SlowDown among them, five times and unseen.
        self._fs.retries = 1
        # What makes two clients equal, if that can be told.
        settings = (repr(options), variables(), aws_files())
        self._equal = settings if _is_plain(options) else None
        self._session: _Session | None = None
        # Not `split_path`, which takes a part of some names for a version.
        self._bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.is_bucket = not self._prefix
        self._client: Any = None
        self._knows_crc = True

    @override
    async def connect(self) -> None:
        session = _sessions.value.get(self._equal)
        if session is None:
            session = _Session(self._fs, await self._made())
            if self._equal is not None:
                _sessions.value[self._equal] = session
        session.users += 1
        self._session, self._fs, self._client = session, session.fs, session.client

    async def _made(self) -> Any:
        try:
            with valid_options(self._uri):
                client = await self._fs.set_session()
        except StoreError as e:
            raise self._wrong_endpoint() or e from e
        except _ERRORS as e:
            raise typed(e, self._uri, self._uri, "get_object") from e
        # It would cost a round trip before each body.
        client.meta.events.unregister("before-call.s3", add_expect_header)
        # After a redirect that names no region, botocore would look for it for ever.
        client.meta.events.register("before-call.s3.HeadBucket", _no_region)
        return client

    def _wrong_endpoint(self) -> StoreError | None:
        """Return the error for an endpoint of the environment that is no URL, if there is one."""
        named = aws_endpoint()
        if named is None or "://" in named[1]:
            return None
        if self._fs.endpoint_url or self._fs.client_kwargs.get("endpoint_url"):
            return None
        return StoreError(
            f"{self._uri}: the environment variable {named[0]} is no URL: "
            f"{without_secrets(named[1])!r}; write it like https://host:port"
        )

    async def _call(self, method: str, subject: str, **arguments: Any) -> dict[str, Any]:
        try:
            # Not public, but the only door that adds the user's `s3_additional_kwargs` and leaves
            # statuses, headers and bodies to us.
            return await self._fs._call_s3(method, Bucket=self._bucket, **arguments)  # type: ignore[no-any-return]
        except _ERRORS as e:
            error = typed(e, subject, self._uri, method)
            if isinstance(error, UnavailableError) and error.reason in ("credentials", "denied"):
                # There may be others by now, for the next client.
                self._forget()
            raise error from e

    def _forget(self) -> None:
        if _sessions.value.get(self._equal) is self._session:
            _sessions.value.pop(self._equal, None)

    @override
    async def endpoint(self) -> str:
        return without_secrets(str(self._client.meta.endpoint_url))

    @override
    async def put(self, key: str, source: Source, *, if_absent: bool = False) -> str:
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        # On other threads, since a hash would hold up all requests.
        crc = (await asyncio.to_thread(zlib.crc32, source.content)).to_bytes(4, "big")
        checksums = {"ChecksumCRC32": base64.b64encode(crc).decode()}
        if not self._knows_crc:
            md5 = await asyncio.to_thread(hashlib.md5, source.content, usedforsecurity=False)
            checksums["ContentMD5"] = base64.b64encode(md5.digest()).decode()
        answer = await self._call(
            "put_object",
            f"{self._uri}/{key}",
            Key=self._prefix + key,
            Body=_File(source),
            **checksums,
            **condition,
        )
        if not answer.get("ETag"):
            raise TransientError("the answer to a put has no ETag, so it may not be the server's")
        # A server that verifies it says so. Older ones verify an MD5, which costs more.
        self._knows_crc = bool(answer.get("ChecksumCRC32"))
        version = answer.get("VersionId")
        return "" if version is None else "suspended" if version == "null" else "enabled"

    @override
    async def get(self, key: str, run: tuple[int, int] | None, sink: Sink) -> ObjectStat:
        subject = f"{self._uri}/{key}"
        asked = {} if run is None else {"Range": f"bytes={run[0]}-{run[1] - 1}"}
        try:
            answer = await self._call("get_object", subject, Key=self._prefix + key, **asked)
        except BehindItsEndError:
            assert run is not None
            return ObjectStat(run[0])
        body = answer["Body"]
        try:
            size = await receive(body.raw_stream, body.read, run, sink)
        except _ERRORS as e:
            raise typed(e, subject, self._uri, "get_object") from e
        finally:
            # Nothing is done if the body was read to its end; else this ends the connection.
            body.close()
        return ObjectStat(size, answer.get("ETag", "").strip('"'), kept_of(answer, _KEPT))

    @override
    async def look(self, key: str) -> ObjectStat:
        # A HEAD would be no answer: it does not tell why there is no object.
        return await self.get(key, (0, 1), Sink())

    @override
    async def list(self, prefix: str, *, deep: bool, after: str | None) -> Page:
        arguments = {} if deep else {"Delimiter": "/"}
        if after is not None:
            arguments["ContinuationToken"] = after
        subject = f"{self._uri}/{prefix}"
        full = self._prefix + prefix
        answer = await self._call("list_objects_v2", subject, Prefix=full, **arguments)
        contents = answer.get("Contents", ())
        objects = [(item["Key"], item["Size"], item.get("LastModified")) for item in contents]
        folders = [item["Prefix"] for item in answer.get("CommonPrefixes", ())]
        return Page.of(objects, folders, _continuation(answer, subject), self._prefix)

    @override
    async def copy(self, key: str, to: str, source: ObjectStat) -> ObjectStat:
        answer = await self._call(
            "copy_object",
            f"{self._uri}/{key}",
            Key=self._prefix + to,
            CopySource={"Bucket": self._bucket, "Key": self._prefix + key},
            **source.kept,
        )
        return ObjectStat(None, answer.get("CopyObjectResult", {}).get("ETag", "").strip('"'))

    @override
    async def delete(self, keys: Sequence[str]) -> Mapping[str, TransientError | BackendError]:
        if len(keys) == 1:
            with suppress(FileNotFoundError):
                subject = f"{self._uri}/{keys[0]}"
                await self._call("delete_object", subject, Key=self._prefix + keys[0])
            return {}
        objects = [{"Key": self._prefix + key} for key in keys]
        answer = await self._call(
            "delete_objects", self._uri, Delete={"Objects": objects, "Quiet": True}
        )
        skip = len(self._prefix)
        return {
            error["Key"][skip:]: delete_error(error, f"{self._uri}/{error['Key'][skip:]}")
            for error in answer.get("Errors", ())
            if error.get("Code") != "NoSuchKey"
        }

    @override
    async def is_object(self) -> bool:
        key = self._prefix.rstrip("/")
        try:
            answer = await self._call("get_object", self._uri, Key=key, Range="bytes=0-0")
        except BehindItsEndError:
            return True
        except FileNotFoundError:
            return False
        answer["Body"].close()
        return True

    rule_kinds = (
        "get_bucket_lifecycle_configuration",
        "get_bucket_versioning",
        "get_object_lock_configuration",
    )

    @override
    async def rules(self, kind: str) -> Mapping[str, Any]:
        try:
            return await self._call(kind, f"the rules of {self._uri}")
        except UnavailableError:
            raise
        except BackendError:
            return {}  # There are none of this kind, or the server does not know them.

    keeps_versions = True

    @override
    async def versioning(self) -> str:
        return str((await self.rules("get_bucket_versioning")).get("Status", "")).lower()

    @override
    def warnings(self, rules: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        return s3_warnings(self._prefix, *rules)

    @override
    async def close(self) -> None:
        session = self._session
        if session is None:
            return
        session.users -= 1
        if not session.users:
            self._forget()
        self._session = self._client = None
        if not session.users:
            await session.client.close()


@dataclass(eq=False)
class _Session:
    """A client of botocore, which all stores of the same options share: to make one takes 0.1 s."""

    fs: S3FileSystem
    client: Any
    users: int = 0


_sessions: PerProcess[dict[Any, _Session]] = PerProcess(dict)


def _is_plain(value: object) -> bool:
    """Whether equal texts mean equal values."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, bytes, int, float, bool)


def _continuation(answer: Mapping[str, Any], subject: str) -> str | None:
    token: str | None = answer.get("NextContinuationToken")
    if "IsTruncated" not in answer:
        # Nor does this say that a server of S3 is there.
        raise TransientError(f"the answer is not a listing of {subject}", reached=False)
    if token is None and answer["IsTruncated"]:
        raise TransientError(f"the listing of {subject} was cut off")
    return token


def _no_region(**_: object) -> tuple[Any, dict[str, Any]]:
    """Answer a look for the region of a bucket, in place of the server."""
    return SimpleNamespace(status_code=200), {"ResponseMetadata": {"HTTPHeaders": {}}}


def _options(storage_options: Mapping[str, Any], retries: Retries) -> dict[str, Any]:
    config = {
        "connect_timeout": retries.connect,
        # Silence is watched by `Operation`; this only ends what has no waiter left.
        "read_timeout": 2 * retries.silence,
        "max_pool_connections": _CONNECTIONS,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **storage_options.get("config_kwargs", {}),
        "retries": {"max_attempts": 0},
    }
    # The body has a checksum. Its SHA-256 besides would be computed on the event loop.
    config["s3"] = {"payload_signing_enabled": False, **(config.get("s3") or {})}
    return {
        **storage_options,
        "config_kwargs": config,
        "asynchronous": True,
        "loop": None,
        "use_listings_cache": False,
        "skip_instance_cache": True,
    }


class _File(Body):
    """A body that botocore can sign as a file."""

    _position = 0

    def __len__(self) -> int:
        return len(self._source.content)

    def read(self, nbytes: int = -1) -> bytes:
        """Read on, as from a file."""
        end = len(self) if nbytes < 0 else self._position + nbytes
        data = bytes(self._source.content[self._position : end])
        self._position += len(data)
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        """Move to a position, as in a file."""
        self._position = position + (0, self._position, len(self))[whence]
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position
