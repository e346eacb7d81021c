"""What many ranks ask of one bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.ranks import World
from tools import bucket


def test_one_rank_asks_for_all(world: Callable[[int], World], tmp_path: Path) -> None:
    """Of eight ranks on two hosts, the others ask only for what is theirs, or their host's."""
    first, *others = world(8).run(bucket.measure, str(tmp_path), 4)
    for what in ("first take", "take, a third is new"):
        # Rank 0 looks for a pack of each host, not of each rank.
        assert first[what]["head"] <= 3
        assert all(asked[what]["head"] == 0 for asked in others)
        assert all(asked[what]["put"] <= 2 for asked in others)
    for what in first:
        if "take" in what:
            assert all(asked[what]["list"] == 0 for asked in others), what
        # A host reads what is new in the index once.
        if what.startswith("take"):
            assert sum(asked[what]["get"] for asked in others) <= 2, what
    assert sum(first["take, nothing new"].values()) <= 4
