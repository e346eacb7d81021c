"""Small stores and who runs on them: where the protocol has to hold, and where it breaks.

In each, `T1` and `T2` take, `D` deletes, `C1` and `C2` collect, `R1` and `R2` copy what is needed
of a pack (the first half of a repack), and `V` reads. The packs `P` and `Q` are there at first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.model.collector import Collector
from tests.model.processes import Delete, Reader, Take
from tests.model.protocol import CommitModel, Spec
from tests.model.records import Entry, Id, Root, Segment, Snapshot, united
from tests.model.rules import Rule


@dataclass(frozen=True)
class Scenario:
    """Bounds of a search, and what has to come to pass in it, lest it prove nothing."""

    root: Root
    specs: Mapping[str, Spec]
    roots: int = 7
    happens: frozenset[str] = field(default_factory=frozenset)
    lost_answers: bool = False
    late_puts: bool = False
    caches: bool = False

    def model(self, dropped: Iterable[Rule] = (), *, reduced: bool) -> CommitModel:
        return CommitModel(
            self.root,
            self.specs,
            self.roots,
            frozenset(dropped),
            lost_answers=self.lost_answers,
            late_puts=self.late_puts,
            caches=self.caches,
            reduced=reduced,
        )


def _store(packs: dict[str, str], snapshots: dict[str, str]) -> Root:
    """Return the first root: a segment for each pack; commits are called like their snapshots.

    A pack with ``ba/`` has b as a delta of a.
    """
    segments = set()
    for name, digests in packs.items():
        deltas, _, held = digests.rpartition("/")
        on = frozenset([(deltas[0], deltas[1])] if deltas else [])
        entry = Entry(Id(0, name), united(held, deltas[:1]), on)
        segments.add(Segment(Id(0, name, 1), frozenset([entry])))
    rows = {Snapshot(name, name, needs) for name, needs in snapshots.items()}
    return Root(1, frozenset(rows), frozenset(segments))


_HALF_USED = _store({"P": "ab"}, {"old": "a"})
_DOUBLE = _store({"P": "ab", "Q": "a"}, {"old": "b"})
_BOTH = _store({"P": "ab"}, {"old": "ab"})
_EXACT = _store({"P": "a"}, {"old": "a"})

_DELTA = _store({"P": "a", "Q": "ba/"}, {"old": "b"})
_TWO = _store({"P": "a", "Q": "b"}, {"old": "a", "new": "b"})
# b is a delta of two: of d, which is a delta of b too, and of e.
_CROSSED = _store(
    {"E": "e", "M": "bd/", "P": "d", "Q": "be/", "R": "db/"}, {"old": "b", "new": "d"}
)

_NEW_AND_OLD = Take("ac", "t1")
_DELETE = Delete("old")
_COLLECTS = frozenset({"fenced", "freed", "deleted"})
_RESCUES = _COLLECTS | {"rescued"}
_REBASES = frozenset(
    {"freed", "deleted", "rescued", "rebased", "own pack gone", "relied on what is gone"}
)


HOLDS = {
    "take": Scenario(
        _HALF_USED, {"T1": _NEW_AND_OLD, "C1": Collector(), "D": _DELETE}, 7, _RESCUES
    ),
    "two takes, two collectors, a delete": Scenario(
        _HALF_USED,
        {
            "T1": _NEW_AND_OLD,
            "T2": Take("ab", "t2"),
            "C1": Collector(),
            "C2": Collector(),
            "D": _DELETE,
        },
        8,
        _RESCUES,
    ),
    "lost answers": Scenario(
        _HALF_USED,
        {"T1": _NEW_AND_OLD, "C1": Collector(), "D": _DELETE, "D2": Delete("T1")},
        7,
        _RESCUES | {"found its own root"},
        lost_answers=True,
    ),
    "late puts": Scenario(
        _HALF_USED,
        {
            "T1": Take("ac", "t1", rebases=True),
            "C1": Collector(),
            "D": _DELETE,
        },
        7,
        _REBASES | {"found its own root", "put a number again"},
        late_puts=True,
    ),
    "rebase": Scenario(
        _HALF_USED,
        {
            "T1": Take("ac", "t1", rebases=True),
            "T2": Take("bc", "t2", rebases=True),
            "C1": Collector(),
            "D": _DELETE,
        },
        7,
        _REBASES,
    ),
    "rebase, two collectors": Scenario(
        _HALF_USED,
        {
            "T1": Take("ac", "t1", rebases=True),
            "C1": Collector(rounds=2),
            "C2": Collector(),
            "D": _DELETE,
        },
        8,
        _REBASES,
    ),
    "merge": Scenario(
        _DOUBLE,
        {
            "T1": Take("c", "t1", merges=True),
            "T2": Take("a", "t2", merges=True),
            "C1": Collector(),
            "D": _DELETE,
        },
        5,
        _RESCUES | {"merged"},
    ),
    "repack": Scenario(
        _HALF_USED,
        {
            "R1": Take(copies="P"),
            "T1": Take("b", "t1"),
            "C1": Collector(sparse=True),
            "C2": Collector(sparse=True),
        },
        7,
        _RESCUES,
    ),
    "a repack passes a take": Scenario(
        _HALF_USED,
        {
            "R1": Take(copies="P"),
            "T1": Take("ac", "t1", rebases=True),
            "C1": Collector(rounds=2, sparse=True),
            "D": _DELETE,
        },
        7,
        _REBASES | {"relied on a copy", "left a condemned pack"},
    ),
    "subtrees taken over": Scenario(
        _HALF_USED,
        {
            "R1": Take(copies="P"),
            "T1": Take("ac", "t1", inherits="old", rebases=True),
            "C1": Collector(sparse=True),
            "D": _DELETE,
        },
        7,
        _REBASES - {"rescued"},
    ),
    "thinning": Scenario(
        _BOTH,
        {
            "R1": Take(copies="P"),
            "T1": Take("ac", "t1", inherits="old", rebases=True),
            "C1": Collector(sparse=True),
            "D": Delete("old", keeps="b"),
            "V": Reader("old", "b"),
        },
        7,
        _REBASES - {"rescued"},
    ),
    "overwrite": Scenario(
        _EXACT,
        {
            "T1": Take("c", "old", overwrites=True),
            "T2": Take("a", "old", overwrites=True),
            "C1": Collector(),
            "C2": Collector(),
        },
        7,
        _RESCUES,
    ),
    "condemned and freed at once": Scenario(
        _HALF_USED,
        {
            "T1": Take("ac", "t1", rebases=True),
            "T2": Take("b", "t2"),
            "C1": Collector(at_once=True, rounds=2),
            "D": _DELETE,
        },
        7,
        _REBASES,
    ),
    "repacks, condemned and freed at once": Scenario(
        _HALF_USED,
        {
            "R1": Take(copies="P"),
            "T1": Take("ac", "t1"),
            "C1": Collector(at_once=True, sparse=True),
            "C2": Collector(at_once=True, sparse=True),
            "D": _DELETE,
        },
        6,
        _RESCUES,
    ),
    "takes that are seen": Scenario(
        _HALF_USED,
        {
            "T1": Take("ac", "t1", announces=True),
            "T2": Take("b", "t2", announces=True),
            "C1": Collector(),
            "D": _DELETE,
        },
        7,
        frozenset({"freed", "rescued"}),
    ),
    "a take that is seen and a repack": Scenario(
        _HALF_USED,
        {
            "R1": Take(copies="P"),
            "T1": Take("ac", "t1", announces=True),
            "C1": Collector(sparse=True),
            "C2": Collector(sparse=True),
            "D": _DELETE,
        },
        6,
        _COLLECTS,
    ),
    "a reader and two repacks": Scenario(
        _HALF_USED,
        {
            "R1": Take(copies="P"),
            "R2": Take(copies="R1"),
            "C1": Collector(rounds=2, sparse=True),
            "V": Reader("old", "a"),
        },
        7,
        _COLLECTS | {"looked a chunk up again"},
    ),
    "clients cache": Scenario(
        _HALF_USED,
        {"T1": _NEW_AND_OLD, "T2": Take("ab", "t2"), "C1": Collector(), "D": _DELETE},
        7,
        _RESCUES,
        caches=True,
    ),
    "clients cache, lost answers": Scenario(
        _HALF_USED,
        {"T1": Take("ac", "t1", rebases=True), "C1": Collector(), "D": _DELETE},
        6,
        _REBASES | {"found its own root", "put a number again"},
        lost_answers=True,
        caches=True,
    ),
    "clients cache, a reader and a repack": Scenario(
        _HALF_USED,
        {"R1": Take(copies="P"), "C1": Collector(rounds=2, sparse=True), "V": Reader("old", "a")},
        6,
        _COLLECTS | {"looked a chunk up again", "waited"},
        caches=True,
    ),
    "a take relies on a delta": Scenario(
        _DELTA,
        {"T1": Take("bc", "t1", rebases=True), "C1": Collector(rounds=2), "D": _DELETE},
        8,
        _REBASES,
    ),
    "deltas are sent": Scenario(
        _EXACT,
        {"T1": Take("b", "t1", stands="ba"), "C1": Collector(), "D": _DELETE},
        7,
        _RESCUES,
    ),
    "two recode": Scenario(
        _TWO,
        {
            "W1": Take(recodes=True, stands="ba"),
            "W2": Take(recodes=True, stands="ab"),
            "C1": Collector(sparse=True),
            "C2": Collector(sparse=True),
        },
        6,
        _RESCUES,
    ),
    "copies of a delta": Scenario(
        _CROSSED,
        {
            "R1": Take(copies="Q"),
            "C1": Collector(sparse=True, copier="R1"),
            "C2": Collector(sparse=True),
        },
        7,
        _COLLECTS,
    ),
}
"""Searched by every run of the tests."""

HOLDS_LONG = {
    "late puts, two deletes": Scenario(
        _HALF_USED,
        {
            "T1": Take("ac", "t1", rebases=True),
            "C1": Collector(),
            "D": _DELETE,
            "D2": Delete("T1"),
        },
        7,
        _REBASES | {"found its own root", "put a number again"},
        late_puts=True,
    ),
    "lost answers, two collectors": Scenario(
        _HALF_USED,
        {
            "T1": _NEW_AND_OLD,
            "C1": Collector(),
            "C2": Collector(),
            "D": _DELETE,
            "D2": Delete("T1"),
        },
        7,
        _RESCUES | {"found its own root"},
        lost_answers=True,
    ),
    "lost answers, two takes, two collectors": Scenario(
        _HALF_USED,
        {
            "T1": Take("ac", "t1", rebases=True),
            "T2": Take("b", "t2"),
            "C1": Collector(),
            "C2": Collector(),
            "D": _DELETE,
        },
        7,
        _REBASES | {"found its own root"},
        lost_answers=True,
    ),
    "late puts, two collectors": Scenario(
        _HALF_USED,
        {
            "T1": Take("ac", "t1", rebases=True),
            "C1": Collector(),
            "C2": Collector(),
            "D": _DELETE,
        },
        7,
        _REBASES | {"found its own root", "put a number again"},
        late_puts=True,
    ),
    "merges, rebases, two collectors": Scenario(
        _DOUBLE,
        {
            "T1": Take("ac", "t1", merges=True, rebases=True),
            "C1": Collector(sparse=True),
            "C2": Collector(),
            "D": _DELETE,
        },
        7,
        _REBASES | {"merged"},
    ),
    "repack, a take, a delete": Scenario(
        _HALF_USED,
        {
            "R1": Take(copies="P", rebases=True),
            "T1": Take("b", "t1"),
            "C1": Collector(sparse=True),
            "C2": Collector(sparse=True),
            "D": _DELETE,
        },
        7,
        _RESCUES | {"rebased", "own pack gone"},
    ),
    "chunks in two packs": Scenario(
        _DOUBLE,
        {
            "T1": Take("a", "t1"),
            "T2": Take("a", "t2"),
            "C1": Collector(sparse=True),
            "C2": Collector(sparse=True),
            "D": _DELETE,
        },
        6,
        _RESCUES,
    ),
    "overwrites and a rebase": Scenario(
        _EXACT,
        {
            "T1": Take("c", "old", overwrites=True),
            "T2": Take("a", "old", overwrites=True),
            "T3": Take("a", "t3", rebases=True),
            "C1": Collector(),
            "C2": Collector(),
        },
        8,
        _REBASES,
    ),
    "a reader, a take, a delete": Scenario(
        _HALF_USED,
        {
            "R1": Take(copies="P"),
            "T1": _NEW_AND_OLD,
            "C1": Collector(sparse=True),
            "V": Reader("old", "a"),
            "D": _DELETE,
        },
        7,
        _RESCUES | {"looked a chunk up again"},
    ),
    "deltas are sent, two takes, two collectors": Scenario(
        _EXACT,
        {
            "T1": Take("b", "t1", stands="ba", rebases=True),
            "T2": Take("b", "t2", stands="ba"),
            "C1": Collector(sparse=True),
            "C2": Collector(),
            "D": _DELETE,
        },
        6,
        _REBASES,
    ),
    "recode, a take, two collectors, a delete": Scenario(
        _TWO,
        {
            "W1": Take(recodes=True, stands="ba", rebases=True),
            "T1": Take("b", "t1"),
            "C1": Collector(sparse=True),
            "C2": Collector(sparse=True),
            "D": _DELETE,
        },
        6,
        _RESCUES | {"rebased", "own pack gone"},
    ),
    "recode, repack, a take, a delete": Scenario(
        _store({"P": "a", "Q": "ba/"}, {"old": "a", "new": "b"}),
        {
            "W1": Take(recodes=True, stands="ab"),
            "R1": Take(copies="Q"),
            "T1": Take("b", "t1", rebases=True),
            "C1": Collector(sparse=True, copier="R1"),
            "D": _DELETE,
        },
        6,
        _RESCUES | {"relied on a copy", "left a condemned pack"},
    ),
}
"""Searched by the long run alone."""

_ONE_REBASES = Scenario(
    _HALF_USED,
    {"T1": Take("ac", "t1", rebases=True), "C1": Collector(), "D": _DELETE},
)
_SHARES = Scenario(
    _HALF_USED, {"T1": Take("a", "t1", inherits="old"), "C1": Collector(), "D": _DELETE}
)
_THINS = Scenario(
    _store({"P": "a", "Q": "b"}, {"old": "ab"}),
    {"T1": Take("a", "t1", inherits="old"), "C1": Collector(), "D": Delete("old", keeps="b")},
)
_TWO_TAKES = Scenario(
    _HALF_USED,
    {"T1": Take("a", "t1"), "T2": Take("b", "t2"), "C1": Collector(), "D": _DELETE},
)
_ONE_MERGES = Scenario(_DOUBLE, {"T1": Take("c", "t1", merges=True), "C1": Collector()})
_ONE_MERGES_ONE_RELIES = Scenario(
    _DOUBLE,
    {"T1": Take("c", "t1", merges=True), "T2": Take("a", "t2"), "C1": Collector()},
)
_LATE = Scenario(
    _EXACT, {"T1": Take("c", "t1"), "C1": Collector(), "D2": Delete("T1")}, late_puts=True
)
_TRIPLE = Scenario(
    _store({"P": "a", "Q": "a", "S": "a"}, {"old": "a"}),
    {"C1": Collector(rounds=2, sparse=True), "V": Reader("old", "a")},
)
_MIRRORED = Scenario(_store({"P": "a", "Q": "ab"}, {"old": "b"}), _ONE_MERGES_ONE_RELIES.specs)

BREAKS: list[tuple[tuple[Rule, ...], Scenario, str]] = [
    ((Rule.FENCE_CHECK,), HOLDS["take"], "I1: root 3 needs c"),
    ((Rule.RESCUE,), HOLDS["take"], "I1: root 4 needs a"),
    ((Rule.WHOLE_PACK_RESCUE,), _TWO_TAKES, "I1: root 6 needs b"),
    ((Rule.RAISED_FENCE,), HOLDS["take"], "I1: root 3 needs c"),
    ((Rule.POSITIVE_LIVENESS,), _ONE_REBASES, "I1: root 5 needs a"),
    ((Rule.MERGE_KEEPS_FIRST,), _ONE_MERGES_ONE_RELIES, "I1: root 4 needs a"),
    ((Rule.MERGE_KEEPS_LAST,), _MIRRORED, "I1: root 4 needs a"),
    ((Rule.NUMBERS_KEPT,), HOLDS["take"], "I3: T1 believes in a commit"),
    ((Rule.PACKS_KEPT_IN_DOUBT,), HOLDS["lost answers"], "I1: root 2 needs c"),
    ((Rule.ORPHANS_BELOW_FENCE,), HOLDS["take"], "I1: root 3 needs c"),
    ((Rule.ROOT_BEFORE_DELETION,), HOLDS["take"], "I2: root 3 names P@0"),
    ((Rule.MERGE_OF_NAMED,), _ONE_MERGES, "I2: root 4 names Q@0"),
    ((Rule.MARK_AGAIN,), HOLDS["take"], "I1: root 4 needs a"),
    ((Rule.SUBTREE_STILL_THERE,), _SHARES, "I1: root 4 needs a"),
    ((Rule.SUBTREE_IS_THE_SAME,), _THINS, "I1: root 4 needs a"),
    ((Rule.REBASED_IDS,), _ONE_REBASES, "I1: root 3 needs c"),
    ((Rule.REBASE_CHECK,), _ONE_REBASES, "I1: root 5 needs a"),
    ((Rule.DOUBT_IS_NOT_FAILURE,), HOLDS["lost answers"], "I3: D2 believes that it deleted T1"),
    ((Rule.DOUBT_IS_NOT_SUCCESS,), HOLDS["lost answers"], "I3: D believes that it deleted old"),
    ((Rule.COPIES_IN_BASE,), HOLDS["repack"], "I1: root 4 needs a"),
    ((Rule.DEDUP_LIVE_ONLY,), HOLDS["take"], "I1: root 4 needs a"),
    ((Rule.PACK_BEFORE_ROOT,), HOLDS["take"], "I1: root 2 needs c"),
    ((Rule.SEGMENT_BEFORE_ROOT,), HOLDS["take"], "I2: root 2 names T1/segment1@1"),
    ((Rule.DOUBT_IS_SETTLED,), _LATE, "I3: D2 believes that it deleted T1"),
    ((Rule.READER_PERSISTS,), _TRIPLE, "V fails to read"),
    ((Rule.LATE_IS_WAITED_FOR,), HOLDS["clients cache"], "L2: "),
    ((Rule.TAKES_ARE_SEEN,), HOLDS["takes that are seen"], "L1: T2 is fenced"),
    ((Rule.BASES_ARE_NEEDED,), HOLDS["a take relies on a delta"], "I1: root 2 needs b"),
    ((Rule.BASES_RELIED_ON,), HOLDS["a take relies on a delta"], "I1: root 4 needs b"),
    ((Rule.NEW_BASES_AGAIN,), HOLDS["deltas are sent"], "I1: root 4 needs b"),
    ((Rule.CHAINS_END,), HOLDS["two recode"], "I1: root 5 needs a"),
    ((Rule.COPIES_HAVE_END,), HOLDS["copies of a delta"], "I1: root 4 needs b"),
    ((Rule.FENCE_ON_FREEING, Rule.POSITIVE_LIVENESS), HOLDS["take"], "I1: root 5 needs a"),
]
"""Rules that are dropped, the scenario that shows what they are for, and what fails first."""

IMPLIED: list[tuple[Rule, Scenario]] = [
    # The order of packs and segments among themselves: no process reads either before the root.
    (Rule.PACK_BEFORE_SEGMENT, HOLDS["take"]),
    # A take that never rebases is fenced by number before anything of its base is freed.
    (Rule.POSITIVE_LIVENESS, HOLDS["take"]),
    # The positive check finds what was freed; the fence is for what no root lists yet.
    (Rule.FENCE_ON_FREEING, HOLDS["rebase"]),
]
"""Rules that others make up for, in those scenarios."""
