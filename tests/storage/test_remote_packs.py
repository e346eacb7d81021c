"""Packs on a remote store: their names, moves past fences, and reads of several at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from casnap import StateDict, Store
from casnap.format.codec import Codec
from casnap.format.digest import digest_of
from casnap.format.records import Place, pack_key
from casnap.runtime.buffers import SLOTS, shared_pool
from casnap.runtime.threads import Crew
from casnap.runtime.typing import override
from casnap.storage.commit_log.roots import newest_root
from casnap.storage.packs.pack_writer import CHUNKS, PackWriter
from tests.support.remote import RemoteDouble
from tests.support.written import put_next_root


def writer_of(backend: RemoteDouble, crew: Crew, count: int) -> PackWriter:
    """Return a writer that has written so many packs, of one chunk each."""
    writer = PackWriter(backend, 0, b"\0", CHUNKS, shared_pool(1), crew, Codec.RAW)
    for n in range(count):
        pack = writer.new_pack()
        content = n.to_bytes(8, "big")
        backend.write(pack_key(pack), content)
        writer.packs.append(pack)
        writer.records.append((digest_of(content), Place(pack, 0, 8, 8, Codec.RAW)))
        writer.lengths[pack] = 8
    return writer


def assert_whole(backend: RemoteDouble, writer: PackWriter) -> None:
    for digest, place in writer.records:
        content = backend.read(pack_key(place.pack))
        assert digest_of(content) == digest
        assert place.pack in writer.lengths


def test_2_000_packs_move_past_fence_after_fence(tmp_path: Path) -> None:
    """Each is copied once a fence, several at a time; the old names are left to the collector."""
    backend, count = RemoteDouble(str(tmp_path)), 2_000
    with Crew() as crew:
        writer = writer_of(backend, crew, count)
        backend.reset()
        for fence in (5, 9, 12):
            moved = writer.move(fence)
            assert len(moved) == count
            assert {int.from_bytes(pack[:6], "big") for pack in writer.packs} == {fence}
        assert backend.requests == {"copy": 3 * count}
        assert_whole(backend, writer)


def test_moves_run_together(tmp_path: Path) -> None:
    backend = RemoteDouble(str(tmp_path))
    with Crew() as crew:
        writer = writer_of(backend, crew, 100)
        backend.latency = 0.002
        writer.move(3)
        assert 2 < backend.most_at_once <= backend.in_flight
        # A pack that a collector has deleted ends the move.
        backend.delete(pack_key(writer.packs[50]))
        with pytest.raises(FileNotFoundError):
            writer.move(4)


def test_names_are_spread_over_prefixes(tmp_path: Path) -> None:
    with Crew() as crew:
        writer = writer_of(RemoteDouble(str(tmp_path)), crew, 2000)
        assert len({pack_key(pack)[:8] for pack in writer.packs}) > 200


class Fencing(RemoteDouble):
    """A store whose collector raises the fence whenever a take is about to commit."""

    fences = 0

    @override
    def put_if_absent(self, key: str, content: bytes) -> bool:
        if self.fences and key.startswith("roots/"):
            self.fences -= 1
            double = RemoteDouble("/" + self.uri.removeprefix("double://"))
            root = newest_root(double)
            put_next_root(double, root, fence=root.seq + 1)
        return super().put_if_absent(key, content)


def test_a_take_beside_repeated_fences(tmp_path: Path) -> None:
    name = str(tmp_path)
    Store(RemoteDouble(name)).take({"m": StateDict(a=torch.ones(500_000))}, "first")
    backend = Fencing(name)
    backend.fences = 4
    store = Store(backend)
    state = {"m": StateDict(a=torch.arange(500_000.0))}
    store.take(state, "second")
    # Chunks, trees and the table; each try writes one more pack, with the newer table.
    assert backend.requests["copy"] <= 3 + 4 + 5 + 6
    assert torch.equal(store["second"].read_object("m/a"), state["m"]["a"])
    assert Store(RemoteDouble(name)).check(data=True).ok


def test_packs_are_read_together(tmp_path: Path) -> None:
    """At least as many as there are slots; a remote backend divides each into requests."""
    name = str(tmp_path)
    store = Store(RemoteDouble(name))
    for n in range(3):
        store.take({"m": StateDict(a=torch.full((8 << 20,), float(n)).cumsum(0))}, f"{n}")
    backend = RemoteDouble(name)
    backend.latency = 0.3
    wanted = torch.full((8 << 20,), 2.0).cumsum(0)
    assert torch.equal(Store(backend)["2"].read_object("m/a"), wanted)
    assert backend.most_at_once >= SLOTS


def test_many_small_reads_run_together(tmp_path: Path) -> None:
    name = str(tmp_path)
    store = Store(RemoteDouble(name))
    drawn = [torch.randn(2000, generator=torch.Generator().manual_seed(n)) for n in range(30)]
    for n in range(30):
        store.take({"m": StateDict(**{f"w{i}": t for i, t in enumerate(drawn[: n + 1])})}, f"{n}")
    backend = RemoteDouble(name)
    backend.latency = 0.05
    target = {"m": StateDict(**{f"w{i}": torch.zeros(2000) for i in range(30)})}
    Store(backend)["29"].restore(target)
    assert all(torch.equal(target["m"][f"w{i}"], t) for i, t in enumerate(drawn))
    assert backend.most_at_once > 6
