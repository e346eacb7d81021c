"""The tests of an accelerator, in a process that has one: ``tests/support/late_device.py``.

Alone: ``CASNAP_TEST_DEVICE=late pytest tests/device``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.warm import run_python

CODE = """
import sys
import pytest

sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1]]))
"""


def test_everything_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASNAP_TEST_DEVICE", "late")
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_CURRENT_TEST"):
        monkeypatch.delenv(name, raising=False)
    done = run_python(CODE, Path(__file__).parent / "device", timeout=500)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
