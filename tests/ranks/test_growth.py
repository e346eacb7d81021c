"""What eight hosts of eight ranks send: the numbers that docs/scale.md reckons with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import Worlds
from tools import growth


@pytest.mark.slow
def test_what_eight_hosts_of_eight_ranks_send(world: Worlds, tmp_path: Path) -> None:
    of_ranks = world(64).run(growth.measure, str(tmp_path), 8)
    for rank, found in enumerate(of_ranks):
        speaks = rank % 8 == 0
        for cost in found.unchanged:
            assert cost.traffic.collectives <= 13
            # One message to each of its peers, and a second one where it is long.
            peers = 14 if speaks else 1
            assert cost.traffic.messages <= 2 * peers * cost.traffic.collectives
    messages = sorted(found.unchanged[-1].traffic.messages for found in of_ranks)
    assert messages[32] <= 20
    assert messages[-1] <= 300
    files = sorted(found.files for found in of_ranks)
    assert files[32] <= 40
    assert growth.questions(2048, 8) <= 5_000_000
    assert growth.memory_of_rank_0(16_384, 2_000)[0] <= 2048
