"""The acts of a :class:`~tests.support.faulty.HttpFault`: what is done in place of a request.

=====================================  =========================================================
what happens                           act
=====================================  =========================================================
an error is answered                   ``answer(503, "SlowDown")``
nothing is answered                    ``hang_up()``
it is done, the answer lost            ``after(hang_up())``
the answer breaks off                  ``cut(100)``, ``cut(100, reset=True)``
the request breaks off at the server   ``break_off(100)``
no byte comes for long                 ``stall(30)``, ``stall(30, nbytes=100)``
bytes of the answer change, or miss    ``change(function)``
it takes long                          ``delay(0.05)``
=====================================  =========================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

from tests.support.faulty.proxy import Answer, Exchange

HttpAct: TypeAlias = Callable[[Exchange], Answer]
"""What is done in place of a request. It returns the answer."""


def answer(status: int, code: str = "InternalError", **headers: str) -> HttpAct:
    """Answer with an error, and do not ask the server.

    Args:
        status: The status code.
        code: The name of the error, as S3 or GCS has it.
        headers: More headers; ``_`` stands for ``-``.
    """

    def act(exchange: Exchange) -> Answer:
        exchange.body()
        message = "failed, on purpose"
        if exchange.path.startswith(("/storage/", "/upload/", "/download/")):
            error = {"code": status, "message": message, "errors": [{"reason": code}]}
            kind, content = "application/json", json.dumps({"error": error})
        else:
            kind = "application/xml"
            content = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        lines = [f"HTTP/1.1 {status} {code}", f"Content-Type: {kind}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        bare = Answer(("\r\n".join(lines) + "\r\n\r\n").encode())
        found = bare.with_content(content.encode())
        return replace(found, body=()) if exchange.method == "HEAD" else found

    return act


def hang_up(*, reset: bool = True) -> HttpAct:
    """Break the connection, and do not ask the server."""

    def act(exchange: Exchange) -> Answer:
        return Answer(b"", (), "reset" if reset else "close")

    return act


def cut(nbytes: int, *, reset: bool = False) -> HttpAct:
    """Pass on only the first bytes of the answer's body, then break the connection."""

    def act(exchange: Exchange) -> Answer:
        found = exchange.go()
        body = b"".join(found.body)[:nbytes]
        return replace(found, body=(body,), then="reset" if reset else "close")

    return act


def break_off(nbytes: int) -> HttpAct:
    """Pass on only the first bytes of the request's body, then break both connections."""

    def act(exchange: Exchange) -> Answer:
        exchange.go(exchange.body()[:nbytes])
        return Answer(b"", (), "reset")

    return act


def stall(seconds: float, nbytes: int = 0) -> HttpAct:
    """Pass on only the first bytes of the answer's body, and the others much later.

    With ``nbytes=0`` the head of the answer comes late, too.
    """

    def act(exchange: Exchange) -> Answer:
        found = exchange.go()
        whole = b"".join((found.head, *found.body))
        first = len(found.head) + nbytes if nbytes else 0

        def parts() -> Iterator[bytes]:
            yield whole[:first]
            exchange.proxy.ended.wait(seconds)
            yield whole[first:]

        return replace(found, head=b"", body=parts())

    return act


def change(function: Callable[[bytes], bytes]) -> HttpAct:
    """Change the content of an answer, and say its new length."""

    def act(exchange: Exchange) -> Answer:
        found = exchange.go()
        return found.with_content(function(found.content()))

    return act
