"""How what the ranks tell each other in one collective gets there.

A few ranks are all connected to each other (:class:`Mesh`). Many are divided into teams, each of
one host, and one rank speaks for its team (:class:`Teams`). The connections of a rank then grow
with its team, and those of a speaker with the number of teams.
"""

from __future__ import annotations

import struct
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch

from casnap.errors import RankError
from casnap.format.decoding import decoder
from casnap.format.records import encode
from casnap.ranks import gloo
from casnap.runtime.typing import override

Buffer = bytes | memoryview

FAILED = -1
"""The size that a rank announces that has failed."""
STRAIGHT_BYTES = 16 << 10
"""Bulk parts of more bytes go straight from rank to rank, over a connection of their own."""

# A message begins with the lengths of its two halves; if these are short, they come along.
_LENGTHS = struct.Struct("<QQ")
_HEAD_BYTES = 1024
# Two halves of fewer bytes are copied into one message; a longer one is sent to all as it is.
_JOINED_BYTES = 64 << 10
# Tags of the messages of gloo: straight parts have 0, and 1 breaks a connection.
_HEAD, _COMMON, _SINGLE = 2, 3, 4
_NOTHING = memoryview(b"")


class Outgoing(NamedTuple):
    """What one rank tells the others in a collective.

    Attributes:
        step: Which call this is; a rank that is at another one has lost the others.
        parts: What each rank is told. What several are told, being the same object, is sent once.
        sums: A checksum of each part.
        has_failed: This rank has failed, and tells nothing else.
        is_bulk: Large parts are not worth a detour.
    """

    step: int
    parts: Sequence[Buffer]
    sums: Sequence[int]
    has_failed: bool = False
    is_bulk: bool = False


class Incoming(NamedTuple):
    """What a rank is told by each rank, and what is still to be sent.

    Attributes:
        steps: Which call each rank is at.
        sizes: How many bytes each tells this one; ``FAILED`` if it has failed.
        sums: The checksum of these.
        parts: The bytes; None where they are still to come, straight.
        straight: The ranks whose part is still to be sent, straight.
    """

    steps: list[int]
    sizes: list[int]
    sums: list[int]
    parts: list[memoryview | None]
    straight: set[int]


class Traffic(NamedTuple):
    """What a rank has sent.

    Attributes:
        collectives: In how many collectives it took part.
        messages: How many messages it sent.
        nbytes: How many bytes these had.
    """

    collectives: int = 0
    messages: int = 0
    nbytes: int = 0


class Carrier(ABC):
    """Connections of one rank with others.

    Attributes:
        pg: The gloo group.
        kept: What gloo uses, but does not keep.
        peers: The ranks that this one is connected to.
        messages: How many messages this rank has sent.
        nbytes: How many bytes these had.
    """

    def __init__(self, pg: Any, rank: int, size: int) -> None:
        self.pg = pg
        self.kept: object = None
        self.rank, self.size = rank, size
        self.peers: set[int] = set()
        self.messages = self.nbytes = 0

    @abstractmethod
    def exchange(self, outgoing: Outgoing, seconds: float) -> Incoming:
        """Tell all ranks something, and hear what they tell; a collective.

        Args:
            outgoing: What this rank tells.
            seconds: How long to wait.

        Raises:
            RuntimeError: A connection broke, or nothing came in time.
        """

    @abstractmethod
    def connect(self, seconds: float) -> None:
        """Connect this rank with its peers, if that was not done yet; a collective."""

    def transfer(
        self, parts: Mapping[int, torch.Tensor], rooms: Mapping[int, torch.Tensor], seconds: float
    ) -> None:
        """Send and receive parts of known sizes straight.

        Args:
            parts: The bytes for some ranks.
            rooms: Where to put those of some ranks.
            seconds: How long to wait for each.
        """
        # Each rank begins with another one, so that they do not all talk to the same.
        order = [(self.rank + i) % self.size for i in range(1, self.size)]
        works = [self.pg.recv([rooms[i]], i, 0) for i in reversed(order) if i in rooms]
        works += [self.pg.send([parts[i]], i, 0) for i in order if i in parts]
        self.peers.update(parts, rooms)
        self.messages += len(parts)
        self.nbytes += sum(map(len, parts.values()))
        for work in works:
            work.wait(timedelta(seconds=seconds))

    def close(self) -> None:
        """Break all connections: every rank that waits for this one fails at once."""
        gloo.break_connections(self.pg, self.peers)


