"""Answers that are late, wrong or incomplete, and what a remote backend makes of them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from casnap.backends.any_fsspec import FsspecClient
from casnap.backends.client import ExpiredError, Found, Sink, TransientError
from casnap.backends.remote import RemoteBackend

MIB = 1 << 20


class _Expiring(FsspecClient):
    """Its first read finds the credentials expired, its second fails while new ones come."""

    clients = 0
    reads = 0

    async def connect(self) -> None:
        _Expiring.clients += 1
        if _Expiring.clients > 1:
            await asyncio.sleep(0.3)

    async def get(self, key: str, run: tuple[int, int] | None, sink: Sink) -> Found:
        _Expiring.reads += 1
        number = _Expiring.reads
        if number == 1:
            raise ExpiredError("expired")
        if number == 2:
            await asyncio.sleep(0.1)
            raise TransientError("a bad moment")
        return await super().get(key, run, sink)


def test_requests_go_on_while_credentials_are_renewed(tmp_path: Path) -> None:
    """Another request that begins meanwhile does not stop the event loop for ever."""
    uri = f"file://{tmp_path}"
    (tmp_path / "x").write_bytes(bytes(5 * MIB))
    backend = RemoteBackend(uri, lambda: _Expiring(uri, {}))
    targets = [(0, memoryview(bytearray(9))), (4 * MIB, memoryview(bytearray(9)))]
    pool = ThreadPoolExecutor(1)
    try:
        assert pool.submit(backend.read_into, "x", targets).result(20) == [9, 9]
    finally:
        pool.shutdown(wait=False)
    assert _Expiring.clients == 2
