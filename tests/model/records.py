"""What a state of the model is made of: immutable, comparable, and small.

Names are histories, not random: a pack is called by the root that it was written under (its
*base*), by its writer and by a number, so two runs that did the same have the same state.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple


class Id(NamedTuple):
    """The name of a pack (``n`` is 0) or a segment (``n`` is the root that it was drafted on)."""

    base: int
    by: str
    n: int = 0

    def __str__(self) -> str:
        return f"{self.by}{f'/segment{self.n}' if self.n else ''}@{self.base}"


Deltas = frozenset[tuple[str, str]]
"""Digests, each with its base."""


class Entry(NamedTuple):
    """What a segment says of one pack; a set of digests is a sorted string, a letter each."""

    pack: Id
    digests: str
    deltas: Deltas = frozenset()
    """Those that are stored as deltas, each with its base."""

    def __str__(self) -> str:
        deltas = "".join(f", {d} on {base}" for d, base in sorted(self.deltas))
        return f"{self.pack}={self.digests}{deltas}"


class Segment(NamedTuple):
    id: Id
    entries: frozenset[Entry]


class Snapshot(NamedTuple):
    """A row of the table. The commit id of a take is the take's name."""

    name: str
    commit: str
    needs: str


class Root(NamedTuple):
    seq: int
    snapshots: frozenset[Snapshot]
    segments: frozenset[Segment]
    condemned: frozenset[tuple[Id, int]] = frozenset()
    fence: int = 0
    rescued: frozenset[tuple[Id, int, str]] = frozenset()
    """Used only where whole packs are not rescued: pack, when it was condemned, what stays."""

    def __str__(self) -> str:
        return _told(self)


@lru_cache(maxsize=1 << 18)
def _told(root: Root) -> str:
    snapshots = sorted(f"{s.name}={s.needs}" for s in root.snapshots)
    listed = sorted(str(entry) for segment in root.segments for entry in segment.entries)
    told = f"root {root.seq}: snapshots {', '.join(snapshots) or '-'}"
    told += f"; listed {', '.join(listed) or '-'}"
    if root.condemned:
        told += "; condemned " + ", ".join(sorted(f"{p} at {at}" for p, at in root.condemned))
    return told + (f"; fence {root.fence}" if root.fence else "")


class Contents(NamedTuple):
    """What a root says, looked up in all ways that the steps need."""

    digests: dict[Id, str]
    """Of each listed pack, what is listed of it."""
    condemned: dict[Id, int]
    live: frozenset[Id]
    files: frozenset[Id]
    """Packs and segments that have to exist."""
    needed: str
    """What snapshots need."""
    bases: dict[Id, dict[str, str]]
    """Of each listed pack that holds deltas, the base of each."""

    def base(self, pack: Id, digest: str) -> str:
        """Return the base of a digest in a pack; nothing if it is no delta there."""
        return self.bases.get(pack, {}).get(digest, "")

    def readable(self, packs: Collection[Id]) -> str:
        """Return the digests that can be read from some packs, and from no others."""
        found, before = "", None
        while found != before:
            before = found
            found = united(
                *(
                    d
                    for pack in packs
                    for d in self.digests.get(pack, "")
                    if (base := self.base(pack, d)) == "" or base in found
                )
            )
        return found

    def with_bases(self, digests: str, *, readable: bool = True) -> str:
        """Return some digests with the bases of all their listed deltas, if these can be read."""
        if not self.bases:
            return digests
        there = self.readable(self.digests)
        needed, before = digests, None
        while needed != before:
            before = needed
            below = [b for held in self.bases.values() for d, b in held.items() if d in needed]
            needed = united(needed, *(b for b in below if b in there or not readable))
        return needed

    def newest(self, digest: str) -> Id | None:
        """Return the newest live pack that holds a digest."""
        return max(self.places(digest), default=None)

    def has_end(self, digest: str, without: str = "") -> bool:
        """Whether the chain of a digest ends, each link at its newest place."""
        seen = without
        while digest not in seen:
            seen += digest
            pack = self.newest(digest)
            if pack is None:
                return False
            base = self.base(pack, digest)
            if not base:
                return True
            digest = base
        return False

    def places(self, digest: str, *, condemned: bool = False) -> list[Id]:
        """Return the live packs that hold a digest, or also the condemned ones."""
        return sorted(
            pack
            for pack, digests in self.digests.items()
            if digest in digests and (condemned or pack in self.live)
        )


@lru_cache(maxsize=1 << 18)
def contents(root: Root) -> Contents:
    digests: dict[Id, str] = {}
    bases: dict[Id, dict[str, str]] = {}
    for segment in root.segments:
        for pack, held, deltas in segment.entries:
            digests[pack] = united(digests.get(pack, ""), held)
            if deltas:
                bases[pack] = bases.get(pack, {}) | dict(deltas)
    condemned = dict(root.condemned)
    files = frozenset(digests) | {segment.id for segment in root.segments}
    needed = united(*(s.needs for s in root.snapshots))
    live = frozenset(digests).difference(condemned)
    return Contents(digests, condemned, live, files, needed, bases)


def united(*digests: str) -> str:
    return "".join(sorted(set("".join(digests))))


class Process(NamedTuple):
    """What a process remembers; ``at`` names its next step. What it is doing is in its `Spec`."""

    at: str = "start"
    base: int = 0
    own: Entry | None = None
    """The pack of its own: all chunks that it found in no live pack."""
    relied: frozenset[tuple[Id, str]] = frozenset()
    """Pack and digest of what it need not write."""
    inherited: str = ""
    """Whether it took over subtrees of a snapshot without looking at them."""
    view: Root | None = None
    """The root that it goes by: in a rebase, while sweeping, or when it marked or looked up."""
    draft: Root | None = None
    """The root that it is about to put, or has put without hearing what came of it."""
    segment: Segment | None = None
    """The segment that the draft lists and that is not written yet."""
    replaced: frozenset[Segment] = frozenset()
    """The segments that a merge put into that one."""
    chosen: frozenset[Id] = frozenset()
    """The packs that a collector means to condemn."""
    place: Id | None = None
    """Where a reader means to read."""
    tried: frozenset[Id] = frozenset()
    """Where it found nothing."""
    then: str = ""
    """Its next step if the root that it puts stands."""
    rounds: int = 0
    announced: int = 0
    """The root that it has announced, so that collectors see it; 0 for none."""

    seen: int = 0
    """No root before this one is shown to it any more, where clients cache."""

    def files(self) -> set[Id]:
        """Return the files that may yet matter because this process knows them."""
        found: set[Id] = set()
        if self.own:
            found.add(self.own.pack)
        if self.segment:
            found.add(self.segment.id)
            found.update(entry.pack for entry in self.segment.entries)
        if self.draft:
            found |= contents(self.draft).files
        if self.place:
            found.add(self.place)
        return found


class State(NamedTuple):
    newest: Root
    files: frozenset[Id]
    """The packs and segments that exist, as far as they may still matter."""
    processes: tuple[Process, ...]
    removed: frozenset[str] = frozenset()
    """Commits whose snapshots were in a root and were deleted or overwritten since: a ghost."""
    stands: frozenset[tuple[str, Root]] = frozenset()
    """Roots that were put by processes who did not hear of it yet."""
    pending: frozenset[tuple[str, Root]] = frozenset()
    """Puts that are under way although their processes wait no longer."""
    past: tuple[Root, ...] = ()
    """Older roots that a client may still show instead of the newest one, where clients cache."""
    reusable: frozenset[int] = frozenset()
    """Numbers of roots that were removed, in scenarios that try this."""
