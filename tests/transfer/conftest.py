"""What the tests of copies and mirrors share."""

from __future__ import annotations

from pathlib import Path

import pytest

import casnap.mirror.mirror
import casnap.runtime.backoff
from casnap.backends import LocalBackend
from tests.support.faulty import FaultyBackend


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have mirrors try again soon."""
    monkeypatch.setattr(casnap.runtime.backoff, "_FIRST", 0.02)
    monkeypatch.setattr(casnap.runtime.backoff, "_LONGEST", 0.05)
    monkeypatch.setattr(casnap.mirror.mirror, "_LOOK", 0.1)


@pytest.fixture
def there(tmp_path: Path) -> FaultyBackend:
    """Return where a mirror can be that fails as it is told."""
    return FaultyBackend(LocalBackend(tmp_path / "there"))
