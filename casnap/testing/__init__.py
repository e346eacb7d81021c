"""Tools to test a backend, and to test against one that fails.

- :class:`FaultyBackend` wraps a backend and makes its calls fail as each :class:`Fault` says.
- :class:`FaultyProxy` stands before a server and makes requests fail as each :class:`HttpFault`
  says.
- ``casnap.testing.backend_suite`` holds the tests, for pytest, that every backend must pass. Its
  docstring says how to run them on your own backend.

``casnap.Store(backend)`` opens a store on any backend, a faulty one too.

This folder may import all of casnap, except the command, the demo and the integrations. Reading the
code, begin with ``faults.py`` and ``proxy.py``.
"""

from __future__ import annotations

import sys

from casnap.testing.acts import (
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
from casnap.testing.faults import Act, Call, Crash, Fault, FaultyBackend
from casnap.testing.http_acts import HttpAct, answer, break_off, change, cut, hang_up, stall
from casnap.testing.proxy import Answer, Exchange, FaultyProxy, HttpFault

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


if "pytest" in sys.modules:
    # A failing test of the suite then shows the values that it compared.
    sys.modules["pytest"].register_assert_rewrite("casnap.testing.backend_suite")
