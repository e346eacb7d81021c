"""What each kind of process does, step by step; a step looks at or changes the store once.

There is no step for a crash: a process that is never scheduled again has crashed, or stalls for
ever, and the search visits those states too. Nor is there one for starting again after `fenced`:
that is a take that starts later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from tests.model.records import (
    Contents,
    Deltas,
    Entry,
    Id,
    Process,
    Root,
    Segment,
    Snapshot,
    State,
    contents,
    united,
)
from tests.model.rules import Rule

if TYPE_CHECKING:
    from tests.model.protocol import CommitModel

Steps = Iterator[tuple[str, State]]

Plan = tuple[frozenset[tuple[Id, str]], str, Deltas]
"""What a take relies on, what it writes, and which of that as deltas."""

FENCED = Process("fenced")
DONE = Process("done")
REFUSED = Process("refused")
FAILED = Process("failed")
ENDS = {process.at for process in (FENCED, DONE, REFUSED, FAILED)}


class Turn:
    """One process in one state, about to do something."""

    __slots__ = ("_shown", "index", "me", "model", "name", "seen", "state")

    def __init__(
        self, model: CommitModel, state: State, index: int, name: str, shown: Root | None = None
    ) -> None:
        self.model = model
        self.state = state
        self.index = index
        self.name = name
        self.me: Process = state.processes[index]
        self.seen = self.me.seen
        self._shown = shown or state.newest

    @property
    def newest(self) -> Root:
        """The newest root, as a look shows it: a client that caches may show an older one."""
        self.saw(self._shown)
        return self._shown

    def saw(self, root: Root) -> None:
        """Note that no older root than this one is shown any more."""
        if self.model.caches:
            self.seen = max(self.seen, root.seq)

    def drops(self, rule: Rule) -> bool:
        return rule in self.model.dropped

    def to(self, said: str, me: Process, **changes: Any) -> tuple[str, State]:
        """Return the state in which this process is ``me`` and the store has changed."""
        before, after = self.state.processes[: self.index], self.state.processes[self.index + 1 :]
        me = me._replace(seen=0 if me.at in ENDS else self.seen)
        state = self.state._replace(processes=(*before, me, *after), **changes)
        return f"{self.name} {said}", self.model.settled(state)


# --- putting a root -----------------------------------------------------------------------------


class Writer:
    """A process that puts roots: `put` and `doubt` are the same for all."""

    def retried(self, turn: Turn) -> Process:
        """Return the process as it goes on when its number was lost."""
        raise NotImplementedError

    def stood(self, turn: Turn, root: Root) -> Process:
        """Return the process as it goes on when its root stands."""
        raise NotImplementedError

    def write_segment(self, turn: Turn) -> Steps:
        segment = turn.me.segment
        assert segment is not None
        yield turn.to(
            f"writes segment {segment.id}",
            turn.me._replace(at=self.after_segment(turn)),
            files=turn.state.files | {segment.id},
        )

    def after_segment(self, turn: Turn) -> str:
        """Return the step that follows."""
        return "put"

    def put(self, turn: Turn) -> Steps:
        state, draft = turn.state, turn.me.draft
        assert draft is not None
        won = self.stood(turn, draft)
        if draft.seq in state.reusable:
            rest = state.reusable - {draft.seq}
            yield turn.to(f"puts root {draft.seq} a second time", won, reusable=rest)
        elif draft.seq <= state.newest.seq:
            yield from self._lost_number(turn, draft)
        else:
            landed = turn.model.landed(state, draft)
            unheard = turn.me._replace(at="doubt")
            mine = state.stands | {(turn.name, draft)}
            before = turn.seen
            turn.saw(draft)
            yield turn.to(f"puts {draft}", won, **landed)
            turn.seen = before
            if turn.model.lost_answers:
                said = f"puts {draft}; the answer is lost"
                yield turn.to(said, unheard, stands=mine, **landed)
            if turn.model.late_puts and not state.pending:
                sent = state.pending | {(turn.name, draft)}
                said = f"sends root {draft.seq}, which is not there yet when it stops waiting"
                yield turn.to(said, unheard, pending=sent)

    def _lost_number(self, turn: Turn, draft: Root) -> Steps:
        for mine in turn.state.stands:
            if mine[0] == turn.name and mine[1].seq == draft.seq:
                yield self._finds_its_own(turn, mine)
                return
        # The put is decided by all that stands. A look may not show yet what has the number.
        if turn.drops(Rule.LATE_IS_WAITED_FOR) and turn.newest.seq < draft.seq:
            yield turn.to(f"finds number {draft.seq} taken, and no root", FAILED)
            return
        turn.saw(draft)
        yield turn.to(f"loses number {draft.seq}", self.retried(turn))
        if turn.drops(Rule.DOUBT_IS_NOT_SUCCESS):
            said = f"loses number {draft.seq}, but does not hear of it"
            yield turn.to(said, turn.me._replace(at="doubt"))

    def _finds_its_own(self, turn: Turn, mine: tuple[str, Root]) -> tuple[str, State]:
        turn.model.happened.add("found its own root")
        won = self.stood(turn, mine[1])
        said = f"finds its own root under number {mine[1].seq}"
        return turn.to(said, won, stands=turn.state.stands - {mine})

    def doubt(self, turn: Turn) -> Steps:
        """Read the number that the unclear put was for: what stands there decides."""
        state, draft = turn.state, turn.me.draft
        assert draft is not None
        shown = turn.newest
        mine = next((s for s in state.stands if s[0] == turn.name and s[1].seq == draft.seq), None)
        if turn.drops(Rule.PACKS_KEPT_IN_DOUBT) and turn.me.own:
            files = state.files - {turn.me.own.pack}
            yield turn.to("gives up and deletes its pack", FAILED, files=files)
        elif turn.drops(Rule.DOUBT_IS_NOT_SUCCESS):
            yield turn.to("takes that for success", self.stood(turn, draft))
        elif mine and draft.seq <= shown.seq and not turn.drops(Rule.DOUBT_IS_NOT_FAILURE):
            yield self._finds_its_own(turn, mine)
        elif draft.seq > shown.seq and not turn.drops(Rule.DOUBT_IS_SETTLED):
            turn.model.happened.add("put a number again")
            yield turn.to(f"finds number {draft.seq} free", turn.me._replace(at="put"))
        else:
            said = f"goes on as if number {draft.seq} were not its own"
            yield turn.to(said, self.retried(turn), stands=state.stands - {mine or ("", draft)})


# --- takes, deletes, readers ----------------------------------------------------------------------


@dataclass(frozen=True)
class Take(Writer):
    """Commits a snapshot of the digests ``needs`` under ``name``.

    With ``copies`` it is the first half of a repack instead: it copies what is needed of a pack of
    that writer into one of its own and publishes that, under the rules of a take.
    """

    needs: str = ""
    name: str = ""
    overwrites: bool = False
    merges: bool = False
    rebases: bool = False
    copies: str = ""
    announces: bool = False
    stands: str = ""
    """A digest that it writes as a delta, and its base, if it finds that."""
    recodes: bool = False
    """Whether it only stores that digest once more, as a delta, and commits no snapshot."""
    inherits: str = ""
    """The commit whose snapshot it shares subtrees with, of which it looks nothing up."""

    def steps(self, turn: Turn) -> Steps:
        match turn.me.at:
            case "start" if self.announces and not turn.me.announced:
                return self._announce(turn)
            case "start":
                return self._base(turn)
            case "pack":
                return self._write_pack(turn)
            case "read":
                return self._read(turn)
            case "link":
                return self._link(turn)
            case "segment":
                return self.write_segment(turn)
            case "put":
                return self.put(turn)
            case "doubt":
                return self.doubt(turn)
        return iter(())

    def retried(self, turn: Turn) -> Process:
        if turn.drops(Rule.MERGE_OF_NAMED) and turn.me.replaced:
            return turn.me._replace(at="read", draft=None, view=None)
        empty: frozenset[Segment] = frozenset()
        return turn.me._replace(at="read", draft=None, view=None, segment=None, replaced=empty)

    def stood(self, turn: Turn, root: Root) -> Process:
        return DONE

    def _announce(self, turn: Turn) -> Steps:
        """Have collectors see the take; one that is about to raise the fence has not seen it."""
        if all(p.then != "sweep" for p in turn.state.processes):
            n = turn.newest.seq
            yield turn.to(f"announces itself under root {n}", turn.me._replace(announced=n))

    def _base(self, turn: Turn) -> Steps:
        """Step 1: read the newest root; rely on what is live in it, and plan to write the rest."""
        n = turn.newest
        source = self._source(contents(n))
        for relied, fresh, deltas in self._plans(turn, contents(n), source):
            own = Entry(Id(n.seq, turn.name), fresh, deltas) if fresh else None
            at = "pack" if own and not turn.drops(Rule.PACK_BEFORE_ROOT) else "read"
            if turn.drops(Rule.PACK_BEFORE_SEGMENT):
                at = "read"
            written = str(own).partition("=")[2]
            used = ", ".join(f"{d} in {p}" for p, d in sorted(relied)) or "nothing"
            inherited = next((s.needs for s in n.snapshots if s.commit == self.inherits), "")
            if inherited:
                used += f" and on {self.inherits}"
            yield turn.to(
                f"bases itself on root {n.seq}, relies on {used}, "
                f"will write {written or 'nothing'}",
                turn.me._replace(
                    at=at, base=n.seq, own=own, relied=relied, inherited=inherited, place=source
                ),
            )

    def _source(self, c: Contents) -> Id | None:
        return next((p for p in sorted(c.live) if p.by == self.copies), None)

    def _plans(self, turn: Turn, c: Contents, source: Id | None) -> Iterator[Plan]:
        if self.copies:
            yield from self._copies(turn, c, source)
            return
        if self.recodes:
            yield from self._recoded(turn, c)
            return
        shared = next((s.needs for s in turn.newest.snapshots if s.commit == self.inherits), "")
        sought = [d for d in self.needs if d not in shared]
        too = turn.drops(Rule.DEDUP_LIVE_ONLY)
        found = {d: chains for d in sought if (chains := _chains(turn, c, d, condemned=too))}
        fresh = "".join(d for d in sought if d not in found)
        for choice in product(*found.values()):
            relied = frozenset((p, d) for chain in choice for p, d in chain if p in c.live)
            if not self.stands or self.stands[0] not in fresh:
                yield relied, fresh, frozenset()
                continue
            digest, base = self.stands
            for pairs in self._relied(turn, c, base):
                yield relied | pairs, fresh, frozenset([(digest, base)] if pairs else [])

    def _copies(self, turn: Turn, c: Contents, source: Id | None) -> Iterator[Plan]:
        """Copy what is needed of a pack, in the form that a reader finds."""
        needed = c.with_bases(c.needed)
        kept = "".join(d for d in c.digests[source] if d in needed) if source else ""
        forms = [[(d, base) for base in _forms_of_copy(turn, c, d)] for d in kept]
        for chosen in product(*forms):
            for pairs in self._relied(turn, c, "".join(base for _, base in chosen)):
                if kept:
                    yield pairs, kept, frozenset((d, base) for d, base in chosen if base)

    def _recoded(self, turn: Turn, c: Contents) -> Iterator[Plan]:
        """Store a needed digest once more, unless it is a delta anywhere."""
        digest, base = self.stands
        places = c.places(digest, condemned=True)
        if places and digest in c.needed and not any(c.base(p, digest) for p in places):
            for pairs in self._relied(turn, c, base):
                if pairs:
                    yield pairs, digest, frozenset([(digest, base)])

    def _relied(self, turn: Turn, c: Contents, digests: str) -> Iterator[frozenset[tuple[Id, str]]]:
        """Yield what it may rely on for some digests; nothing of what is nowhere."""
        chains = [_chains(turn, c, d) or [frozenset()] for d in digests]
        for chosen in product(*chains):
            yield frozenset[tuple[Id, str]]().union(*chosen)

    def _write_pack(self, turn: Turn) -> Steps:
        """Step 2: write what is new."""
        own = turn.me.own
        assert own is not None
        source = turn.me.place
        if source and source not in turn.state.files:
            yield turn.to(f"finds {source} deleted", FENCED)
            return
        late = turn.me.draft is not None
        me = turn.me._replace(at="put" if late else "read", place=None)
        yield turn.to(f"writes pack {own}", me, files=turn.state.files | {own.pack})

    def _read(self, turn: Turn) -> Steps:
        """Step 3: read the newest root, and find out whether a draft may follow it."""
        m, me = turn.newest, turn.me
        taken = any(s.name == self.name and s.commit != turn.name for s in m.snapshots)
        if taken and not self.overwrites:
            yield turn.to(f"finds its name in root {m.seq}", REFUSED)
            return
        if m.fence <= me.base or turn.drops(Rule.FENCE_CHECK):
            yield from self._draft(turn, m, me, f"reads root {m.seq}", {})
        elif not self.rebases:
            turn.model.happened.add("fenced")
            yield turn.to(f"reads root {m.seq} and is fenced: based on {me.base}", FENCED)
        elif me.own and not turn.drops(Rule.REBASED_IDS):
            said = f"reads root {m.seq} and rebases on it"
            yield turn.to(said, me._replace(at="link", view=m))
        else:
            said = f"rebases on root {m.seq}, keeping what it has"
            yield from self._draft(turn, m, me._replace(base=m.seq), said, {}, rebased=True)

    def _link(self, turn: Turn) -> Steps:
        """Rebase: link the own pack to an id under the root that was read."""
        me, m = turn.me, turn.me.view
        assert m is not None
        assert me.own is not None
        if me.own.pack not in turn.state.files:
            turn.model.happened.add("own pack gone")
            yield turn.to(f"finds its own {me.own.pack} deleted and is fenced", FENCED)
            return
        turn.model.happened.add("rebased")
        own = me.own._replace(pack=Id(m.seq, turn.name))
        files = {"files": turn.state.files | {own.pack}}
        said = f"links {me.own.pack} to {own.pack}"
        based = me._replace(base=m.seq, own=own, view=None)
        yield from self._draft(turn, m, based, said, files, rebased=True)

    def _draft(
        self,
        turn: Turn,
        m: Root,
        me: Process,
        said: str,
        changes: dict[str, Any],
        *,
        rebased: bool = False,
    ) -> Steps:
        """Draft root m + 1, unless something that was relied on is neither live nor condemned."""
        copied = self._relying_on_copies(turn, m, me) if self.rebases else []
        if copied:
            turn.model.happened.add("relied on a copy")
            if any(p in contents(m).condemned for p, _ in me.relied - copied[0].relied):
                turn.model.happened.add("left a condemned pack")
            for other in copied:
                yield from self._draft(turn, m, other, f"{said}, finds copies", changes)
            return
        gone = self._gone(turn, m, me, rebased=rebased)
        if gone:
            turn.model.happened.add("relied on what is gone")
            yield turn.to(f"{said}, finds {gone} gone and is fenced", FENCED, **changes)
            return
        edited = m._replace(seq=m.seq + 1, snapshots=self._snapshots(turn, m))
        edited = self._rescue(turn, edited, me)
        for segment, replaced in self._segments(turn, m, me):
            at, segments = "put", m.segments
            if segment:
                segments = (m.segments - replaced) | {segment}
                at = "segment"
            if segment and turn.drops(Rule.SEGMENT_BEFORE_ROOT):
                at = "put"
            if segment == me.segment is not None:
                at = "put"
            merge = ", merges all segments" if replaced else ""
            drafted = me._replace(
                at=at, draft=edited._replace(segments=segments), segment=segment, replaced=replaced
            )
            yield turn.to(f"{said}, drafts root {m.seq + 1}{merge}", drafted, **changes)

    def _gone(self, turn: Turn, m: Root, me: Process, *, rebased: bool) -> str:
        """Return what the take relied on and root m has no more."""
        now = next((s.needs for s in m.snapshots if s.commit == self.inherits), "")
        if me.inherited and not now:
            return "" if turn.drops(Rule.SUBTREE_STILL_THERE) else self.inherits
        if me.inherited not in ("", now) and not turn.drops(Rule.SUBTREE_IS_THE_SAME):
            return f"what {self.inherits} was"
        if turn.drops(Rule.POSITIVE_LIVENESS) or (rebased and turn.drops(Rule.REBASE_CHECK)):
            return ""
        listed = contents(m).digests
        return next((str(p) for p, _ in sorted(me.relied) if p not in listed), "")

    def _relying_on_copies(self, turn: Turn, m: Root, me: Process) -> list[Process]:
        """Return the process as it relies on live places of what was in packs that are not live.

        A condemned pack of which something is in no live one is rescued instead.
        """
        c = contents(m)
        rescued = {p for p, d in me.relied if p in c.digests and not _chains(turn, c, d)}
        left = {(p, d) for p, d in me.relied if p not in c.live | rescued}
        choices = [_chains(turn, c, d) for _, d in sorted(left)]
        if not left or not all(choices):
            return []
        return [
            me._replace(relied=(me.relied - left).union(*chosen)) for chosen in product(*choices)
        ]

    def after_segment(self, turn: Turn) -> str:
        own = turn.me.own
        missing = own is not None and own.pack not in turn.state.files
        return "pack" if missing and turn.drops(Rule.PACK_BEFORE_SEGMENT) else "put"

    def _snapshots(self, turn: Turn, m: Root) -> frozenset[Snapshot]:
        if self.copies or self.recodes:
            return m.snapshots
        others = {s for s in m.snapshots if s.name != self.name}
        return frozenset(others | {Snapshot(self.name, turn.name, self.needs)})

    def _rescue(self, turn: Turn, root: Root, me: Process) -> Root:
        packs = {p for p, _ in me.relied}
        rescued = {(p, at) for p, at in root.condemned if p in packs}
        if not rescued or turn.drops(Rule.RESCUE):
            return root
        turn.model.happened.add("rescued")
        parts = root.rescued
        if turn.drops(Rule.WHOLE_PACK_RESCUE):
            held = {p: united(*(d for q, d in me.relied if q == p)) for p in packs}
            parts = parts | {(p, at, held[p]) for p, at in rescued}
        return root._replace(condemned=root.condemned - rescued, rescued=parts)

    def _segments(
        self, turn: Turn, m: Root, me: Process
    ) -> Iterator[tuple[Segment | None, frozenset[Segment]]]:
        """Return what to list: a segment of the own pack, or one of all that is listed, or none."""
        if me.segment and turn.drops(Rule.MERGE_OF_NAMED):
            yield me.segment, me.replaced
            return
        ident = Id(me.base, turn.name, m.seq)
        own = frozenset([me.own]) if me.own else frozenset()
        yield (Segment(ident, own) if own else None), frozenset()
        if self.merges and len(m.segments) + len(own) > 1:
            turn.model.happened.add("merged")
            digests: dict[Id, str] = {}
            deltas: dict[Id, Deltas] = {}
            for pack, held, on in (
                e for s in m.segments | {Segment(ident, own)} for e in s.entries
            ):
                digests[pack] = united(digests.get(pack, ""), held)
                deltas[pack] = deltas.get(pack, frozenset()) | on
            yield Segment(ident, _entries(turn, digests, deltas)), m.segments


def _chains(
    turn: Turn, c: Contents, digest: str, *, condemned: bool = False, above: str = ""
) -> list[frozenset[tuple[Id, str]]]:
    """Return the ways to read a digest from live packs: its place, and those of all bases below."""
    found = []
    for pack in c.places(digest, condemned=condemned):
        base, link = c.base(pack, digest), (pack, digest)
        if not base or turn.drops(Rule.BASES_RELIED_ON):
            found.append(frozenset([link]))
        elif base not in above + digest:
            below = _chains(turn, c, base, condemned=condemned, above=above + digest)
            found += [chain | {link} for chain in below]
    return found


def _forms_of_copy(turn: Turn, c: Contents, digest: str) -> list[str]:
    """Return the bases that a digest may be copied with; none ("") if it is copied as it is."""
    bases = [c.base(p, digest) for p in c.places(digest, condemned=True)]
    if "" in bases:
        return [""]
    kept = [b for b in bases if turn.drops(Rule.COPIES_HAVE_END) or c.has_end(b, without=digest)]
    return sorted({*kept}) or [""]


def _entries(turn: Turn, digests: dict[Id, str], deltas: dict[Id, Deltas]) -> frozenset[Entry]:
    """Return all entries; without the rule, only one place of each digest."""
    order = sorted(digests, reverse=turn.drops(Rule.MERGE_KEEPS_FIRST))
    if turn.drops(Rule.MERGE_KEEPS_FIRST) or turn.drops(Rule.MERGE_KEEPS_LAST):
        seen = ""
        for pack in order:
            digests[pack] = "".join(d for d in digests[pack] if d not in seen)
            seen += digests[pack]
    return frozenset(Entry(p, held, deltas[p]) for p, held in digests.items() if held)


@dataclass(frozen=True)
class Delete(Writer):
    """Removes the snapshot of a commit, if it is there; or thins it to what it ``keeps``."""

    commit: str
    keeps: str = ""

    def steps(self, turn: Turn) -> Steps:
        match turn.me.at:
            case "start":
                return self._read(turn)
            case "put":
                return self.put(turn)
            case "doubt":
                return self.doubt(turn)
        return iter(())

    def retried(self, turn: Turn) -> Process:
        return Process()

    def stood(self, turn: Turn, root: Root) -> Process:
        return DONE

    def _read(self, turn: Turn) -> Steps:
        m = turn.newest
        left = {s for s in m.snapshots if s.commit != self.commit}
        if self.keeps:
            left |= {s._replace(needs=self.keeps) for s in m.snapshots - left}
        if left != m.snapshots:
            draft = m._replace(seq=m.seq + 1, snapshots=frozenset(left))
            what = f"{self.commit} thinned to {self.keeps}" if self.keeps else f"no {self.commit}"
            said = f"reads root {m.seq}, drafts root {draft.seq} with {what}"
            yield turn.to(said, Process("put", draft=draft))


@dataclass(frozen=True)
class Reader:
    """Opens the snapshot of a commit and reads one chunk of it, wherever that lies by then."""

    commit: str
    digest: str

    def steps(self, turn: Turn) -> Steps:
        match turn.me.at:
            case "start":
                return self._look_up(turn, "")
            case "fetch":
                return self._fetch(turn)
            case "refresh":
                return self._look_up(turn, "again ")
        return iter(())

    def _look_up(self, turn: Turn, again: str) -> Steps:
        m, me = turn.newest, turn.me
        if all(s.commit != self.commit for s in m.snapshots):
            if again:
                yield turn.to(f"finds {self.commit} deleted", DONE)
            return
        once = turn.drops(Rule.READER_PERSISTS) and me.rounds == 2
        # What it did not find the newest root names still: that is damage, not a collector.
        places = [p for p in contents(m).places(self.digest, condemned=True) if p not in me.tried]
        is_late = m != turn.state.newest and not turn.drops(Rule.LATE_IS_WAITED_FOR)
        if again and not places and is_late:
            # It looks again as long as a client may show an older root.
            turn.model.happened.add("waited")
            return
        if again and (not places or once):
            yield turn.to(f"gives up: {self.commit} is still there", FAILED)
            return
        if again:
            turn.model.happened.add("looked a chunk up again")
        rounds = me.rounds + 1 if turn.drops(Rule.READER_PERSISTS) else 0
        for place in places:
            said = f"looks {self.digest} up {again}in root {m.seq}: in {place}"
            yield turn.to(said, me._replace(at="fetch", place=place, rounds=rounds))

    def _fetch(self, turn: Turn) -> Steps:
        if turn.me.place in turn.state.files:
            yield turn.to("reads it", DONE)
        else:
            tried = turn.me.tried | {turn.me.place}
            missed = turn.me._replace(at="refresh", place=None, tried=tried)
            yield turn.to("finds no such pack", missed)
