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
from zlib import crc32

import msgspec
import torch

from casnap.errors import RankError
from casnap.format.decoding import decoder
from casnap.format.digest import digest_of
from casnap.format.records import encode
from casnap.ranks import gloo
from casnap.ranks.failures import damage_text
from casnap.runtime.typing import override

Buffer = bytes | memoryview

FAILED = -1
"""The size that a rank announces that has failed."""
# A message begins with the lengths of its two halves, checksums of both, and one of all that.
# Halves that are short come along.
_HEAD = struct.Struct("<QQ8s8s")
_HEAD_SUM = struct.Struct("<I")
_HEAD_BYTES = 1024
# Two halves of fewer bytes are copied into one message; a longer one is sent to all as it is.
_JOINED_BYTES = 64 << 10
# Tags of the messages of gloo: those of a mesh have 0, and 1 breaks a connection.
_OF_HEAD, _OF_COMMON, _OF_SINGLE = 2, 3, 4
_NOTHING = memoryview(b"")


class Outgoing(NamedTuple):
    """What one rank tells the others in a collective.

    Attributes:
        step: Which call this is; a rank that is at another one has lost the others.
        parts: What each rank is told. What several are told, being the same object, is sent once.
        sums: A checksum of each part.
        has_failed: This rank has failed, and tells nothing else.
    """

    step: int
    parts: Sequence[Buffer]
    sums: Sequence[int]
    has_failed: bool = False


