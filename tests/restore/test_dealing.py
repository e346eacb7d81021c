"""Which rank reads which chunks for all ranks that want them, and when."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from casnap.restore.schedule import schedule_reads


@given(
    st.lists(
        st.dictionaries(st.integers(0, 40), st.integers(1, 100), min_size=1), min_size=1, max_size=6
    ),
    st.integers(1, 3),
    st.integers(1, 300),
    st.booleans(),
)
def test_what_several_want_is_read_by_one_of_them(
    lists: list[dict[int, int]], replicas: int, share: int, in_memory: bool
) -> None:
    packs = [bytes([pack]) for pack in range(3)]
    wanted = [
        (
            list(range(i, i + len(lists) * replicas, len(lists))),
            [(p, [(n, runs[n]) for n in sorted(runs) if n % 3 == p[0]]) for p in packs],
        )
        for i, runs in enumerate(lists)
    ]
    window = 4 * share
    deal = schedule_reads(wanted, len(lists) * replicas, share, window, in_memory)
    turns = {(pack, n): turn for pack, runs in deal.units for n, turn in runs.items()}
    wanters: dict[tuple[bytes, int], list[int]] = {}
    for (ranks, _), runs in zip(wanted, lists, strict=True):
        for n in runs:
            wanters.setdefault((packs[n % 3], n), []).extend(ranks)
    assert {unit for unit, ranks in wanters.items() if len(ranks) > 1} == set(turns)
    reads, gets = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for unit, turn in turns.items():
        assert turn.reader in wanters[unit]
        sent = [runs.get(unit[1], 0) for runs in lists]
        # In memory that ranks share, a chunk lies once for all of them.
        reads[turn.window, turn.reader] += max(sent) if in_memory else sum(sent)
        for i, runs in enumerate(lists):
            gets[turn.window, i] += runs.get(unit[1], 0)
    assert {turn.window for turn in turns.values()} == set(range(deal.windows))
    # One unit may be larger than all that is allowed.
    assert all(n <= max(share, 100 * len(lists)) for n in reads.values())
    assert all(n <= max(window, 100) for n in gets.values())


def test_the_load_is_even_in_each_window() -> None:
    units = [(bytes([pack]), [(n, 10) for n in range(100)]) for pack in range(8)]
    alone = [(b"z", [(rank, 200 * (rank < 4))]) for rank in range(8)]
    deal = schedule_reads([([rank], [*units, alone[rank]]) for rank in range(8)], 8, 8 * 100, 6400)
    load = Counter(turn.reader for _, runs in deal.units for turn in runs.values())
    assert [load[rank] for rank in range(8)] == [90] * 4 + [110] * 4
    assert deal.windows <= 12
