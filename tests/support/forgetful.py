"""A server that honours put-if-absent until its bucket keeps versions, as Ceph RGW 16.2 does."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from tests.support.faulty import Answer, Exchange, FaultyProxy, HttpFault, answer
from tests.support.servers import Server

_ENABLED = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"


class ForgetfulProxy(FaultyProxy):
    """A proxy before a server. The bucket behind it keeps no versions, but that does not show.

    Args:
        server: The server.

    Attributes:
        keeps_versions: Whether the bucket says that it keeps versions. Then all conditional puts
            win.
    """

    def __init__(self, server: Server) -> None:
        self.keeps_versions = False
        self._client = server.client()
        self._one = threading.Lock()
        forever: dict[str, Any] = {"times": None}
        super().__init__(
            server.endpoint,
            HttpFault(self._put, "PUT", **forever),
            HttpFault(self._told, "GET", "*[?]versioning*", **forever),
        )

    def _told(self, exchange: Exchange) -> Answer:
        if not self.keeps_versions:
            return exchange.go()
        return answer(200)(exchange).with_content(_ENABLED)

    def _put(self, exchange: Exchange) -> Answer:
        path = exchange.path.partition("?")[0]
        if not self.keeps_versions:
            return exchange.go()
        exchange.body()  # before the lock: a client may take its time
        with self._one:
            if "if-none-match" in exchange.headers:
                bucket, _, key = path.lstrip("/").partition("/")
                self._client.delete_object(Bucket=bucket, Key=key)
            found = exchange.go()
        return replace(found, head=found.head[:-2] + b"x-amz-version-id: v1\r\n\r\n")
