"""These tests run in a process of their own (``tests/test_on_a_device.py``), with a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import late_device


@pytest.fixture(autouse=True)
def late() -> Iterator[None]:
    """Have the device, with all memory, and no bytes counted."""
    late_device.install()
    late_device.counts.clear()
    late_device.module.free_bytes = None
    late_device.module.is_prompt = False
    late_device.module.runtime.free_bytes = None
    yield
    late_device.run_all()
    assert not late_device.errors
