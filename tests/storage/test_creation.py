"""Processes that make one store at once: all of them get the same store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from casnap import Store
from casnap.opened.finding import find
from tests.support.faults import stop, system_faults, while_stopped
from tests.support.sweep import sweep

pytestmark = pytest.mark.sweep

LOOKS = ["stat", "listdir", "link"]


@pytest.mark.parametrize(
    "make",
    [Store, lambda folder: find(folder / "step", None, None, create=True)[0].store],
    ids=["named", "unasked"],
)
def test_another_process_makes_the_store_at_any_moment(
    tmp_path: Path, make: Callable[[Path], Store]
) -> None:
    """One stops before each call in turn, and finds the store made when it goes on."""
    for k in sweep():
        place = tmp_path / str(k)
        place.mkdir()
        made: list[str] = []
        stopped, ended = while_stopped(
            lambda place=place: make(place).snapshots(),
            system_faults(k, stop, LOOKS),
            lambda place=place, made=made: made.append(Store(place).id),
        )
        assert ended == 0, k
        if not stopped:
            break
        assert [make(place).id] == made
    assert k > 10