class Incoming(NamedTuple):
    """What a rank is told by each rank.

    Attributes:
        steps: Which call each rank is at.
        sizes: How many bytes each tells this one; ``FAILED`` if it has failed.
        sums: The checksum of these.
        parts: The bytes; None where they are still to come, by :meth:`Carrier.transfer`.
    """

    steps: list[int]
    sizes: list[int]
    sums: list[int]
    parts: list[memoryview | None]


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
        largest_team: How many ranks' parts go by one rank at most.
        messages: How many messages this rank has sent.
        nbytes: How many bytes these had.
    """

    def __init__(self, pg: Any, rank: int, size: int) -> None:
        self.pg = pg
        self.kept: object = None
        self.rank, self.size = rank, size
        self.peers: set[int] = set()
        self.largest_team = 1
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

    @abstractmethod
    def transfer(
        self, parts: Mapping[int, torch.Tensor], rooms: Mapping[int, torch.Tensor], seconds: float
    ) -> None:
        """Send and receive what the exchange has only announced.

        Args:
            parts: The bytes for some ranks.
            rooms: Where to put those of some ranks.
            seconds: How long to wait for each.
        """

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
        return Incoming(steps, sizes_told, sums, parts)

    @override
    def transfer(
        self, parts: Mapping[int, torch.Tensor], rooms: Mapping[int, torch.Tensor], seconds: float
    ) -> None:
        # Each rank begins with another one, so that they do not all talk to the same.
        order = [(self.rank + i) % self.size for i in range(1, self.size)]
        works = [self.pg.recv([rooms[i]], i, 0) for i in reversed(order) if i in rooms]
        works += [self.pg.send([parts[i]], i, 0) for i in order if i in parts]
        self.messages += len(parts)
        self.nbytes += sum(map(len, parts.values()))
        for work in works:
            work.wait(timedelta(seconds=seconds))


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


_Part: TypeAlias = tuple[int, int, int, bytearray]
"""Who tells it, to whom, its checksum, and its content."""


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
        self.largest_team = max(map(len, teams))

    @override
    def connect(self, seconds: float) -> None:
        self.exchange(Outgoing(0, [b""] * self.size, [0] * self.size), seconds)

    @override
    def exchange(self, outgoing: Outgoing, seconds: float) -> Incoming:
        until = time.monotonic() + seconds
        common, parts = self._own(outgoing)
        if self.rank != self._speaker:
            self._swap({self._speaker: (encode(common), encode(parts))}, [], until)
            told = self._swap({}, [self._speaker], until)[self._speaker]
        else:
            told = self._speak(common, parts, until)
        return self._incoming(outgoing, *told)

    @override
    def transfer(
        self, parts: Mapping[int, torch.Tensor], rooms: Mapping[int, torch.Tensor], seconds: float
    ) -> None:
        pass  # all has come with the exchange

    def _own(self, outgoing: Outgoing) -> tuple[_Common, list[_Part]]:
        """Return what this rank tells all others, and what single ones."""
        rank, parts, sums = self.rank, outgoing.parts, outgoing.sums
        if outgoing.has_failed:
            return _Common(outgoing.step, failed=[rank]), []
        # What most are told goes to all. Who is told something else gets that in addition.
        ((most, times),) = Counter(id(p) for r, p in enumerate(parts) if r != rank).most_common(1)
        common = _Common(outgoing.step)
        common_part: Buffer = _NOTHING
        if times > 1:
            told_to = next(r for r, part in enumerate(parts) if r != rank and id(part) == most)
            common_part = parts[told_to]
            if len(common_part):
                common.told.append((rank, sums[told_to], bytearray(common_part)))
        return common, [
            (rank, other, sums[other], bytearray(part))
            for other, part in enumerate(parts)
            if other != rank and part is not common_part and (len(part) or len(common_part))
        ]

    def _speak(self, common: _Common, parts: list[_Part], until: float) -> tuple[Buffer, Buffer]:
        """Pass on what this team tells and is told; return what this rank is told."""
        for member, (encoded, parts_of_one) in self._swap({}, self._members, until).items():
            told_by_one = decoder(_Common).decode(encoded)
            if told_by_one.step != common.step:
                common.astray[member] = told_by_one.step
            common.failed += told_by_one.failed
            common.told += told_by_one.told
            parts += decoder(list[_Part]).decode(parts_of_one)
        by_team = _grouped(parts, lambda target: self._team_of[target])
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
        of_this_team = by_team.get(mine, [])
        for _, single in theirs.values():
            of_this_team += decoder(list[_Part]).decode(single)
        by_rank = _grouped(of_this_team, lambda target: target)
        self._swap(
            {member: (commons, encode(by_rank.get(member, []))) for member in self._members},
            [],
            until,
        )
        return commons, encode(by_rank.get(self.rank, []))

    def _incoming(self, outgoing: Outgoing, commons: Buffer, single: Buffer) -> Incoming:
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
            sizes[rank], sums[rank], parts[rank] = len(told), checksum, memoryview(told)
        mine = outgoing.parts[self.rank]
        sizes[self.rank] = FAILED if outgoing.has_failed else len(mine)
        sums[self.rank], parts[self.rank] = outgoing.sums[self.rank], memoryview(mine)
        return Incoming(steps, sizes, sums, parts)

    def _swap(
        self, outgoing: Mapping[int, tuple[bytes, bytes]], sources: Iterable[int], until: float
    ) -> dict[int, tuple[Buffer, Buffer]]:
        """Send two halves of a message to each of some ranks; return those of some ranks."""
        heads = {source: self._begin_receiving(_HEAD_BYTES, source, _OF_HEAD) for source in sources}
        sums, tensors = dict[int, bytes](), dict[int, torch.Tensor]()
        for half in (half for halves in outgoing.values() for half in halves):
            # The same half may go to many ranks.
            if id(half) not in sums:
                sums[id(half)] = digest_of(half)[:8]
        works = [
            work
            for target, (common, single) in outgoing.items()
            for work in self._begin_sending(
                target, common, single, (sums[id(common)], sums[id(single)]), tensors
            )
        ]
        got: dict[int, tuple[Buffer, Buffer]] = {}
        for source, (head, work) in heads.items():
            _wait(work, until)
            got[source] = self._receive_halves(source, head, until)
        for work in works:
            _wait(work, until)
        return got

    def _receive_halves(
        self, source: int, head: memoryview, until: float
    ) -> tuple[memoryview, memoryview]:
        nbytes = _HEAD.size + _HEAD_SUM.size
        if _HEAD_SUM.unpack_from(head, _HEAD.size)[0] != crc32(head[: _HEAD.size]):
            raise self._damaged(source)
        common_bytes, single_bytes, *sums = _HEAD.unpack_from(head)
        if nbytes + common_bytes + single_bytes <= _HEAD_BYTES:
            both = head[nbytes : nbytes + common_bytes + single_bytes]
            halves = both[:common_bytes], both[common_bytes:]
        elif common_bytes + single_bytes <= _JOINED_BYTES:
            both, work = self._begin_receiving(common_bytes + single_bytes, source, _OF_COMMON)
            _wait(work, until)
            halves = both[:common_bytes], both[common_bytes:]
        else:
            common, of_common = self._begin_receiving(common_bytes, source, _OF_COMMON)
            single, of_single = self._begin_receiving(single_bytes, source, _OF_SINGLE)
            _wait(of_common, until)
            _wait(of_single, until)
            halves = common, single
        if [digest_of(half)[:8] for half in halves] != sums:
            raise self._damaged(source)
        return halves

    def _damaged(self, source: int) -> RankError:
        return RankError(damage_text([source], self.rank), (source,))

    def _begin_receiving(self, nbytes: int, source: int, tag: int) -> tuple[memoryview, Any]:
        room = memoryview(bytearray(nbytes))
        if not nbytes:
            return room, None
        work = self.pg.recv([gloo.as_tensor(room)], source, tag)
        self.peers.add(source)
        return room, work

    def _begin_sending(
        self,
        target: int,
        common: bytes,
        single: bytes,
        sums: tuple[bytes, bytes],
        tensors: dict[int, torch.Tensor],
    ) -> list[Any]:
        """Begin to send two halves; of a half that goes to many, ``tensors`` has the tensor."""
        lengths = _HEAD.pack(len(common), len(single), *sums)
        head = lengths + _HEAD_SUM.pack(crc32(lengths))
        messages = [(head, _OF_HEAD), (common, _OF_COMMON), (single, _OF_SINGLE)]
        if len(head) + len(common) + len(single) <= _HEAD_BYTES:
            messages = [(head + common + single, _OF_HEAD)]
        elif len(common) + len(single) <= _JOINED_BYTES:
            messages = [(head, _OF_HEAD), (common + single, _OF_COMMON)]
        works = []
        for content, tag in messages:
            padded = content.ljust(_HEAD_BYTES, b"\0") if tag == _OF_HEAD else content
            if padded:
                tensor = tensors.get(id(padded))
                if tensor is None:
                    tensor = gloo.as_tensor(padded)
                    if padded is common:
                        tensors[id(padded)] = tensor
                works.append(self.pg.send([tensor], target, tag))
                self.peers.add(target)
                self.messages += 1
                self.nbytes += len(padded)
        return works


def _grouped(parts: Iterable[_Part], key: Callable[[int], int]) -> dict[int, list[_Part]]:
    """Return parts by a key of the rank to which each is told."""
    groups: dict[int, list[_Part]] = {}
    for part in parts:
        groups.setdefault(key(part[1]), []).append(part)
    return groups


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
