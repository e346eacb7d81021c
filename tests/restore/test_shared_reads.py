"""Fetching by many ranks: each stored byte is read once, and reaches all ranks that want it."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from casnap import NewStore, Store
from casnap.backends import Backend, LocalBackend, MemoryBackend
from casnap.errors import DamagedError, RankError
from casnap.format.codec import Codec
from casnap.format.digest import Digest, digest_of
from casnap.format.records import pack_key
from casnap.ranks import joining
from casnap.ranks.comm import Comm
from casnap.restore.shared_reads import fetch_shared
from casnap.storage.lookup.index import Index
from casnap.storage.packs.chunk_reads import ReadOptions, Want
from casnap.storage.reading.repository import Repository
from tests.support.examples import FEW
from tests.support.links import forget_links
from tests.support.ranks import Worlds
from tests.support.reads import CountingBackend
from tests.support.written import change_of, commit

CHUNK = 256 << 10


# --- ranks that are threads -------------------------------------------------------------------


class Thread(Comm):
    """A rank that is a thread; queues carry bytes, or an error, from each to each.

    Attributes:
        sent: Bytes that went to others.
    """

    def __init__(self, rank: int, boxes: list[list[SimpleQueue[Any]]]) -> None:
        self.rank, self.size, self._boxes = rank, len(boxes), boxes
        self.sent = 0

    def all_to_all(
        self,
        parts: Sequence[bytes | memoryview],
        room: memoryview | None = None,
        *,
        is_proven: bool = False,
    ) -> list[memoryview]:
        assert len(parts) == self.size
        for box, part in zip(self._boxes[self.rank], parts, strict=True):
            box.put(bytearray(part))
        self.sent += sum(map(len, parts)) - len(parts[self.rank])
        came = [boxes[self.rank].get(timeout=30) for boxes in self._boxes]
        for rank, part in enumerate(came):
            if isinstance(part, Exception):
                raise RankError(f"rank {rank} failed") from part
        return [memoryview(part) for part in came]

    def fail(self, error: BaseException) -> None:
        for box in self._boxes[self.rank]:
            box.put(error)

    def leave(self) -> None:
        pass

    def enter_phase(self, phase: str) -> None:
        pass


def on_ranks(size: int, work: Callable[[Comm], Any]) -> tuple[list[Any], list[Thread]]:
    """Do something on each of some ranks; return results or errors, and the ranks."""
    boxes: list[list[SimpleQueue[Any]]] = [
        [SimpleQueue() for _ in range(size)] for _ in range(size)
    ]
    comms = [Thread(rank, boxes) for rank in range(size)]
    results: list[Any] = [None] * size

    def run(comm: Thread) -> None:
        try:
            results[comm.rank] = work(comm)
        except Exception as e:  # noqa: BLE001 - returned
            comm.fail(e)
            results[comm.rank] = e

    threads = [threading.Thread(target=run, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, comms


# --- stores, and what is wanted of them -------------------------------------------------------


def put(repository: Repository, raws: Iterable[bytes], codec: Codec = Codec.RAW) -> None:
    """Store chunks in a pack of their own."""
    with change_of(repository, codec) as session:
        for raw in raws:
            session.new_packs.copy(digest_of(raw), memoryview(raw), is_node=False)
        commit(session)


class Chunks:
    """A store of chunks of many sizes, in several packs.

    Attributes:
        raws: The bytes of the chunks.
    """

    def __init__(self, backend: Backend, codec: Codec = Codec.RAW) -> None:
        self.backend = CountingBackend(backend)
        store = Store(self.backend, create=NewStore(chunk_size=CHUNK)).make()
        sizes = [CHUNK, 100, CHUNK, 65, 4000, CHUNK // 2, CHUNK, CHUNK, 777, CHUNK] * 3
        # Half of each can be compressed.
        self.raws = [os.urandom(n // 2).ljust(n, b"\1") for n in sizes]
        for i in range(3):
            put(store._view.repository, self.raws[10 * i : 10 * i + 10], codec)

    def repository(self) -> Repository:
        """Open the store anew, as each rank does."""
        return Repository(self.backend)

    def places(self) -> dict[Digest, Any]:
        repository = self.repository()
        digests = [digest_of(raw) for raw in self.raws]
        return dict(zip(digests, repository.index.find(repository.view(), digests), strict=True))

    def fetch(
        self, wanted: Sequence[Iterable[int]], window: int = 1 << 20, repository: Any = None
    ) -> tuple[list[Any], list[Thread]]:
        """Let each rank want some chunks; return what came by number, or the error; and the ranks.

        Each rank wants them in an order of its own.
        """
        self.backend.reads.clear()

        def work(comm: Comm) -> Any:
            got: list[tuple[int, bytes]] = []
            wants = [
                Want(
                    digest_of(self.raws[i]),
                    len(self.raws[i]),
                    lambda raw, i=i: got.append((i, bytes(raw))),
                    f"w{i}",
                )
                for i in wanted[comm.rank]
            ]
            random.Random(comm.rank).shuffle(wants)
            try:
                mine = self.repository() if repository is None else repository(comm.rank)
                fetch_shared(comm, mine, wants, ReadOptions(), window=window)
            except DamagedError as e:
                e.got = got  # type: ignore[attr-defined]
                raise
            return got

        return on_ranks(len(wanted), work)

    def read_twice(self) -> list[Digest]:
        """Return the large chunks that were read more than once; small ones lie on the way."""
        twice = []
        for digest, place in self.places().items():
            if place.stored_size >= CHUNK // 2:
                reads = [
                    (at, at + n) for key, at, n in self.backend.reads if key == pack_key(place.pack)
                ]
                end = place.offset + place.stored_size
                if sum(a <= place.offset and end <= b for a, b in reads) > 1:
                    twice.append(digest)
        return twice


@pytest.fixture(
    scope="module", name="chunks", params=[Codec.RAW, Codec.PLANES], ids=["raw", "zstd"]
)
def some_chunks(request: pytest.FixtureRequest) -> Chunks:
    return Chunks(MemoryBackend(f"passing-{os.urandom(4).hex()}"), request.param)


def assert_came(chunks: Chunks, wanted: Sequence[Iterable[int]], results: list[Any]) -> None:
    for numbers, got in zip(wanted, results, strict=True):
        assert not isinstance(got, Exception), got
        assert sorted(got) == sorted((i, chunks.raws[i]) for i in numbers)


EVERYTHING = range(30)


@settings(max_examples=FEW)
@given(
    st.lists(st.lists(st.integers(0, 29), max_size=40), min_size=1, max_size=6),
    st.integers(1, 40 * CHUNK),
)
@example([EVERYTHING] * 3, 1)
@example([[*EVERYTHING] * 2] * 5, 3 * CHUNK)
@example([(), (), EVERYTHING], 1 << 28)
@example([range(10 * r, 10 * r + 10) for r in range(3)], 1)
@example([range(5 * r, min(5 * r + 12, 30)) for r in range(5)], 3 * CHUNK)
def test_every_rank_gets_what_it_wants_and_nothing_is_read_twice(
    chunks: Chunks, wanted: list[list[int]], window: int
) -> None:
    results, _ = chunks.fetch(wanted, window)
    assert_came(chunks, wanted, results)
    assert not chunks.read_twice()


def test_what_one_rank_wants_alone_is_not_passed_on(chunks: Chunks) -> None:
    # Each rank wants a pack of its own, and the three have one chunk in common.
    wanted = [[*range(10 * r, 10 * r + 10), 2] for r in range(3)]
    results, ranks = chunks.fetch(wanted, 1 << 28)
    assert_came(chunks, wanted, results)
    # Packs are smaller than a unit here, so all of the first one is dealt out, nothing else.
    assert len(chunks.raws[2]) < sum(rank.sent for rank in ranks) < 4 * len(chunks.raws[2])
    wanted = [range(10 * r, 10 * r + 10) for r in range(3)]
    results, ranks = chunks.fetch(wanted)
    assert_came(chunks, wanted, results)
    assert max(rank.sent for rank in ranks) < 500


# --- damage, and ranks that see another index -------------------------------------------------


@pytest.fixture(name="own")
def chunks_to_damage() -> Chunks:
    return Chunks(MemoryBackend(f"passing-{os.urandom(4).hex()}"))


def damage(chunks: Chunks, number: int) -> None:
    """Damage a chunk at all its places: a small one has two."""
    repository = chunks.repository()
    digest = digest_of(chunks.raws[number])
    for place in repository.index.find_all(repository.view(), digest):
        key = pack_key(place.pack)
        content = bytearray(chunks.backend.read(key))
        content[place.offset + 5] ^= 1
        chunks.backend.delete(key)
        chunks.backend.write(key, bytes(content))


@pytest.mark.parametrize("window", [1, 1 << 28])
@pytest.mark.parametrize("reader_wants_it", [True, False])
def test_damage_is_raised_on_all_ranks_after_all_else_came(
    own: Chunks, window: int, reader_wants_it: bool
) -> None:
    damage(own, 4)
    wanted = [range(10), range(20), range(20, 30)]
    if not reader_wants_it:
        wanted[0] = range(5, 10)
    results, _ = own.fetch(wanted, window)
    for rank, error in enumerate(results):
        assert isinstance(error, DamagedError), results
        hurt = 4 in wanted[rank]
        assert error.paths == (("w4",) if hurt else ())
        assert ("hurt: w4" if hurt else "rank ") in str(error)
        assert digest_of(own.raws[4]).hex() in str(error)
        assert sorted(error.got) == [(i, own.raws[i]) for i in wanted[rank] if i != 4]


def test_nothing_stale_comes_in_place_of_what_is_damaged(own: Chunks) -> None:
    # Small chunks follow large ones in the same memory, and all of the small ones are damaged.
    large = [os.urandom(8) * (CHUNK // 8) for _ in range(8)]
    small = [os.urandom(8) * 20 for _ in range(8)]
    first = len(own.raws)
    own.raws += large + small
    for raw in large + small:
        put(own.repository(), [raw])
    for number in range(first + 8, first + 16):
        damage(own, number)
    results, _ = own.fetch([range(first, first + 16)] * 2, 1)
    for error in results:
        assert len(error.paths) == 8
        assert sorted(error.got) == [(first + i, raw) for i, raw in enumerate(large)]


# Requests are sorted as bytes, and one of these lengths comes before the right one there.
@pytest.mark.parametrize("less", [1, 1 << 16])
def test_a_wrong_length_is_damage_for_who_has_it(own: Chunks, less: int) -> None:
    digest = digest_of(own.raws[2])
    got: list[int] = []

    def work(comm: Comm) -> None:
        length = CHUNK - less * (comm.rank == 1)
        sink = lambda raw: got.append(comm.rank)  # noqa: E731
        fetch_shared(
            comm, own.repository(), [Want(digest, length, sink, f"w{comm.rank}")], ReadOptions()
        )

    results, _ = on_ranks(3, work)
    assert [error.paths for error in results] == [(), ("w1",), ()]
    assert sorted(got) == [0, 2]


def test_what_lies_nowhere_is_raised_on_all_ranks(own: Chunks) -> None:
    key = pack_key(own.places()[digest_of(own.raws[12])].pack)
    own.backend.delete(key)
    own.raws.append(b"never stored" * 10)
    results, _ = own.fetch([[1, 12], [1], [30, 1]])
    assert [error.paths for error in results] == [("w12",), (), ("w30",)]
    assert "its pack is missing" in str(results[0])
    assert "is in no pack of the index" in str(results[2])
    assert "rank 0: " in str(results[1])
    assert [error.got for error in results] == [[(1, own.raws[1])]] * 3


def test_what_is_damaged_in_one_place_is_read_from_another(own: Chunks) -> None:
    damage(own, 4)
    put(own.repository(), [own.raws[4]])
    wanted = [EVERYTHING] * 3
    results, _ = own.fetch(wanted)
    assert_came(own, wanted, results)


class OtherPlaces(Index):
    """An index that knows other places than the first ones, or at first none at all."""

    def __init__(self, known: Index, blind: bool) -> None:
        self.__dict__ = known.__dict__
        self._blind = blind

    def find(self, view: Any, digests: list[Digest], *, only_live: bool = False) -> list[Any]:
        if self._blind:
            self._blind = False
            return [None] * len(digests)
        return [(self.find_all(view, digest) or [None])[-1] for digest in digests]


@pytest.mark.parametrize("window", [1, 1 << 28])
def test_ranks_may_know_different_places(own: Chunks, window: int) -> None:
    put(own.repository(), own.raws[5:15])

    def repository(rank: int) -> Repository:
        opened = own.repository()
        if rank:
            opened.lookup.index = OtherPlaces(opened.index, blind=rank == 2)
        return opened

    wanted = [range(20), EVERYTHING, range(3, 12)]
    results, _ = own.fetch(wanted, window, repository)
    assert_came(own, wanted, results)


# --- real ranks -------------------------------------------------------------------------------


def memory_of_others() -> int:
    """Return how many bytes this process has touched of memory that it shares with others."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssShmem"].split()[0]) << 10


