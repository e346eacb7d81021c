"""The collector: marks, condemns, waits, frees under a fence, and only then deletes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.model.processes import DONE, Steps, Turn, Writer
from tests.model.records import Contents, Id, Process, Root, Segment, contents, united
from tests.model.rules import Rule


@dataclass(frozen=True)
class Collector(Writer):
    """Condemns and frees, ``rounds`` times at most.

    It may skip condemning and free what another collector condemned. The grace is arbitrary, so
    its fence is any number that is greater than the last one, up to its own root's; but none that
    is greater than what takes under way have announced.

    Args:
        at_once: Whether the root that condemns also frees what was condemned before; else that is
            another root.
        rounds: How often it goes through everything.
        sparse: Whether it also condemns, one at a time, packs whose needed chunks have another
            live place: what a repack copied, or two takes wrote.
        copier: The writer whose copies it made itself, so it does not look where their chains end.
    """

    at_once: bool = False
    rounds: int = 1
    sparse: bool = False
    copier: str = ""

    def steps(self, turn: Turn) -> Steps:
        match turn.me.at:
            case "start":
                return self._start(turn)
            case "again":
                return self._condemn_again(turn)
            case "fence":
                return self._fence(turn)
            case "segment":
                return self._before_putting(turn, self.write_segment(turn))
            case "put":
                return self._before_putting(turn, self.put(turn))
            case "doubt":
                return self.doubt(turn)
            case "sweep":
                return self._sweep(turn)
        return iter(())

    def retried(self, turn: Turn) -> Process:
        me = turn.me
        if me.chosen and me.then in ("fence", "both"):
            return Process("again", rounds=me.rounds, chosen=me.chosen, view=me.view)
        return Process(rounds=me.rounds)

    def stood(self, turn: Turn, root: Root) -> Process:
        if turn.me.then == "fence":
            return Process("fence", rounds=turn.me.rounds)
        if turn.drops(Rule.RAISED_FENCE):
            root = root._replace(fence=root.seq)
        freed = frozenset[Id]() if turn.me.then == "both" else turn.me.chosen
        return Process("sweep", rounds=turn.me.rounds, view=root, chosen=freed)

    def _start(self, turn: Turn) -> Steps:
        """Step 4: mark what the newest root needs; or go on to what others condemned."""
        k = turn.newest
        c = contents(k)
        needed = _needed(turn, c)
        garbage = frozenset(p for p in c.live if not set(c.digests[p]) & set(needed))
        for spared in self._sparse(turn, c, garbage, needed):
            if garbage | spared:
                keeps = spared if turn.drops(Rule.COPIES_IN_BASE) else garbage | spared
                yield from self._condemn(turn, k, k, garbage | spared, keeps)
        yield from self._fence(turn)

    def _sparse(
        self, turn: Turn, c: Contents, garbage: frozenset[Id], needed: str
    ) -> Iterator[frozenset[Id]]:
        yield frozenset()
        if self.sparse:
            for pack in sorted(c.live - garbage):
                held = [d for d in c.digests[pack] if d in needed]
                if all(self._proofs(turn, c, d, garbage | {pack}) for d in held):
                    yield frozenset([pack])

    def _proofs(self, turn: Turn, c: Contents, digest: str, going: frozenset[Id]) -> list[Id]:
        """Return the other live packs that count as places of a digest."""
        others = [p for p in c.places(digest) if p not in going]
        if turn.drops(Rule.CHAINS_END):
            return others
        alone = [p for p in others if not c.base(p, digest) or p.by == self.copier]
        newest = c.newest(digest)
        return alone + [p for p in others if p == newest and c.has_end(digest)]

    def _condemn(
        self, turn: Turn, marked: Root, k: Root, packs: frozenset[Id], keeps: frozenset[Id]
    ) -> Steps:
        """Step 5, drafted: the root alone changes; with step 6 of earlier packs, if at once."""
        at = k.seq + 1
        condemned = k.condemned | {(p, at) for p in packs}
        said = f"marks in root {k.seq}, would condemn {', '.join(map(str, sorted(packs)))}"
        me = Process("put", rounds=turn.me.rounds, chosen=keeps, view=marked)
        if not self.at_once:
            draft = k._replace(seq=at, condemned=condemned)
            yield turn.to(said, me._replace(draft=draft, then="fence"))
            return
        for fence, freed, draft, segment in self._fences(turn, k._replace(condemned=condemned)):
            what = f" and free {', '.join(map(str, sorted(freed)))}" if freed else ""
            step = "segment" if segment else "put"
            drafted = me._replace(at=step, draft=draft, segment=segment, then="both")
            yield turn.to(f"{said}, raise the fence to {fence}{what}", drafted)

    def _condemn_again(self, turn: Turn) -> Steps:
        """After a lost number: condemn what was marked, save what the newer root needs."""
        k, m = turn.me.view, turn.newest
        assert k is not None
        c = contents(m)
        packs = turn.me.chosen & c.live
        if turn.drops(Rule.COPIES_IN_BASE):
            packs |= {p for p in c.live if not set(c.digests[p]) & set(c.needed)}
        elif not turn.drops(Rule.MARK_AGAIN):
            packs = self._still_going(turn, contents(k), c, packs)
        if packs:
            yield from self._condemn(turn, k, m, packs, turn.me.chosen)
        yield from self._fence(turn)

    def _still_going(
        self, turn: Turn, marked: Contents, c: Contents, packs: frozenset[Id]
    ) -> frozenset[Id]:
        """Return the packs that the newer root does not need either, or of which it has copies."""
        before = _needed(turn, marked)
        new_bases = [
            b for p, held in c.bases.items() if p not in marked.digests for b in held.values()
        ]
        if turn.drops(Rule.NEW_BASES_AGAIN):
            new_bases = []
        needed = united(before, marked.with_bases(united(c.needed, *new_bases), readable=False))
        going = packs
        for pack in sorted(packs):
            for digest in c.digests[pack]:
                if digest not in needed:
                    continue
                proofs = self._proofs(turn, marked, digest, packs) if digest in before else []
                if not set(proofs) & c.live:
                    going -= {pack}
        return going

    def _fences(
        self, turn: Turn, m: Root
    ) -> Iterator[tuple[int, frozenset[Id], Root, Segment | None]]:
        """Yield each fence that may be raised, what that frees, the root, and its new segment."""
        highest = m.seq + 1
        if not turn.drops(Rule.TAKES_ARE_SEEN):
            seen = [p.announced for p in turn.state.processes if p.announced]
            highest = min([highest, *seen])
        for fence in range(m.fence + 1, highest + 1):
            freed = frozenset(p for p, at in m.condemned if at <= fence)
            yield fence, freed, *_without(turn, m, freed, fence)

    def _fence(self, turn: Turn) -> Steps:
        """Step 6, drafted: what was condemned at the fence or before is listed no more."""
        m = turn.newest
        for fence, freed, draft, segment in self._fences(turn, m):
            said = f"reads root {m.seq}, would raise the fence to {fence}"
            if freed:
                said += f" and free {', '.join(map(str, sorted(freed)))}"
            at = "segment" if segment else "put"
            rounds = turn.me.rounds
            me = Process(at, draft=draft, segment=segment, then="sweep", rounds=rounds)
            if turn.drops(Rule.FENCE_ON_FREEING):
                me = me._replace(chosen=freed)
            yield turn.to(said, me)

    def _before_putting(self, turn: Turn, steps: Steps) -> Steps:
        yield from steps
        draft = turn.me.draft
        if turn.drops(Rule.ROOT_BEFORE_DELETION) and turn.me.then != "fence" and draft:
            yield from _deletions(turn, draft)

    def _sweep(self, turn: Turn) -> Steps:
        """Step 7: delete, one by one, what the own root does not name and is older than its fence.

        The search has more here than a collector does, which lists files once: this one may find a
        file that was written later, any time.
        """
        me, newest = turn.me, turn.state.newest
        assert me.view is not None
        yield from _deletions(turn, me.view)
        if me.rounds + 1 < self.rounds:
            yield turn.to("begins again", Process(rounds=me.rounds + 1))
        if turn.drops(Rule.NUMBERS_KEPT):
            numbers = turn.state.reusable | frozenset(range(1, newest.seq))
            yield turn.to(f"removes the roots before {newest.seq}", DONE, reusable=numbers)


def _needed(turn: Turn, c: Contents) -> str:
    """Return what snapshots need, and the bases of all deltas of that."""
    if turn.drops(Rule.BASES_ARE_NEEDED):
        return c.needed
    return c.with_bases(c.needed)


def _without(turn: Turn, m: Root, freed: frozenset[Id], fence: int) -> tuple[Root, Segment | None]:
    """Return the root after m that lists the freed packs no more, and the segment it needs."""
    parts = {p: held for p, at, held in m.rescued if at <= fence}
    touched = {s for s in m.segments if any(e.pack in freed or e.pack in parts for e in s.entries)}
    kept = frozenset(
        e._replace(digests=parts.get(e.pack, e.digests))
        for s in touched
        for e in s.entries
        if e.pack not in freed
    )
    segment = Segment(Id(m.seq, turn.name, m.seq), kept) if kept else None
    if freed:
        turn.model.happened.add("freed")
    unfenced = turn.drops(Rule.RAISED_FENCE) or turn.drops(Rule.FENCE_ON_FREEING)
    root = m._replace(
        seq=m.seq + 1,
        fence=m.fence if unfenced else fence,
        segments=(m.segments - touched) | ({segment} if segment else frozenset()),
        condemned=frozenset((p, at) for p, at in m.condemned if p not in freed),
        rescued=frozenset((p, at, held) for p, at, held in m.rescued if at > fence),
    )
    return root, segment


def _deletions(turn: Turn, root: Root) -> Steps:
    named = contents(root).files
    anything = turn.drops(Rule.ORPHANS_BELOW_FENCE)
    # In order: which of two shortest traces is found may not hang on how strings are hashed.
    for file in sorted(turn.state.files - named):
        if anything or file.base < root.fence or file in turn.me.chosen:
            turn.model.happened.add("deleted")
            said = f"deletes {file}, which root {root.seq} does not name"
            yield turn.to(said, turn.me, files=turn.state.files - {file})