class Mesh(Carrier):
    """All ranks are connected to each other: a few numbers for each, then the parts, straight."""

    def __init__(self, pg: Any, rank: int, size: int) -> None:
        super().__init__(pg, rank, size)
        self.peers = {*range(size)} - {rank}

    @override
    def connect(self, seconds: float) -> None:
        pass  # gloo has done it

    @override
    def exchange(self, outgoing: Outgoing, seconds: float) -> Incoming:
        sizes = [FAILED if outgoing.has_failed else len(part) for part in outgoing.parts]
        rows = [[*row, outgoing.step] for row in zip(sizes, outgoing.sums, strict=True)]
        theirs = gloo.exchange_rows(self.pg, torch.tensor(rows, device="cpu"), seconds)
        self.messages += self.size - 1
        self.nbytes += (self.size - 1) * theirs.itemsize * theirs.shape[1]
        steps, sums = theirs[:, 2].tolist(), theirs[:, 1].tolist()
        sizes_told = theirs[:, 0].tolist()
        parts = [None if nbytes else _NOTHING for nbytes in sizes_told]
        parts[self.rank] = memoryview(outgoing.parts[self.rank])
        straight = {r for r, nbytes in enumerate(sizes) if nbytes > 0 and r != self.rank}
        return Incoming(steps, sizes_told, sums, parts, straight)


class _Common(msgspec.Struct, array_like=True):
    """What some ranks tell all others.

    Attributes:
        step: Which call most of them are at.
        astray: The ranks that are at another one, and at which.
        failed: The ranks that have failed.
        told: The ranks that tell all something: rank, checksum, content.
    """

    step: int
    astray: dict[int, int] = {}
    failed: list[int] = []
    told: list[tuple[int, int, bytearray]] = []


_Part: TypeAlias = tuple[int, int, int, bytearray | int]
"""Who tells it, to whom, its checksum, and its content; or only its size, if it goes straight."""


