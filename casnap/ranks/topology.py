"""How the bytes of a collective get from rank to rank.

A few ranks are all connected to each other (:class:`Mesh`). Many ranks are divided into teams, each
on one host (:class:`Teams`). One rank of each team is its speaker. It is connected to the other
ranks of its team, and to all other speakers. A rank that is not a speaker is connected only to its
speaker.
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
"""The size that a rank announces for its parts once it has failed."""
# The head of a message: the lengths of its two halves, the checksums of both, and one of the head.
# Short halves come in the same message as the head.
_HEAD = struct.Struct("<QQ8s8s")
_HEAD_SUM = struct.Struct("<I")
_HEAD_BYTES = 1024
# Up to here, two halves are copied into one message. A longer half is sent without a copy, since it
# may go to many ranks.
_JOINED_BYTES = 64 << 10
# Tags of gloo's messages. The messages of a mesh have 0; breaking a connection uses 1.
_OF_HEAD, _OF_COMMON, _OF_SINGLE = 2, 3, 4
_NOTHING = memoryview(b"")


class Outgoing(NamedTuple):
    """The parts that a rank sends in a collective.

    Attributes:
        step: The number of the collective. It differs on a rank that has skipped a collective.
        parts: The part for each rank. An object that goes to several ranks is sent once.
        sums: The checksum of each part.
        has_failed: Whether this rank has failed. Then the parts are empty.
    """

    step: int
    parts: Sequence[Buffer]
    sums: Sequence[int]
    has_failed: bool = False


class Incoming(NamedTuple):
    """The parts that a rank receives in a collective, in the order of the ranks that sent them.

    Attributes:
        steps: The ``step`` of each rank's collective.
        sizes: The length of each rank's part; ``FAILED`` if the rank has failed.
        sums: The checksum of each rank's part.
        parts: Each rank's part; None if only its length has come. Then :meth:`Transport.transfer`
            receives the part.
    """

    steps: list[int]
    sizes: list[int]
    sums: list[int]
    parts: list[memoryview | None]


class Traffic(NamedTuple):
    """How much a rank has sent.

    Attributes:
        collectives: The number of collectives in which the rank took part.
        messages: The number of messages that the rank sent.
        nbytes: The bytes of these messages.
    """

    collectives: int = 0
    messages: int = 0
    nbytes: int = 0


class Transport(ABC):
    """The connections of this rank with other ranks.

    Attributes:
        pg: The gloo group.
        kept: An object that gloo uses, but does not keep alive.
        rank: The number of this rank.
        size: The number of ranks.
        peers: The ranks to which this rank is connected.
        largest_team: The number of ranks in the largest team; 1 without teams.
        messages: How many messages this rank has sent.
        nbytes: The bytes of these messages.
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
        """Send this rank's parts, and receive the other ranks' parts or their lengths.

        This is a collective.

        Args:
            outgoing: The parts of this rank.
            seconds: How long to wait for the others.

        Raises:
            RuntimeError: A connection broke, or a rank did not answer in time.
        """

    @abstractmethod
    def connect(self, seconds: float) -> None:
        """Connect this rank with its peers, unless gloo has already done so. This is a collective.

        Args:
            seconds: How long to wait for the others.
        """

    @abstractmethod
    def transfer(
        self, parts: Mapping[int, torch.Tensor], buffers: Mapping[int, torch.Tensor], seconds: float
    ) -> None:
        """Send and receive the parts of which :meth:`exchange` has brought only the length.

        Args:
            parts: For each rank that gets a part, the part.
            buffers: For each rank that sends a part, the memory to receive it into.
            seconds: How long to wait for each part.
        """

    def close(self) -> None:
        """Break all connections. Every rank that waits for this one fails at once."""
        gloo.break_connections(self.pg, self.peers)


class Mesh(Transport):
    """The transport of a few ranks. Each rank is connected to every other.

    :meth:`exchange` brings the length of each part. :meth:`transfer` then sends the parts
    themselves, straight from rank to rank.
    """

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
        self, parts: Mapping[int, torch.Tensor], buffers: Mapping[int, torch.Tensor], seconds: float
    ) -> None:
        # Each rank begins with its next one, so that not all talk to the same rank.
        order = [(self.rank + i) % self.size for i in range(1, self.size)]
        works = [self.pg.recv([buffers[i]], i, 0) for i in reversed(order) if i in buffers]
        works += [self.pg.send([parts[i]], i, 0) for i in order if i in parts]
        self.messages += len(parts)
        self.nbytes += sum(map(len, parts.values()))
        for work in works:
            work.wait(timedelta(seconds=seconds))


