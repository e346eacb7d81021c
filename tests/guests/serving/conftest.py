"""What the tests of pulls share."""

from __future__ import annotations

from pathlib import Path

import pytest

from casnap import Store
from tests.support.served import store_at, take


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store of one version."""
    store = store_at(tmp_path / "store")
    take(store, 0)
    return store


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """Return where the folder is to be."""
    return tmp_path / "live"