class Teams(Carrier):
    """Teams of ranks, each with a speaker.

    What one rank tells another goes to its speaker, to that of the other's team, and to the other.

    Args:
        pg: A gloo group, whose ranks connect when they first talk.
        rank: This rank.
        teams: The ranks of each team; the first one speaks for it.
    """

    def __init__(self, pg: Any, rank: int, teams: Sequence[Sequence[int]]) -> None:
        super().__init__(pg, rank, sum(map(len, teams)))
        self._teams = teams
        self._team_of = {r: i for i, team in enumerate(teams) for r in team}
        own = teams[self._team_of[rank]]
        self._speaker = own[0]
        speaks = rank == self._speaker
        self._members = own[1:] if speaks else []
        self._speakers = [team[0] for team in teams if speaks and team is not own]

    @override
    def connect(self, seconds: float) -> None:
        self.exchange(Outgoing(0, [b""] * self.size, [0] * self.size), seconds)

    @override
    def exchange(self, outgoing: Outgoing, seconds: float) -> Incoming:
        until = time.monotonic() + seconds
        common, parts, straight = self._own(outgoing)
        try:
            if self.rank != self._speaker:
                self._swap({self._speaker: (encode(common), encode(parts))}, [], until)
                told = self._swap({}, [self._speaker], until)[self._speaker]
            else:
                told = self._speak(common, parts, until)
            return self._incoming(outgoing, straight, *told)
        except msgspec.DecodeError as e:
            raise RankError(
                f"what came from other ranks to rank {self.rank} is damaged ({e}), so it was not "
                "used; a network card or some memory may be at fault"
            ) from e

    def _own(self, outgoing: Outgoing) -> tuple[_Common, list[_Part], set[int]]:
        """Return what this rank tells all others, what single ones, and which of them straight."""
        rank, parts, sums = self.rank, outgoing.parts, outgoing.sums
        if outgoing.has_failed:
            return _Common(outgoing.step, failed=[rank]), [], set()
        # What most are told goes to all. Who is told something else gets that in addition.
        ((most, times),) = Counter(id(p) for r, p in enumerate(parts) if r != rank).most_common(1)
        common, straight = _Common(outgoing.step), set[int]()
        common_part: Buffer = b""
        if times > 1:
            told_to = next(r for r, part in enumerate(parts) if r != rank and id(part) == most)
            common_part = parts[told_to]
            if len(common_part):
                common.told.append((rank, sums[told_to], bytearray(common_part)))
        single: list[_Part] = []
        for other, part in enumerate(parts):
            if other == rank or part is common_part or not (len(part) or len(common_part)):
                continue
            if outgoing.is_bulk and len(part) > STRAIGHT_BYTES:
                straight.add(other)
                single.append((rank, other, sums[other], len(part)))
            else:
                single.append((rank, other, sums[other], bytearray(part)))
        return common, single, straight

    def _speak(self, common: _Common, parts: list[_Part], until: float) -> tuple[Buffer, Buffer]:
        """Pass on what this team tells and is told; return what this rank is told."""
        for member, (encoded, parts_of_one) in self._swap({}, self._members, until).items():
            told_by_one = decoder(_Common).decode(encoded)
            if told_by_one.step != common.step:
                common.astray[member] = told_by_one.step
            common.failed += told_by_one.failed
            common.told += told_by_one.told
            parts += decoder(list[_Part]).decode(parts_of_one)
        by_team: dict[int, list[_Part]] = {}
        for part in parts:
            by_team.setdefault(self._team_of[part[1]], []).append(part)
        mine, told = self._team_of[self.rank], encode(common)
        theirs = self._swap(
            {
                self._teams[team][0]: (told, encode(by_team.get(team, [])))
                for team in range(len(self._teams))
                if team != mine
            },
            self._speakers,
            until,
        )
        commons = encode([told, *(bytes(common) for common, _ in theirs.values())])
        by_rank: dict[int, list[_Part]] = {}
        for part in by_team.get(mine, []):
            by_rank.setdefault(part[1], []).append(part)
        for _, single in theirs.values():
            for part in decoder(list[_Part]).decode(single):
                by_rank.setdefault(part[1], []).append(part)
        self._swap(
            {member: (commons, encode(by_rank.get(member, []))) for member in self._members},
            [],
            until,
        )
        return commons, encode(by_rank.get(self.rank, []))

    def _incoming(
        self, outgoing: Outgoing, straight: set[int], commons: Buffer, single: Buffer
    ) -> Incoming:
        """Return what the ranks tell this one, given what its speaker passed on."""
        size = self.size
        steps, sizes, sums = [0] * size, [0] * size, [0] * size
        parts: list[memoryview | None] = [_NOTHING] * size
        own_team = self._teams[self._team_of[self.rank]]
        others = (team for team in self._teams if team is not own_team)
        commons_of_teams = decoder(list[bytes]).decode(commons)
        for encoded, team in zip(commons_of_teams, (own_team, *others), strict=True):
            common = decoder(_Common).decode(encoded)
            for rank in team:
                steps[rank] = common.astray.get(rank, common.step)
            for rank in common.failed:
                sizes[rank] = FAILED
            for rank, checksum, content in common.told:
                sizes[rank], sums[rank], parts[rank] = len(content), checksum, memoryview(content)
        for rank, _, checksum, told in decoder(list[_Part]).decode(single):
            sums[rank] = checksum
            if isinstance(told, int):
                sizes[rank], parts[rank] = told, None
            else:
                sizes[rank], parts[rank] = len(told), memoryview(told)
        mine = outgoing.parts[self.rank]
        sizes[self.rank] = FAILED if outgoing.has_failed else len(mine)
        sums[self.rank], parts[self.rank] = outgoing.sums[self.rank], memoryview(mine)
        return Incoming(steps, sizes, sums, parts, straight)

    def _swap(
        self, outgoing: Mapping[int, tuple[bytes, bytes]], sources: Iterable[int], until: float
    ) -> dict[int, tuple[Buffer, Buffer]]:
        """Send two halves of a message to each of some ranks; return those of some ranks."""
        self.peers.update(outgoing, sources)
        heads = {source: self._begin_receiving(_HEAD_BYTES, source, _HEAD) for source in sources}
        works = [
            work for to, halves in outgoing.items() for work in self._begin_sending(to, *halves)
        ]
        got: dict[int, tuple[Buffer, Buffer]] = {}
        for source, (head, work) in heads.items():
            _wait(work, until)
            common_bytes, single_bytes = _LENGTHS.unpack_from(head)
            middle = _LENGTHS.size + common_bytes
            end = middle + single_bytes
            if end <= _HEAD_BYTES:
                got[source] = head[_LENGTHS.size : middle], head[middle:end]
                continue
            if common_bytes + single_bytes <= _JOINED_BYTES:
                both, of_both = self._begin_receiving(common_bytes + single_bytes, source, _COMMON)
                works.append(of_both)
                got[source] = both[:common_bytes], both[common_bytes:]
                continue
            common, of_common = self._begin_receiving(common_bytes, source, _COMMON)
            single, of_single = self._begin_receiving(single_bytes, source, _SINGLE)
            works += [of_common, of_single]
            got[source] = common, single
        for work in works:
            _wait(work, until)
        return got

    def _begin_receiving(self, nbytes: int, source: int, tag: int) -> tuple[memoryview, Any]:
        room = memoryview(bytearray(nbytes))
        return room, self.pg.recv([gloo.as_tensor(room)], source, tag) if nbytes else None

    def _begin_sending(self, target: int, common: bytes, single: bytes) -> list[Any]:
        lengths = _LENGTHS.pack(len(common), len(single))
        messages = [(lengths, _HEAD), (common, _COMMON), (single, _SINGLE)]
        if len(lengths) + len(common) + len(single) <= _HEAD_BYTES:
            messages = [(lengths + common + single, _HEAD)]
        elif len(common) + len(single) <= _JOINED_BYTES:
            messages = [(lengths, _HEAD), (common + single, _COMMON)]
        works = []
        for content, tag in messages:
            padded = content.ljust(_HEAD_BYTES, b"\0") if tag == _HEAD else content
            if padded:
                works.append(self.pg.send([gloo.as_tensor(padded)], target, tag))
                self.messages += 1
                self.nbytes += len(padded)
        return works


