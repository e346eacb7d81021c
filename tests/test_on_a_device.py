"""The tests of an accelerator, in a process that has one: ``tests/support/late_device.py``.

Alone: ``CASNAP_TEST_DEVICE=late pytest tests/device``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import PRELOADED
from tests.support.warm import run_python

CODE = """
import sys
import pytest

# What the process was forked from has imported some of what pytest would rewrite.
known = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *known, *sys.argv[1:]]))
"""


def test_everything_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASNAP_TEST_DEVICE", "late")
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_CURRENT_TEST"):
        monkeypatch.delenv(name, raising=False)
    folder = Path(__file__).parent / "device"
    done = run_python(CODE, folder, modules=PRELOADED, timeout=500)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
