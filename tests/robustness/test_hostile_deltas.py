"""Deltas that somebody made up: all errors are typed and name the tensor; memory is bounded."""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard

from casnap import Store
from casnap.errors import CasnapError
from casnap.format.delta import encode_delta
from casnap.format.digest import digest_of
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


def too_long_a_chain(forger: Forger) -> None:
    forger.add(change(RAW, 100))
    for step in range(100):
        raw, base = change(RAW, step), change(RAW, step + 1)
        forger.delta(digest_of(raw), digest_of(base), delta_of(raw, base), SIZE)
    base = change(RAW, 0)
    forger.delta(digest_of(RAW), digest_of(base), delta_of(RAW, base), SIZE)


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