def _wait(work: Any, until: float) -> None:
    if work is not None:
        work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))


def _teams(hosts: Sequence[int], most: int) -> list[list[int]]:
    """Divide ranks into teams, in the order of their first ranks.

    Ranks that are alone on their hosts, or whose host is not known, make teams with their like.

    Args:
        hosts: A number for each rank's host; 0 where that is not known.
        most: How many ranks make one team at most.
    """
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    alone = by_host.pop(0, [])
    groups = [ranks for ranks in by_host.values() if len(ranks) > 1]
    alone = sorted(alone + [ranks[0] for ranks in by_host.values() if len(ranks) == 1])
    return sorted(
        ranks[i : i + most] for ranks in [*groups, alone] for i in range(0, len(ranks), most)
    )


def carrier_of(
    new_group: Callable[[bool], tuple[Any, object]],
    rank: int,
    hosts: Sequence[int],
    team_ranks: int,
) -> Carrier:
    """Return the connections of one rank: to all others, or, of many ranks, to its team.

    For few ranks one step is faster than three.

    Args:
        new_group: Makes the gloo group, whose ranks connect when they first talk, or at once.
        rank: This rank.
        hosts: A number for each rank's host; 0 where that is not known.
        team_ranks: How many ranks make one team at most; so few are all connected to each other.
    """
    if len(hosts) <= team_ranks:
        pg, kept = new_group(False)
        carrier: Carrier = Mesh(pg, rank, len(hosts))
    else:
        pg, kept = new_group(True)
        carrier = Teams(pg, rank, _teams(hosts, team_ranks))
    carrier.kept = kept
    return carrier
