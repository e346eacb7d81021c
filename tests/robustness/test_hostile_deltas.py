"""Deltas that somebody made up: all errors are typed and name the tensor; memory is bounded."""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard

from casnap import Store
from casnap.errors import CasnapError, DamagedError, UnsupportedFormatError
from casnap.format.delta import MOST_LINKS, apply_delta, encode_delta
from casnap.format.digest import digest_of
from casnap.maintenance.survey import Survey
from casnap.storage.packs.chunk_reads import Want
from tests.support.faults import in_child
from tests.support.forger import (
    STATE,
    Forger,
    assert_refused,
    chunks,
    limit_memory,
    one_plane,
    tensor,
)

SIZE = 4096
RAW, OTHER = random.Random(1).randbytes(SIZE), random.Random(2).randbytes(SIZE)


@pytest.fixture
def forger(tmp_path: Path, cache_dir: Path) -> Forger:
    forger = Forger(tmp_path / "store")
    forger.keep_good()
    return forger


def change(raw: bytes, step: int) -> bytes:
    return struct.pack("<I", step) + raw[4:]


def delta_of(raw: bytes, base: bytes) -> bytes:
    stored = encode_delta(raw, base, digest_of(base))
    assert stored is not None
    return stored


def head(base: bytes, form: int, width: int = 1, count: int = 0) -> bytes:
    return struct.pack("<32sBBI", digest_of(base), form, width, count)


