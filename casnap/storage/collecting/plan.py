"""The plan of a collection, as data. A dry run reports it; any other run carries it out.

A plan is computed from a root, the needed contents of the root's packs, the files in the store, and
the takes under way. Making a plan writes nothing. ``docs/commit-protocol.md`` has the rules.
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
    """Which packs of a root a collection can condemn, and which condemned packs are needed again.

    Attributes:
        dead: Live packs that hold nothing that is needed.
        sparse: Live packs of which little is needed, each with the bytes of its needed part. A
            sparse pack can be condemned once this part was copied to another pack.
        rescued: Condemned packs that are needed.
        found: Digests that the root lists as lost, but that a pack holds again, or that no snapshot
            needs.
    """

    dead: frozenset[PackId] = frozenset()
    sparse: Mapping[PackId, int]
    rescued: frozenset[PackId] = frozenset()
    found: frozenset[bytes] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """How long a collection keeps condemned packs before it frees them.

    Attributes:
        grace: For how many seconds a condemned pack stays.
        condemned_until: The number of a root, or None. Packs that were condemned up to this root
            are freed, whatever the grace is.
        age_of: Returns the age in seconds of the root with a number. If the age is wrong, the
            collection still frees only garbage.
        announced_bases: Returns the numbers of the roots that the takes under way are based on. It
            is called only if something could be freed or deleted.
    """

    grace: float
    condemned_until: int | None = None
    age_of: Callable[[int], float] = lambda _: 0.0
    announced_bases: Callable[[], Iterable[int]] = tuple


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The changes that a collection is to make.

    Attributes:
        view: The index according to the newest root. The plan is for the root after the newest one,
            the next root.
        condemned: The packs that the next root newly condemns.
        copied: The condemned packs whose needed part is copied first, each with the bytes of this
            part.
        rescued: Condemned packs that are needed, so that the next root no longer condemns them.
        freed: Condemned packs that the next root no longer names.
        waiting: The packs that stay condemned in the next root, each with the number of the root
            that condemned it.
        fence: The fence of the next root.
        spared_from: The number of a root. Files that were written under this root or a later one
            are not deleted now: the fence has not passed them, or takes under way may move them.
        lost: The concatenated digests that the next root lists as lost.
        rewritten: Groups of segments, each of which is merged into one new segment without the
            freed packs.
        orphans: The files to delete that no root names: key → id.
        resets_time: Whether the time of the newest root lies in the future. Later packs would then
            never seem old, so a root with this host's time is put.
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
        """Whether the next root differs from the newest one, and so is put."""
        root = self.view.root
        fields = (self.fence, self.waiting, self.lost)
        return (
            bool(self.rewritten)
            or self.resets_time
            or fields != (root.fence, root.condemned, root.lost)
        )

    @property
    def deleted(self) -> dict[str, bytes]:
        """The files to delete once the next root is durable: key → id."""
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
        view: The index according to the newest root.
        needs: Which packs of this root are dead, sparse or needed.
        unnamed: The files that this root does not name: key → id.
        waiting: How long condemned packs stay.
        costs: The costs of requests at the store's place.
        rewriting: Segments that were already written for an earlier plan, whose root lost its
            number to another commit. They are used again if they fit.
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
    """Return the highest fence that the grace allows. Takes under way may require a lower one.

    Args:
        waiting: How long condemned packs stay.
        view: The index according to the newest root.
        unnamed: The ids of the files that this root does not name.
    """
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
    """Return what may be deleted under a fence.

    A condemned pack may be deleted if it was condemned at the fence or before. A pack or segment
    that no root names may be deleted if its writer was based on a root before the fence.

    Args:
        fence: The fence, as the number of a root.
        condemned: The condemned packs, each with the number of the root that condemned it.
        unnamed: The packs and segments that no root names: key of the file → id of the pack or
            segment. The id tells on which root the writer was based (:func:`base_of`).

    Returns:
        The condemned packs that may be deleted, and the part of ``unnamed`` that may be deleted.
    """
    freed = frozenset(PackId(pack) for pack, seq in condemned.items() if seq <= fence)
    return freed, {key: ident for key, ident in unnamed.items() if base_of(ident) < fence}
