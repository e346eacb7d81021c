"""The tests of an accelerator, in a process that has one: ``tests/support/late_device.py``.

Alone: ``CASNAP_TEST_DEVICE=late pytest tests/device``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "device"


def test_everything_on_a_device() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)],
        env={**environment, "CASNAP_TEST_DEVICE": "late"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
