"""The plan of a collection, as data: a dry run tells it, and any other run carries it out.

A plan is a function of facts: a root, the needed contents of its packs, the files of the store, and
the takes that are under way. Making it writes nothing. ``docs/commit-protocol.md`` has the rules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from casnap.backends.costs import LOCAL, Costs
from casnap.format.digest import split_digests
from casnap.format.records import PackId, SegmentId, pack_key, segment_key
from casnap.storage.collecting.stored_files import base_of
from casnap.storage.lookup.index import IndexView
from casnap.storage.writing.segments import Groups, Rewriting, segments_to_rewrite

DAY = 86400.0
_SKEW = 60.0


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The result of marking, for the packs of a root.

    Attributes:
        dead: Live packs that hold nothing that is needed.
        sparse: Live packs to condemn once their needed part was copied, each with the bytes of that
            part.
        rescued: Condemned packs that are needed.
        found: Digests that are no longer lost.
    """

    dead: frozenset[PackId] = frozenset()
    sparse: Mapping[PackId, int]
    rescued: frozenset[PackId] = frozenset()
    found: frozenset[bytes] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """How long a collection waits before it frees condemned packs.

    Attributes:
        grace: The seconds that they wait.
        condemned_until: If given, packs that were condemned up to the root of this number are freed
            instead.
        age_of: Returns the age of the root of a number in seconds. If it is wrong, the collection
            still frees only garbage.
        announced_bases: Returns the bases of the takes under way. It is called if anything could be
            freed or deleted.
    """

    grace: float
    condemned_until: int | None = None
    age_of: Callable[[int], float] = lambda _: 0.0
    announced_bases: Callable[[], Iterable[int]] = tuple


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The changes that a collection is to make.

    Attributes:
        view: The index as the newest root sees it; the plan is for the root after that.
        condemned: Packs that the next root condemns.
        copied: Packs among these whose needed part is copied first, each with the bytes of that
            part.
        rescued: Condemned packs that are needed, so the next root no longer condemns them.
        freed: Condemned packs that the next root no longer names.
        waiting: Packs that the next root condemns and does not free, each with the number of the
            root that condemned it.
        fence: The fence of the next root.
        spared_from: Files of this base or a later one are not deleted now: the fence has not passed
            them, or takes that are under way may move them.
        lost: Digests that the next root lists as lost.
        rewritten: Segments that are written anew, without the freed packs.
        orphans: Keys and ids of files that no root names, to be deleted.
        resets_time: Whether the newest root has a time in the future. After it nothing would ever
            seem old, so a root with the time of this host follows it.
    """

    view: IndexView
    condemned: frozenset[PackId]
    copied: Mapping[PackId, int]
    rescued: frozenset[PackId]
    freed: frozenset[PackId]
    waiting: Mapping[bytes, int]
    fence: int
    spared_from: int
    lost: bytes
    rewritten: Groups
    orphans: Mapping[str, bytes]
    resets_time: bool

    @property
    def changes_root(self) -> bool:
        """Whether the plan puts a root."""
        root = self.view.root
        fields = (self.fence, self.waiting, self.lost)
        return (
            bool(self.rewritten)
            or self.resets_time
            or fields != (root.fence, root.condemned, root.lost)
        )

    @property
    def deleted(self) -> dict[str, bytes]:
        """Keys and ids of the files to delete once the next root is durable."""
        old = {segment_key(ref.id): ref.id for group in self.rewritten for ref in group}
        unnamed = {**self.orphans, **{pack_key(pack): pack for pack in self.freed}, **old}
        return {key: i for key, i in unnamed.items() if base_of(i) < self.spared_from}

    @property
    def merged_segments(self) -> int:
        """How many segments fewer the next root has."""
        packs = self.view.segments
        new = sum(
            any(not packs[SegmentId(ref.id)] <= self.freed for ref in group)
            for group in self.rewritten
        )
        return sum(map(len, self.rewritten)) - new


def plan_collection(
    view: IndexView,
    needs: Needs,
    unnamed: Mapping[str, bytes],
    waiting: Waiting,
    costs: Costs = LOCAL,
    rewriting: Rewriting | None = None,
) -> Plan:
    """Return the plan of a collection.

    Args:
        view: The index as the newest root sees it.
        needs: Which of its packs are dead, sparse or needed.
        unnamed: Keys and ids of the files that the root does not name.
        waiting: How long condemned packs wait.
        costs: The costs of requests where the store is.
        rewriting: Segments that were written anew for a root whose number was taken.
    """
    root, next_seq = view.root, view.root.seq + 1
    doomed = needs.dead.union(needs.sparse)
    condemned = {
        # If a root has a time in the future, its packs count as condemned only now.
        pack: next_seq if waiting.age_of(seq) < -_SKEW else seq
        for pack, seq in root.condemned.items()
        if pack not in needs.rescued
    }
    condemned |= dict.fromkeys(doomed, next_seq)
    fence = max(root.fence, _fence_after(waiting, view, unnamed.values()))
    freed, orphans = _freed_by(fence, condemned, unnamed)
    bases: list[int] | None = None
    if freed or orphans:
        # The fence waits for takes that have announced on which root they are based.
        bases = list(waiting.announced_bases())
        fence = max(root.fence, min([fence, *bases]))
        freed, orphans = _freed_by(fence, condemned, unnamed)
    if not freed and all(base_of(ident) < root.fence for ident in orphans.values()):
        # Nothing is freed, and the fence has passed all orphans already: no root need raise it.
        fence = root.fence
    if rewriting is not None and rewriting.fits(root, freed):
        groups = rewriting.groups
    else:
        groups = segments_to_rewrite(view, freed, costs)
    if bases is None:
        bases = list(waiting.announced_bases()) if groups else []
    spared_from = min([fence, *bases])
    return Plan(
        view=view,
        condemned=doomed,
        copied=needs.sparse,
        rescued=needs.rescued & root.condemned.keys(),
        freed=freed,
        waiting={pack: seq for pack, seq in condemned.items() if pack not in freed},
        fence=fence,
        spared_from=spared_from,
        lost=b"".join(digest for digest in split_digests(root.lost) if digest not in needs.found),
        rewritten=groups,
        orphans={key: ident for key, ident in orphans.items() if base_of(ident) < spared_from},
        resets_time=waiting.age_of(root.seq) < -_SKEW,
    )


def _fence_after(waiting: Waiting, view: IndexView, unnamed: Iterable[bytes]) -> int:
    """Return the highest number that the grace lets the fence be raised to."""
    root = view.root
    if waiting.condemned_until is not None:
        return min(waiting.condemned_until, root.seq)
    if waiting.grace == 0:
        return root.seq + 1
    bases = {base_of(ident) + 1 for ident in unnamed}
    candidates = {root.seq, *root.condemned.values(), *bases}
    seqs = sorted(seq for seq in candidates if root.fence < seq <= root.seq)
    count = bisect_left(seqs, True, key=lambda seq: waiting.age_of(seq) < waiting.grace)
    return seqs[count - 1] if count else root.fence


def _freed_by(
    fence: int, condemned: Mapping[bytes, int], unnamed: Mapping[str, bytes]
) -> tuple[frozenset[PackId], dict[str, bytes]]:
    """Return the files that a fence at this number frees: condemned packs, and orphans by key."""
    freed = frozenset(PackId(pack) for pack, seq in condemned.items() if seq <= fence)
    return freed, {key: ident for key, ident in unnamed.items() if base_of(ident) < fence}