class _Common(msgspec.Struct, array_like=True):
    """The half of a message that all ranks get. A speaker joins those of its team into one.

    Attributes:
        step: The ``step`` of the sender, as in :class:`Outgoing`.
        astray: Each rank of the sender's team that is at another ``step`` → its ``step``.
        failed: The ranks that have failed.
        told: The parts that go to all ranks, as triples: sender, checksum, content.
    """

    step: int
    astray: dict[int, int] = {}
    failed: list[int] = []
    told: list[tuple[int, int, bytearray]] = []


_Part: TypeAlias = tuple[int, int, int, bytearray]
"""A part for one rank: the rank that sends it, the rank that gets it, its checksum, its content."""


class Teams(Transport):
    """The transport of many ranks: teams, each with a speaker.

    A part goes from its sender to the speaker of the sender's team, from there to the speaker of
    the receiver's team, and from there to the receiver.

    Args:
        pg: A gloo group whose ranks connect when they first talk.
        rank: The number of this rank.
        teams: The ranks of each team. The first rank of a team is its speaker.
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
        self, parts: Mapping[int, torch.Tensor], buffers: Mapping[int, torch.Tensor], seconds: float
    ) -> None:
        pass  # the exchange has brought all parts

    def _own(self, outgoing: Outgoing) -> tuple[_Common, list[_Part]]:
        """Return this rank's message: a common half for all ranks, and parts for single ranks.

        The part that most ranks get is in the common half, if at least two ranks get it.
        """
        rank, parts, sums = self.rank, outgoing.parts, outgoing.sums
        if outgoing.has_failed:
            return _Common(outgoing.step, failed=[rank]), []
        # The part that most ranks get goes to all. Ranks that get another part have it in addition.
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
        """As a speaker, pass on the messages between this team and the other teams.

        It collects the messages of its team, exchanges them with the other speakers, and sends each
        rank of its team what is for that rank.

        Args:
            common: The common half of this rank's own message.
            parts: This rank's own parts for single ranks.
            until: When to give up, by the monotonic clock.

        Returns:
            The encoded common halves of all teams, and the encoded parts for this rank alone.
        """
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
        """Decode what this rank has received.

        Args:
            outgoing: The parts that this rank sends; its part for itself is among the result.
            commons: The encoded common halves of all teams, this team's first.
            single: The encoded parts for this rank alone.
        """
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
        """Send messages to some ranks, and receive messages from some ranks.

        A message has two halves.

        Args:
            outgoing: For each rank that gets a message, the common half and the half for this rank
                alone.
            sources: The ranks that send a message to this rank.
            until: When to give up, by the monotonic clock.

        Returns:
            For each source, the two halves of its message.
        """
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
        """Begin to send a message of two halves.

        Args:
            target: The rank that gets the message.
            common: The half that other ranks get too.
            single: The half for the target alone.
            sums: The checksums of both halves.
            tensors: Tensors of common halves, keyed by the id of the half. The call adds a new
                tensor, so that a half that goes to many ranks is converted once.

        Returns:
            The works of gloo, which the caller must wait for.
        """
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
    """Group parts by the rank that gets them, or by the team of that rank.

    Args:
        parts: The parts.
        key: Given the rank that gets a part, returns the number of the group.

    Returns:
        The number of each group → its parts.
    """
    groups: dict[int, list[_Part]] = {}
    for part in parts:
        groups.setdefault(key(part[1]), []).append(part)
    return groups


def _wait(work: Any, until: float) -> None:
    if work is not None:
        work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))


def _teams(hosts: Sequence[int], most: int) -> list[list[int]]:
    """Divide ranks into teams.

    All ranks of a team are on one host. Only ranks that are alone on their hosts, or whose hosts
    are not known, form teams across hosts.

    Args:
        hosts: For each rank, the number of its host; 0 if the host is not known.
        most: The most ranks of a team.

    Returns:
        The ranks of each team. The teams are in the order of their first ranks.
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


def transport_of(
    new_group: Callable[[bool], tuple[Any, object]],
    rank: int,
    hosts: Sequence[int],
    team_ranks: int,
) -> Transport:
    """Make the transport of a rank: a mesh if all ranks fit into one team, else teams.

    A part takes one step in a mesh, and up to three steps between teams.

    Args:
        new_group: Makes the gloo group. Its argument says whether two ranks connect only when they
            first talk. It returns the group, and an object to keep as long as the group is used.
        rank: The number of this rank.
        hosts: For each rank, the number of its host; 0 if the host is not known.
        team_ranks: The most ranks of a team.
    """
    if len(hosts) <= team_ranks:
        pg, kept = new_group(False)
        transport: Transport = Mesh(pg, rank, len(hosts))
    else:
        pg, kept = new_group(True)
        transport = Teams(pg, rank, _teams(hosts, team_ranks))
    transport.kept = kept
    return transport
