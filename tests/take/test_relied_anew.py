"""A pack that a writer relies on is collected, but was copied before: the writer uses the copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from casnap import StateDict, Store
from casnap.errors import DamagedError, FencedError
from casnap.format.digest import Digest
from casnap.storage.lookup.index import Index
from casnap.storage.writing.rank_parts import OtherRanks
from casnap.storage.writing.session import Session
from tests.support.faults import CHUNK
from tests.support.written import change_of, commit

pytestmark = pytest.mark.usefixtures("unannounced")
KEPT = torch.arange(CHUNK // 4, dtype=torch.int32)


def state(**more: torch.Tensor) -> dict[str, StateDict]:
    return {"s": StateDict(kept=KEPT, **more)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store in which a chunk is needed, in a pack that is mostly not."""
    store = Store(tmp_path / "store", chunk_size=CHUNK)
    store.take(state(rest=torch.randn(9 * CHUNK // 4)), "full")
    store.take(state(), "kept")
    return store


@contextmanager
def writer(store: Store) -> Iterator[tuple[Session, Callable[[], None]]]:
    """Give a session that relies on the chunk, and what has it copied, and its pack deleted."""
    with change_of(Store(store.uri)) as session:
        chunks = session.writer()
        chunks.store([memoryview(bytearray(KEPT.numpy().tobytes()))])
        chunks.finish()

        def repack() -> None:
            store.delete("full")
            assert Store(store.uri).gc(grace=0).repacked_packs

        yield session, repack


def assert_whole(store: Store) -> None:
    store.take(state(), "again")
    store.gc(grace=0)
    assert store.check(data=True).ok
    assert torch.equal(store["again"].read_object("s/kept"), KEPT)


def test_copies_are_relied_on(store: Store) -> None:
    with writer(store) as (session, repack):
        repack()
        commit(session)
    assert_whole(store)


def test_what_is_nowhere_any_more(store: Store) -> None:
    with writer(store) as (session, _):
        store.delete("full")
        store.delete("kept")
        store.gc(grace=0)
        with pytest.raises(FencedError, match="grace"):
            commit(session)


def test_a_look_that_fails_forgets_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is repeated on a newer root; the pack relied on must be looked for again."""
    find = Index.find
    with writer(store) as (session, _):
        for name in ("full", "kept"):
            store.delete(name)
        store.gc(grace=0)
        store.take({"s": StateDict(other=torch.randn(9 * CHUNK // 4))}, "other")

        def fail(*_args: object, **_options: object) -> list[Digest]:
            monkeypatch.setattr(Index, "find", find)
            store.delete("other")
            store.gc(grace=0)
            raise DamagedError("the cache broke, and the segments are gone")

        monkeypatch.setattr(Index, "find", fail)
        with pytest.raises(FencedError):
            commit(session)


def test_ranks_that_rely_on_what_a_newer_root_has(store: Store) -> None:
    """Asked to move, a rank looks at a newer root than the one that rank 0 is about to follow."""
    with writer(store) as (session, repack), change_of(store) as leader:
        handover = session.part(2)
        store.take({"s": StateDict(x=torch.randn(CHUNK))}, "scratch")
        store.delete("scratch")
        store.gc(grace=0, repack=0)
        asked = []

        def move(seq: int) -> list[object]:
            asked.append(seq)
            if len(asked) == 1:
                repack()
            return [session.part(2, seq)]

        commit(leader, others=OtherRanks([handover], move))  # type: ignore[arg-type]
        assert asked
    assert_whole(store)
