"""The client for ``s3://``: S3 and compatible servers. s3fs signs and makes the requests."""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import aiohttp
import botocore.exceptions
from aiobotocore.session import AioSession
from botocore.handlers import add_expect_header
from botocore.loaders import create_loader
from s3fs import S3FileSystem

from casnap.backends.remote.bodies import Body, receive
from casnap.backends.remote.bucket_rules import s3_warnings
from casnap.backends.remote.client import (
    BehindItsEndError,
    Client,
    ObjectFacts,
    Page,
    Sink,
    Source,
    TransientError,
    valid_options,
)
from casnap.backends.remote.retries import Retries
from casnap.backends.remote.s3_errors import casnap_error, delete_error
from casnap.backends.uris import without_secrets
from casnap.errors import BackendError, PlaceError
from casnap.runtime.typing import override

# Connections at a time. Each store bounds its requests to fewer, so there is no wait for one.
_CONNECTIONS = 32
# The loader remembers the description of the API that it has read.
_loader = create_loader()
# The errors that s3fs raises, and the ones that aiohttp raises in the middle of a body.
_ERRORS = (
    OSError,
    asyncio.TimeoutError,
    aiohttp.ClientError,
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.ClientError,
)


class S3Client(Client):
    """Makes single requests to one S3 bucket, for objects below one prefix.

    Args:
        uri: ``s3://bucket/prefix``.
        storage_options: The arguments of ``s3fs.S3FileSystem``.
        retries: Says how long making a connection, and silence, may last.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, Any], retries: Retries) -> None:
        self._uri = uri
        options = _options(storage_options, retries)
        with valid_options(uri):
            self._fs = S3FileSystem(**options)
            if self._fs.session is None:
                self._fs.session = _session(**self._fs.kwargs)
        # s3fs would try again after some errors, such as SlowDown: five times and unseen.
        self._fs.retries = 1
        # Not split_path(), which takes a part of some names for a version.
        self._bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.is_bucket = not self._prefix
        self._client: Any = None

    @override
    async def connect(self) -> None:
        try:
            with valid_options(self._uri):
                self._client = await self._fs.set_session()
        except _ERRORS as e:
            raise casnap_error(e, self._uri, self._uri, "get_object") from e
        events = self._client.meta.events
        # The Expect header would cost a round trip before each body.
        events.unregister("before-call.s3", add_expect_header)
        # After a redirect that names no region, botocore would look for it for ever.
        events.register("before-call.s3.HeadBucket", _no_region)

    async def _call(self, method: str, subject: str, **arguments: Any) -> dict[str, Any]:
        try:
            # This method is not public. But it alone adds the user's `s3_additional_kwargs`, and
            # leaves statuses, headers and bodies to us.
            return await self._fs._call_s3(method, Bucket=self._bucket, **arguments)  # type: ignore[no-any-return]
        except _ERRORS as e:
            raise casnap_error(e, subject, self._uri, method) from e

    @override
    async def endpoint(self) -> str:
        return without_secrets(str(self._client.meta.endpoint_url))

    @override
    async def put(self, key: str, source: Source, *, if_absent: bool = False) -> str:
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        # On other threads, since a hash would hold up all requests.
        crc = (await asyncio.to_thread(zlib.crc32, source.content)).to_bytes(4, "big")
        answer = await self._call(
            "put_object",
            f"{self._uri}/{key}",
            Key=self._prefix + key,
            Body=_File(source),
            ChecksumCRC32=base64.b64encode(crc).decode(),
            **condition,
        )
        if not answer.get("ETag"):
            raise TransientError("the answer to a put has no ETag, so it may not be the server's")
        version = answer.get("VersionId")
        return "" if version is None else "suspended" if version == "null" else "enabled"

    @override
    async def get(self, key: str, run: tuple[int, int] | None, sink: Sink) -> int | None:
        subject = f"{self._uri}/{key}"
        headers = {} if run is None else {"Range": f"bytes={run[0]}-{run[1] - 1}"}
        try:
            answer = await self._call("get_object", subject, Key=self._prefix + key, **headers)
        except BehindItsEndError:
            assert run is not None
            return run[0]
        body = answer["Body"]
        try:
            return await receive(body.raw_stream, body.read, run, sink)
        except _ERRORS as e:
            raise casnap_error(e, subject, self._uri, "get_object") from e
        finally:
            # This does nothing if the body was read to its end; else it ends the connection.
            body.close()

    @override
    async def size(self, key: str) -> int:
        # The answer to a HEAD would not tell why there is no object.
        return await self.get(key, (0, 1), Sink()) or 0

    @override
    async def facts_of(self, key: str) -> ObjectFacts:
        # Not by a HEAD, as in size().
        answer = await self._call(
            "get_object", f"{self._uri}/{key}", Key=self._prefix + key, Range="bytes=0-0"
        )
        answer["Body"].close()
        by = ("ServerSideEncryption", "SSECustomerAlgorithm", "SSEKMSKeyId")
        words = [str(answer[name]) for name in by if answer.get(name)]
        at = answer.get("LastModified")
        return ObjectFacts(None if at is None else at.timestamp(), ", ".join(words))

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
    async def copy(self, key: str, to: str) -> None:
        answer = await self._call(
            "copy_object",
            f"{self._uri}/{key}",
            Key=self._prefix + to,
            CopySource={"Bucket": self._bucket, "Key": self._prefix + key},
        )
        if not answer.get("CopyObjectResult"):
            raise TransientError("the answer to a copy is empty, so it may not be the server's")

    @override
    async def delete(self, keys: Sequence[str]) -> Mapping[str, TransientError | PlaceError]:
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
        except BackendError:
            return {}  # there are no rules of this kind, or the server does not know the kind

    keeps_versions = True

    @override
    async def versioning(self) -> str:
        return str((await self.rules("get_bucket_versioning")).get("Status", "")).lower()

    @override
    def warnings(self, rules: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        return s3_warnings(self._prefix, *rules)

    @override
    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


def _session(**options: Any) -> AioSession:
    """Return a new session, which reads the credentials.

    All sessions share one description of the API, since reading it takes 0.1 s.
    """
    session = AioSession(**options)
    session.register_component("data_loader", _loader)
    return session


def _continuation(answer: Mapping[str, Any], subject: str) -> str | None:
    token: str | None = answer.get("NextContinuationToken")
    if "IsTruncated" not in answer:
        # Nothing says that this is a server of S3, so it does not count as reached.
        raise TransientError(f"the answer is not a listing of {subject}", reached=False)
    if token is None and answer["IsTruncated"]:
        raise TransientError(f"the listing of {subject} was cut off")
    return token


def _no_region(**_: object) -> tuple[Any, dict[str, Any]]:
    """Answer botocore's question for a bucket's region without a request: no region is known."""
    return SimpleNamespace(status_code=200), {"ResponseMetadata": {"HTTPHeaders": {}}}


def _options(storage_options: Mapping[str, Any], retries: Retries) -> dict[str, Any]:
    config = {
        "connect_timeout": retries.connect,
        # `Operation` watches for silence; this only ends a request that nobody waits for.
        "read_timeout": 2 * retries.silence,
        "max_pool_connections": _CONNECTIONS,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **storage_options.get("config_kwargs", {}),
        "retries": {"max_attempts": 0},
    }
    # The body has a checksum already. To sign it too, its SHA-256 would be computed on the loop.
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
    """A request body with the methods of a file, which botocore needs to sign it."""

    _position = 0

    def __len__(self) -> int:
        return len(self._source.content)

    def read(self, nbytes: int = -1) -> bytes:
        """Return the next bytes, as the ``read`` of a file does."""
        end = len(self) if nbytes < 0 else self._position + nbytes
        data = bytes(self._source.content[self._position : end])
        self._position += len(data)
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        """Move to a position, as the ``seek`` of a file does."""
        self._position = position + (0, self._position, len(self))[whence]
        return self._position

    def tell(self) -> int:
        """Return the position, as the ``tell`` of a file does."""
        return self._position