def publish(forger: Forger, digest: bytes) -> None:
    tree = forger.tree(STATE, ["/x", tensor([SIZE // 4], chunks(SIZE, digest))])
    forger.publish({"s": tree})


def on_itself(forger: Forger) -> None:
    forger.delta(digest_of(RAW), digest_of(RAW), head(RAW, 1) + one_plane(b"") * 2, SIZE)


def a_circle(forger: Forger) -> None:
    for raw, base in ((RAW, change(RAW, 1)), (change(RAW, 1), RAW)):
        forger.delta(digest_of(raw), digest_of(base), delta_of(raw, base), SIZE)


def a_missing_base(forger: Forger) -> None:
    base = change(RAW, 1)
    forger.delta(digest_of(RAW), digest_of(base), delta_of(RAW, base), SIZE)


def a_longer_base(forger: Forger) -> None:
    base = RAW + RAW
    forger.add(base)
    stored = delta_of(base[:SIZE], change(RAW, 1))[32:]
    forger.delta(digest_of(RAW), digest_of(base), bytes(digest_of(base)) + stored, SIZE)


def a_shorter_base(forger: Forger) -> None:
    base = RAW[: SIZE // 2]
    forger.add(base)
    stored = delta_of(RAW, change(RAW, 1))[32:]
    forger.delta(digest_of(RAW), digest_of(base), bytes(digest_of(base)) + stored, SIZE)


def another_chunk(forger: Forger) -> None:
    base = change(RAW, 1)
    forger.add(base)
    forger.delta(digest_of(RAW), digest_of(base), delta_of(change(RAW, 2), base), SIZE)


def a_bomb(forger: Forger) -> None:
    forger.add(OTHER)
    large = one_plane(frame=zstandard.ZstdCompressor(level=1).compress(bytes(1 << 30)))
    forger.delta(digest_of(RAW), digest_of(OTHER), head(OTHER, 0) + large, SIZE)


def a_sparse_bomb(forger: Forger) -> None:
    forger.add(OTHER)
    stored = head(OTHER, 1, 1, (1 << 32) - 1) + one_plane(bytes(4)) * 2
    forger.delta(digest_of(RAW), digest_of(OTHER), stored, SIZE)


def changes_beyond_the_end(forger: Forger) -> None:
    forger.add(OTHER)
    gaps = struct.pack("<BII", 2, 1, 1) + b"\xff\xff"
    forger.delta(
        digest_of(RAW), digest_of(OTHER), head(OTHER, 1, 1, 1) + gaps + one_plane(b"x"), SIZE
    )


def a_chain(forger: Forger, links: int) -> None:
    """Store a chunk as a chain of so many deltas."""
    raws = [RAW, *(change(RAW, step) for step in range(links))]
    for raw, base in pairwise(raws):
        forger.delta(digest_of(raw), digest_of(base), delta_of(raw, base), SIZE)
    forger.add(raws[-1])


def too_long_a_chain(forger: Forger) -> None:
    a_chain(forger, MOST_LINKS + 1)


def a_very_long_chain(forger: Forger) -> None:
    a_chain(forger, 400)


CASES = (
    on_itself,
    a_circle,
    a_missing_base,
    a_longer_base,
    a_shorter_base,
    another_chunk,
    a_bomb,
    a_sparse_bomb,
    changes_beyond_the_end,
    too_long_a_chain,
    a_very_long_chain,
)


@pytest.mark.parametrize("case", CASES)
def test_hostile_deltas(forger: Forger, case: object) -> None:
    assert callable(case)
    case(forger)
    publish(forger, digest_of(RAW))
    assert_refused(forger.folder)

    def work() -> None:
        limit_memory()
        report = Store(forger.folder).check(data=True)
        hurt = {hurt for damage in report.damages for hurt in damage.hurts}
        assert [(h.snapshot, h.path) for h in hurt] == [("evil", "s/x")], report
        for collect in (lambda s: s.gc(grace=0), lambda s: s.repair(), lambda s: s.gc(grace=0)):
            with suppress(CasnapError):
                collect(Store(forger.folder))
        good = Store(forger.folder)["good"].read_object("good/x")
        assert good.sum() == sum(range(100_000))

    assert in_child(work) == 0


@pytest.mark.parametrize("is_delta", [False, True])
def test_a_circle_that_ends_elsewhere_is_whole(forger: Forger, is_delta: bool) -> None:
    """Of two chunks that stand on each other, one is also stored as it is, or upon another one."""
    a_circle(forger)
    if is_delta:
        other = change(RAW, 9)
        forger.add(other)
        forger.delta(digest_of(RAW), digest_of(other), delta_of(RAW, other), SIZE)
    else:
        forger.add(RAW)
    publish(forger, digest_of(change(RAW, 1)))
    store = Store(forger.folder)
    assert store.check(data=True).ok
    assert store["evil"].read_object("s/x").numpy().tobytes() == change(RAW, 1)


def test_a_base_that_pack_and_index_name_wrongly(forger: Forger) -> None:
    """A collector would keep another chunk. Reads go by the delta; a check of all bytes finds it.

    A repair writes the chunk anew.
    """
    base = change(RAW, 1)
    forger.add(base)
    forger.add(OTHER)
    forger.delta(digest_of(RAW), digest_of(OTHER), delta_of(RAW, base), SIZE)
    publish(forger, digest_of(RAW))
    store = Store(forger.folder)
    assert store["evil"].read_object("s/x").numpy().tobytes() == RAW
    for report in (store.check(data=True), store.check(data=True, name="evil")):
        [damage] = report.damages
        assert damage.kind == "malformed"
        assert digest_of(base).hex() in damage.message
    assert store.repair().ok
    for _ in range(3):
        store.gc(grace=0, repack=1)
    assert store["evil"].read_object("s/x").numpy().tobytes() == RAW
    assert store.check(data=True).ok


@pytest.mark.parametrize("count", [0, 1])
def test_a_delta_of_all_elements_counts_none(forger: Forger, count: int) -> None:
    dense = head(OTHER, 0, 1, count) + one_plane(b"\x80" * SIZE)
    chunk = bytearray(RAW)
    if count:
        with pytest.raises(DamagedError, match="counts some"):
            apply_delta(memoryview(dense), chunk)
    else:
        apply_delta(memoryview(dense), chunk)
    assert chunk == RAW


@pytest.mark.parametrize("links", [MOST_LINKS, MOST_LINKS + 1])
def test_the_longest_chain(forger: Forger, links: int) -> None:
    """Readers take no longer one than the format allows, and a check finds that without reading."""
    a_chain(forger, links)
    publish(forger, digest_of(RAW))
    store = Store(forger.folder)
    damages = store.check().damages
    if links == MOST_LINKS:
        assert store["evil"].read_object("s/x").numpy().tobytes() == RAW
        assert not damages
        assert store.check(data=True).ok
        return
    with pytest.raises(DamagedError, match="chain of deltas is too long"):
        store["evil"].read_object("s/x")
    [damage] = damages
    assert damage.kind == "malformed"
    assert f"more than {MOST_LINKS} deltas" in damage.message


def test_a_chain_may_be_short_at_another_place(forger: Forger) -> None:
    a_chain(forger, MOST_LINKS + 1)
    middle = change(RAW, MOST_LINKS // 2)
    forger.add(middle)
    publish(forger, digest_of(RAW))
    assert Store(forger.folder)["evil"].read_object("s/x").numpy().tobytes() == RAW
    assert Store(forger.folder).check(data=True).ok


def test_bases_are_kept_though_no_flag_says_that_there_are_deltas(forger: Forger) -> None:
    """They lie in the pack of a snapshot that is gone. The segment alone says what needs them."""
    forger.rows.clear()
    store = Store(forger.folder)
    entry = store["good"].contents.entry("good/x")
    base = store["good"].contents.chunks(*entry[:2])[0][0]
    raws: list[bytes] = []
    store._view.repository.fetch([Want(base, -1, lambda raw: raws.append(bytes(raw)), "")])
    raw = change(raws[0], 7)
    forger.delta(digest_of(raw), base, delta_of(raw, raws[0]), len(raw))
    tree = forger.tree(STATE, ["/x", tensor([len(raw) // 4], chunks(len(raw), digest_of(raw)))])
    forger.publish({"s": tree})
    root = Store(forger.folder)._view.repository.newest()
    assert root.read_features == root.write_features == ()
    for _ in range(3):
        Store(forger.folder).gc(grace=0)
    assert [s.name for s in Store(forger.folder).snapshots()] == ["evil"]
    assert Store(forger.folder)["evil"].read_object("s/x").numpy().tobytes() == raw
    assert Store(forger.folder).check(data=True).ok


def test_the_root_and_the_segment_say_how_many_deltas_there_are(forger: Forger) -> None:
    """A collector that believed a root that says 0 would not keep the bases."""
    a_chain(forger, 2)
    forger.deltas = 0
    publish(forger, digest_of(RAW))
    for use in (lambda s: s["evil"].read_object("s/x"), lambda s: s.gc(grace=0)):
        with pytest.raises(DamagedError, match="2 of them of deltas"):
            use(Store(forger.folder))
    assert not Store(forger.folder).check().ok


def test_a_chain_may_end_in_a_codec_that_is_not_known(forger: Forger) -> None:
    """Then neither the delta nor its base is damaged, and a collection keeps both."""
    base = change(RAW, 1)
    forger.add(base, codec=9)
    forger.delta(digest_of(RAW), digest_of(base), delta_of(RAW, base), SIZE)
    publish(forger, digest_of(RAW))
    for _ in range(3):
        Store(forger.folder).gc(grace=0)
    with pytest.raises(UnsupportedFormatError, match="codec 9"):
        Store(forger.folder)["evil"].read_object("s/x")
    report = Store(forger.folder).check(data=True)
    assert report.ok, report.damages
    [unknown] = report.unsupported
    assert [(h.snapshot, h.path) for h in unknown.hurts] == [("evil", "s/x")]
    assert Store(forger.folder).repair().ok
    index = Survey(Store(forger.folder)._view.repository).index
    assert index.of(digest_of(RAW))
    assert index.of(digest_of(base))
