"""Chunks that are copied are read into the packs that are written next, and proven there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from casnap import StateDict, Store
from casnap.backends.base import Target
from casnap.backends.local.backend import LocalBackend
from casnap.backends.remote.backend import together
from casnap.backends.remote.client import Transfer
from casnap.backends.remote.retries import Operation, Retries
from casnap.format.digest import digest_of
from casnap.format.records import PackId, Segment, pack_key
from casnap.runtime.typing import override
from casnap.storage.commit_log.roots import newest_root
from casnap.storage.reading.repository import Repository
from casnap.storage.writing.copying import copy_verified, one_at_a_time
from tests.support.random_segments import put_segment
from tests.support.written import change_of, commit, put_next_root

HALF = 512 << 10


class _Changing(LocalBackend):
    """A pack changes once its first chunk was read."""

    change: tuple[int, bytes] | None = None

    @override
    def filled(self, key: str, targets: Sequence[Target], use: Callable[[int], None]) -> None:
        def then_change(number: int) -> None:
            use(number)
            if self.change is not None:
                with Path(self.folder, "casnap-store", key).open("r+b") as pack:
                    pack.seek(self.change[0])
                    pack.write(self.change[1])

        super().filled(key, targets, then_change)


def test_records_that_overlap_in_a_pack_that_changes(tmp_path: Path) -> None:
    """The second is read where the first was proven; both would be named."""
    store = Store(tmp_path / "source").make()
    store.take({"m": StateDict(w=torch.randn(1 << 19))}, "a")
    contents = store["a"].contents
    inner, entry, _ = contents.entry("m/w")
    digest = contents.chunks(inner, entry)[0][0]
    [place] = store._view.repository.index.find(store._view.repository.view(), [digest])
    assert place is not None
    content = bytearray((tmp_path / "source" / "casnap-store" / pack_key(place.pack)).read_bytes())
    begin = place.offset + HALF
    content[begin : begin + 64] = os.urandom(64)
    other = digest_of(bytes(content[begin : begin + place.raw_size]))
    backend = _Changing(tmp_path / "source")
    backend.change = begin, bytes(content[begin : begin + 64])
    root = newest_root(backend)
    overlapping = msgspec.structs.replace(place, offset=begin)
    records = Segment((PackId(place.pack),), [(other, overlapping)])
    more = put_segment(backend, records)
    assert put_next_root(backend, root, segments=(*root.segments, more)) is not None
    there = Store(tmp_path / "there").make()
    with one_at_a_time(), change_of(there) as session:
        wanted = [(digest, False), (other, False)]
        copy_verified(Repository(backend), wanted, session.new_packs, lambda *_: None)
        commit(session)
    assert there.check(data=True).ok
    for ident in (digest, other):
        assert there._view.repository.index.find(there._view.repository.view(), [ident]) != [None]


def test_a_pack_whose_last_room_was_not_filled(tmp_path: Path) -> None:
    """It ends where its last chunk ends: ``check`` and readers compare its length with that."""
    store = Store(tmp_path).make()
    chunk = os.urandom(1 << 20)
    with change_of(store) as session:
        room = session.new_packs.room(2 << 20, 2)
        assert room is not None
        room.view[:] = chunk + bytes(range(256)) * (1 << 12)
        room.keep([(digest_of(chunk), 0, len(chunk))])
        commit(session)
    report = store.check(data=True)
    assert report.ok, report.damages


def test_a_read_has_ended_however_often_it_is_cancelled() -> None:
    """What it writes to is handed on then."""
    begun, ended = [], []

    async def lingers() -> None:
        try:
            begun.append(True)
            await asyncio.Event().wait()
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            ended.append(True)

    async def fails() -> None:
        await asyncio.sleep(0)
        raise OSError

    async def interrupted() -> None:
        reads = Operation("read", Retries()).watched(lingers(), Transfer())
        work = asyncio.ensure_future(together([reads, fails()]))
        while not work.done():
            await asyncio.sleep(0)
            if begun:
                work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert ended

    asyncio.run(interrupted())
