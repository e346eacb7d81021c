"""Stores for the command to look at."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.cli_calls import fill


@pytest.fixture(scope="package")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that no test changes."""
    return fill(tmp_path_factory.mktemp("cli") / "ckpts")


@pytest.fixture
def own_store(store: Path, tmp_path: Path) -> Path:
    """Return a store that the test may change."""
    return Path(shutil.copytree(store, tmp_path / "ckpts"))
