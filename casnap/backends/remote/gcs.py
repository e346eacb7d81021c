"""The client for ``gs://``: Google Cloud Storage. gcsfs finds the credentials and the server.

casnap makes the requests itself: gcsfs would repeat each up to six times, and hide the HTTP status.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any
from urllib.parse import quote

import aiohttp
import google_crc32c
from gcsfs.core import GCSFileSystem  # not gcsfs.GCSFileSystem, which may ask for gRPC
from gcsfs.retry import HttpError
from google.auth.exceptions import GoogleAuthError, TransportError

from casnap.backends.remote.bodies import Body, receive
from casnap.backends.remote.bucket_rules import gcs_warnings
from casnap.backends.remote.client import (
    BehindItsEndError,
    Client,
    ObjectFacts,
    Page,
    Sink,
    Source,
    TransientError,
    tls_problem,
    valid_options,
)
from casnap.backends.remote.gcs_credentials import none_found_error, token_to_use
from casnap.backends.remote.gcs_errors import StatusError, casnap_error
from casnap.backends.remote.retries import Retries
from casnap.backends.uris import without_secrets
from casnap.errors import BackendError, PlaceError, UnavailableError
from casnap.runtime.typing import override

_CONNECTIONS = 32
_BOUNDARY = "==casnap=="
_CONNECTING = (
    aiohttp.ClientConnectorError,
    # Older versions have no error of their own for this.
    getattr(aiohttp, "ConnectionTimeoutError", aiohttp.ServerTimeoutError),
)


class GcsClient(Client):
    """Makes single requests to one GCS bucket, for objects below one prefix.

    Args:
        uri: ``gs://bucket/prefix``.
        storage_options: The arguments of ``gcsfs.GCSFileSystem``.
        retries: Says how long making a connection, and silence, may last.
    """

    deletes = 100

    def __init__(self, uri: str, storage_options: Mapping[str, Any], retries: Retries) -> None:
        self._uri = uri
        options = {
            **storage_options,
            "token": token_to_use(storage_options.get("token")),
            "asynchronous": True,
            "use_listings_cache": False,
            "skip_instance_cache": True,
        }
        try:
            with valid_options(uri):
                self._fs = GCSFileSystem(**options)
        except OSError as e:
            # gcsfs asks Google about some tokens, by URLs that hold them.
            detail = without_secrets(str(e))
            raise UnavailableError(
                f"{uri}: the credentials cannot be checked: {detail}", reason="unreachable"
            ) from None
        self._bucket, _, prefix = uri.partition("://")[2].partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self.is_bucket = not self._prefix
        self._timeout = aiohttp.ClientTimeout(
            # `Operation` watches for silence; `sock_read` ends a request that nobody waits for.
            total=None,
            sock_connect=retries.connect,
            sock_read=2 * retries.silence,
        )
        self._session: aiohttp.ClientSession | None = None
        self._bucket_is_there = False

    @property
    def _server(self) -> str:
        return str(self._fs.base).removesuffix("/storage/v1/")

    def _object(self, key: str) -> str:
        return f"{self._objects()}/{quote(self._prefix + key, safe='')}"

    def _objects(self) -> str:
        return f"/storage/v1/b/{quote(self._bucket, safe='')}/o"

    async def _ask(
        self,
        method: str,
        path: str,
        subject: str,
        *,
        headers: Mapping[str, str] | None = None,
        parameters: Mapping[str, str] | None = None,
        body: Any = None,
        run: tuple[int, int] | None = None,
        sink: Sink | None = None,
    ) -> Any:
        """Make one request to the JSON API.

        Args:
            method: The HTTP method.
            path: The path of the URL, after the server.
            subject: The object, for messages.
            headers: The headers of the request.
            parameters: The query parameters.
            body: The body of the request.
            run: The run of the object that is asked for, as for :meth:`Client.get`.
            sink: Takes the body of the answer.

        Returns:
            The decoded JSON of the answer; its text if it has several parts; or with ``sink`` the
            length of the whole object.
        """
        request = {
            "params": {**(parameters or {}), **self._payer()},
            "headers": await self._signed(headers or {}),
            "data": body,
        }
        try:
            async with self._connected().request(method, self._server + path, **request) as answer:
                await _raise_refusal(answer)
                if sink is not None:
                    return await receive(answer, answer.content.read, run, sink)
                content = await answer.read()
                if answer.content_type == "multipart/mixed":
                    return content.decode(errors="replace")
                return json.loads(content) if content else {}
        except StatusError as refusal:
            raise await self._error_for(refusal, path, subject) from refusal
        except aiohttp.InvalidURL as e:
            raise BackendError(f"{self._uri}: wrong address: {without_secrets(str(e))}") from e
        except (OSError, asyncio.TimeoutError, aiohttp.ClientError, ValueError) as e:
            if (no_tls := tls_problem((e, getattr(e, "os_error", None), e.__cause__))) is not None:
                raise no_tls from e
            reached = not isinstance(e, _CONNECTING)
            message = f"{type(e).__name__}: {without_secrets(str(e))}"
            raise TransientError(message, reached=reached) from e

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            options = {
                "connector": aiohttp.TCPConnector(limit=_CONNECTIONS),
                "timeout": self._timeout,
                **self._fs.session_kwargs,
            }
            self._session = aiohttp.ClientSession(**options)
        return self._session

    async def _signed(self, headers: Mapping[str, str]) -> dict[str, str]:
        signed = dict(headers)
        if self._fs.credentials.credentials is None:
            return signed
        try:
            # On another thread, since they may have to be refreshed.
            await asyncio.to_thread(self._fs.credentials.apply, signed)
        except (TransportError, OSError) as e:
            raise TransientError(f"credentials: {e}", reached=False) from e
        except (GoogleAuthError, HttpError) as e:
            raise UnavailableError(
                f"{self._uri}: {type(e).__name__}: {e}. Pass token= in storage_options, or run "
                "`gcloud auth application-default login`",
                reason="credentials",
            ) from e
        return signed

    def _payer(self) -> dict[str, str]:
        payer = self._fs.requester_pays
        if not payer:
            return {}
        return {"userProject": payer if isinstance(payer, str) else self._fs.project}

    async def _error_for(self, refusal: StatusError, path: str, subject: str) -> Exception:
        """Return casnap's error for an error response of the server.

        A 404 may be about the object or the bucket. If the answer does not say which, a second
        request asks for the bucket.

        Args:
            refusal: The error response.
            path: The path of the request.
            subject: The object, for messages.
        """
        if refusal.status == 401 and self._fs.credentials.credentials is None:
            return none_found_error(self._uri, refusal)
        error = casnap_error(refusal, subject, self._uri)
        if error is not None:
            return error
        if f"{self._objects()}/" not in path:
            return UnavailableError(
                f"{self._uri}: the bucket does not exist ({refusal})", reason="no_bucket"
            )
        if not self._bucket_is_there:
            await self._ask("GET", self._objects(), self._uri, parameters={"maxResults": "1"})
            self._bucket_is_there = True
        return FileNotFoundError(subject)

    @override
    async def endpoint(self) -> str:
        return without_secrets(self._server)

    @override
    async def put(self, key: str, source: Source, *, if_absent: bool = False) -> str:
        # On another thread, since a hash would hold up all requests.
        crc32c = await asyncio.to_thread(_crc32c, source.content)
        meta = json.dumps({"name": self._prefix + key, "crc32c": crc32c})
        before = (
            f"--{_BOUNDARY}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{meta}\r\n"
            f"--{_BOUNDARY}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        reply = await self._ask(
            "POST",
            f"/upload{self._objects()}",
            f"{self._uri}/{key}",
            headers={"Content-Type": f'multipart/related; boundary="{_BOUNDARY}"'},
            parameters={"uploadType": "multipart", "fields": "size"}
            | ({"ifGenerationMatch": "0"} if if_absent else {}),
            body=Body(source, before.encode(), f"\r\n--{_BOUNDARY}--".encode()),
        )
        if int(reply.get("size", -1)) != len(source.content):
            raise TransientError("the answer to a put tells another length, or none")
        return ""

    @override
    async def get(self, key: str, run: tuple[int, int] | None, sink: Sink) -> int | None:
        headers = {} if run is None else {"Range": f"bytes={run[0]}-{run[1] - 1}"}
        try:
            size: int = await self._ask(
                "GET",
                self._object(key),
                f"{self._uri}/{key}",
                headers=headers,
                parameters={"alt": "media"},
                run=run,
                sink=sink,
            )
        except BehindItsEndError:
            assert run is not None
            return run[0]
        return size

    @override
    async def size(self, key: str) -> int:
        reply = await self._ask(
            "GET", self._object(key), f"{self._uri}/{key}", parameters={"fields": "size"}
        )
        return int(reply["size"])

    @override
    async def facts_of(self, key: str) -> ObjectFacts:
        reply = await self._ask(
            "GET",
            self._object(key),
            f"{self._uri}/{key}",
            parameters={"fields": "updated,kmsKeyName"},
        )
        at, own_key = _moment(reply.get("updated")), reply.get("kmsKeyName")
        # Google encrypts every object.
        encryption = f"by the key {own_key}" if own_key else "by keys of Google"
        return ObjectFacts(None if at is None else at.timestamp(), encryption)

    @override
    async def list(self, prefix: str, *, deep: bool, after: str | None) -> Page:
        parameters = {
            "prefix": self._prefix + prefix,
            "fields": "items(name,size,updated),prefixes,nextPageToken",
            **({} if deep else {"delimiter": "/"}),
            **({} if after is None else {"pageToken": after}),
        }
        reply = await self._ask(
            "GET", self._objects(), f"{self._uri}/{prefix}", parameters=parameters
        )
        items = reply.get("items", ())
        objects = [(o["name"], int(o["size"]), _moment(o.get("updated"))) for o in items]
        after = reply.get("nextPageToken")
        return Page.of(objects, reply.get("prefixes", ()), after, self._prefix)

    @override
    async def copy(self, key: str, to: str) -> None:
        path = f"{self._object(key)}/rewriteTo{self._object(to).removeprefix('/storage/v1')}"
        reply = await self._ask("POST", path, f"{self._uri}/{key}")
        while not reply["done"]:
            # A copy between some storage classes takes several requests.
            parameters = {"rewriteToken": reply["rewriteToken"]}
            reply = await self._ask("POST", path, f"{self._uri}/{key}", parameters=parameters)

    @override
    async def delete(self, keys: Sequence[str]) -> Mapping[str, TransientError | PlaceError]:
        if len(keys) == 1:
            with suppress(FileNotFoundError):
                await self._ask("DELETE", self._object(keys[0]), f"{self._uri}/{keys[0]}")
            return {}
        parts = "".join(
            f"--{_BOUNDARY}\r\nContent-Type: application/http\r\nContent-ID: <{i}>\r\n\r\n"
            f"DELETE {self._object(key)}{self._query()} HTTP/1.1\r\n\r\n\r\n"
            for i, key in enumerate(keys)
        )
        reply = await self._ask(
            "POST",
            "/batch/storage/v1",
            self._uri,
            headers={"Content-Type": f'multipart/mixed; boundary="{_BOUNDARY}"'},
            body=f"{parts}--{_BOUNDARY}--\r\n".encode(),
        )
        return self._deleted(keys, reply)

    def _query(self) -> str:
        payer = self._payer()
        return f"?userProject={quote(payer['userProject'])}" if payer else ""

    def _deleted(
        self, keys: Sequence[str], reply: str
    ) -> Mapping[str, TransientError | PlaceError]:
        """Return the errors in the answer to a batch of deletes, keyed by object.

        Args:
            keys: The objects, in the order of the batch. The answer may have another order.
            reply: The text of the answer.
        """
        errors: dict[str, TransientError | PlaceError] = {
            key: TransientError("the answer says nothing about it") for key in keys
        }
        boundary = reply.lstrip().partition("\n")[0].strip()
        for i, part in enumerate(reply.split(boundary)[1:] if boundary else ()):
            status = re.search(r"HTTP/[\d.]+ (\d+)", part)
            if status is None:
                continue
            part_id = re.search(r"response-<?(\d+)", part)
            key = keys[int(part_id[1]) if part_id else i]
            del errors[key]
            refusal = StatusError(int(status[1]), part[status.end() :])
            if refusal.status < 300:
                continue
            # A missing object counts as deleted. A missing bucket is an error.
            error = casnap_error(refusal, f"{self._uri}/{key}", self._uri)
            if isinstance(error, TransientError | PlaceError):
                errors[key] = error
        return errors

    @override
    async def is_object(self) -> bool:
        name = quote(self._prefix.rstrip("/"), safe="")
        try:
            await self._ask("GET", f"{self._objects()}/{name}", self._uri)
        except FileNotFoundError:
            return False
        return True

    rule_kinds = ("bucket",)

    @override
    async def rules(self, kind: str) -> Mapping[str, Any]:
        subject = f"the rules of {self._uri}"
        reply: dict[str, Any] = await self._ask("GET", self._objects().removesuffix("/o"), subject)
        return reply

    @override
    def warnings(self, rules: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        return gcs_warnings(self._prefix, *rules)

    @override
    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def _raise_refusal(answer: aiohttp.ClientResponse) -> None:
    if answer.status >= 300:
        raise StatusError(answer.status, (await answer.read()).decode(errors="replace"))


def _moment(text: str | None) -> datetime | None:
    try:
        # Python 3.10 reads no Z.
        return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None
    except ValueError:
        return None


def _crc32c(content: memoryview) -> str:
    crc = 0
    for start in range(0, len(content), 1 << 20):
        # The library takes no memoryviews.
        crc = google_crc32c.extend(crc, bytes(content[start : start + (1 << 20)]))
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
