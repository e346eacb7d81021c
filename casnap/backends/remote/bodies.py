"""Send and receive the bodies of requests and answers without copying them once more."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

from casnap.backends.remote.client import Sink, Source, TransientError
from casnap.runtime.typing import override

# How much of a body is handed on at once.
_PIECE = 256 << 10


class Body(aiohttp.Payload):
    """The body of a request. It is sent once, piece by piece, from the caller's buffer.

    Args:
        source: The content.
        before: Bytes to send before the content.
        after: Bytes to send after the content.
    """

    def __init__(self, source: Source, before: bytes = b"", after: bytes = b"") -> None:
        super().__init__(source.content)
        self._source = source
        self._before = before
        self._after = after
        self._size = len(before) + len(source.content) + len(after)
        self._begun = False

    @property
    @override
    def consumed(self) -> bool:
        """Whether sending has begun. If it has, aiohttp does not send the body again on its own."""
        return self._begun

    @override
    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a body is not text")

    @override
    async def write(self, writer: Any) -> None:
        self._begun = True
        content = self._source.content
        if self._before:
            await writer.write(self._before)
        for start in range(0, len(content), _PIECE):
            piece = content[start : start + _PIECE]
            await writer.write(piece)
            await writer.drain()
            self._source.nbytes += len(piece)
        if self._after:
            await writer.write(self._after)


async def receive(
    answer: aiohttp.ClientResponse,
    read_part: Callable[[int], Awaitable[bytes]],
    run: tuple[int, int] | None,
    sink: Sink,
) -> int:
    """Pass the body of an answer to ``sink``; return the length of the whole object.

    Args:
        answer: The response of the server.
        read_part: Reads the next bytes of the body, at most the given number.
        run: The run of the object that was asked for: the offset of its first byte, and one past
            its last. None for the whole object.
        sink: Takes the bytes.

    Raises:
        TransientError: The answer is incomplete, or does not fit the request.
    """
    content_range = answer.headers.get("content-range", "")
    ranged = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", content_range)
    if (content_range and not ranged) or not (ranged or "content-length" in answer.headers):
        raise TransientError(f"the answer does not tell how long the object is ({content_range})")
    size = int(ranged[2] if ranged else answer.headers["content-length"])
    sink.expect(size)
    start, end = (0, size) if run is None else run
    # A server may send the whole object instead of the run.
    position = int(ranged[1]) if ranged else 0
    if position > start:
        raise TransientError(f"the answer begins at byte {position}, not at {start}")
    end = min(end, size)
    is_whole = position == start and answer.headers.get("content-length") == str(end - start)
    if is_whole and "content-encoding" not in answer.headers:
        await _receive_straight(answer, end - start, sink)
        position += sink.nbytes
    while position < end:
        data = await read_part(_PIECE)
        if not data:
            raise TransientError(f"the body broke off at byte {position}")
        begin = max(0, start - position)
        piece = data[begin : end - position] if begin or position + len(data) > end else data
        if piece:
            sink.take(piece)
        position += len(data)
    return size


async def _receive_straight(answer: aiohttp.ClientResponse, nbytes: int, sink: Sink) -> None:
    """Receive the rest of a body straight into the memory that the sink offers.

    If aiohttp has already released the connection, nothing is done.

    Args:
        answer: The response of the server.
        nbytes: The length of the body.
        sink: Takes the bytes.
    """
    # Some of the body may have come together with the head.
    while sink.nbytes < nbytes and (data := answer.content.read_nowait(_PIECE)):
        sink.take(data)
    connection = answer.connection
    if sink.nbytes >= nbytes or connection is None:
        return
    usual, transport = connection.protocol, connection.transport
    if usual is None or transport is None:
        return
    straight = _Straight(usual, transport, nbytes, sink)
    try:
        await straight.done
    finally:
        straight.end()
    answer.content.feed_eof()


class _Straight(asyncio.BufferedProtocol):
    """Receives the rest of a body in place of aiohttp, which would copy the bytes three times.

    Args:
        usual: The protocol by which aiohttp receives on this connection.
        transport: The connection.
        nbytes: The length of the body.
        sink: Takes the bytes.
    """

    def __init__(
        self, usual: ResponseHandler, transport: asyncio.Transport, nbytes: int, sink: Sink
    ) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._usual = usual
        self._transport = transport
        self._nbytes = nbytes
        self._sink = sink
        # A buffer for bytes that the sink has no memory for, and whether the next bytes go there.
        self._aside = memoryview(b"")
        self._is_aside = False
        # `Operation` watches for silence.
        usual.read_timeout = None
        usual.start_timeout()
        transport.set_protocol(self)

    def end(self) -> None:
        """Give the connection back to aiohttp, so that aiohttp receives the next answer."""
        if self._transport.get_protocol() is self:
            self._transport.set_protocol(self._usual)

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        room = self._sink.room()
        remaining = self._nbytes - self._sink.nbytes
        self._is_aside = room is None
        if room is None:
            self._aside = room = self._aside or memoryview(bytearray(min(remaining, _PIECE)))
        return room[:remaining]

    @override
    def buffer_updated(self, nbytes: int) -> None:
        if self._is_aside:
            self._sink.take(self._aside[:nbytes])
        else:
            self._sink.received(nbytes)
        if self._sink.nbytes == self._nbytes:
            # At once, since the next bytes belong to another answer.
            self.end()
            self._finish(None)

    @override
    def eof_received(self) -> None:
        """Do nothing, so that asyncio closes the connection."""

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self._usual.connection_lost(error)
        self._finish(error or TransientError(f"the body broke off at byte {self._sink.nbytes}"))

    def _finish(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
