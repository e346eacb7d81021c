"""Bodies of requests and answers, without a second copy of them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from casnap.backends.client import Sink, Source, TransientError
from casnap.runtime.typing import override

# How much of a body is handed on at once.
_PIECE = 256 << 10


class Body(aiohttp.Payload):
    """The body of a request, sent from the caller's buffer, piece by piece, once.

    Args:
        source: What is sent.
        before: What is sent before it.
        after: What is sent after it.
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
        """Whether it was sent. Then aiohttp does not send it again, unseen by us."""
        return self._begun

    @override
    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a body is no text")

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
    read: Callable[[int], Awaitable[bytes]],
    headers: Mapping[str, str],
    run: tuple[int, int] | None,
    sink: Sink,
) -> int:
    """Hand the body of an answer to ``sink``; return the length of the whole object.

    Args:
        read: Reads on, up to so many bytes.
        headers: The answer's, in lower case.
        run: What was asked for; None for the whole object.
        sink: Takes the body.
    """
    told = headers.get("content-range", "")
    ranged = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", told)
    if (told and not ranged) or not (ranged or "content-length" in headers):
        raise TransientError(f"the answer does not tell how long the object is ({told})")
    size = int(ranged[2] if ranged else headers["content-length"])
    first, end = (0, size) if run is None else run
    # A server may send the whole object instead of the run.
    position = int(ranged[1]) if ranged else 0
    if position > first:
        raise TransientError(f"the answer begins at byte {position}, not at {first}")
    while position < min(end, size):
        data = await read(_PIECE)
        if not data:
            raise TransientError(f"the body broke off at byte {position}")
        begin = max(0, first - position)
        piece = data[begin : end - position] if begin or position + len(data) > end else data
        if piece:
            sink.take(piece)
        position += len(data)
    return size
