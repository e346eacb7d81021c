"""A backend and a server that fail on demand.

- :class:`FaultyBackend` wraps a backend and makes its calls fail as each :class:`Fault` says.
- :class:`FaultyProxy` stands before a server and makes requests fail as each :class:`HttpFault`
  says.

Begin with ``backend.py`` and ``proxy.py``; ``acts.py`` and ``http_acts.py`` have the ways to fail.
"""

from __future__ import annotations

from tests.support.faulty.acts import (
    Gate,
    after,
    alter,
    before,
    crash,
    delay,
    fail,
    flip,
    hold,
    lose_answer,
    repeat,
    short,
    stale,
    tear,
)
from tests.support.faulty.backend import Act, Call, Crash, Fault, FaultyBackend
from tests.support.faulty.http_acts import HttpAct, answer, break_off, change, cut, hang_up, stall
from tests.support.faulty.proxy import Answer, Exchange, FaultyProxy, HttpFault

__all__ = [
    "Act",
    "Answer",
    "Call",
    "Crash",
    "Exchange",
    "Fault",
    "FaultyBackend",
    "FaultyProxy",
    "Gate",
    "HttpAct",
    "HttpFault",
    "after",
    "alter",
    "answer",
    "before",
    "break_off",
    "change",
    "crash",
    "cut",
    "delay",
    "fail",
    "flip",
    "hang_up",
    "hold",
    "lose_answer",
    "repeat",
    "short",
    "stale",
    "stall",
    "tear",
]