def fetched_by_rank(folder: str, numbers: list[tuple[bytes, int]], how: str) -> Any:
    forget_links()
    gc.collect()
    before = memory_of_others()
    backend = CountingBackend(LocalBackend(Path(folder)))
    got: list[bytes] = []

    def sink(raw: memoryview) -> None:
        if how == "sink fails" and dist.get_rank() == 1:
            raise ValueError("this sink is full")
        if how == "slow" and dist.get_rank() == 1:
            # Meanwhile the others get as far ahead as they can.
            for _ in range(100):
                digest_of(raw)
        got.append(bytes(raw))

    with joining.join(None, 30, "a test") as comm:
        wants = [Want(Digest(d), n, sink, "w") for d, n in numbers]
        fetch_shared(comm, Repository(backend), wants, ReadOptions(), window=3 * CHUNK)
    shared = memory_of_others() - before
    forget_links()
    return (
        sorted(map(digest_of, got)),
        sum(n for key, _, n in backend.reads if key.startswith("packs/")),
        shared,
    )


@pytest.mark.parametrize("size", [2, 4])
def test_real_ranks_read_each_byte_once(world: Worlds, tmp_path: Path, size: int) -> None:
    chunks = Chunks(LocalBackend(tmp_path / "store"))
    numbers = [(bytes(digest_of(raw)), len(raw)) for raw in chunks.raws]
    folder = str(tmp_path / "store")
    for how in ("all", "slow"):
        results = world(size).run(fetched_by_rank, folder, numbers, how)
        assert [found for found, *_ in results] == [sorted(digest for digest, _ in numbers)] * size
        assert sum(n for _, n, _ in results) < 1.1 * sum(map(len, chunks.raws))
        # Three windows, of a chunk for each rank or more; not all that was passed on.
        most = 3 * (max(3, size) * CHUNK + size * (4 << 10))
        assert CHUNK < max(shared for *_, shared in results) < most, results
    errors = world(size).run(fetched_by_rank, folder, numbers, "sink fails", expect_errors=True)
    assert all("this sink is full" in str(error) for error in errors)
    assert isinstance(errors[1], ValueError)
    assert isinstance(errors[0], RankError)
