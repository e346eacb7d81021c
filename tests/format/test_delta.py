"""Deltas: chunks as how they differ from another one."""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from casnap.errors import DamagedError
from casnap.format.delta import apply_delta, base_of, changed_by, encode_delta, is_sparse
from casnap.format.digest import Digest, digest_of


def changed(base: bytes, share: float, width: int, seed: int) -> bytes:
    """Return some bytes of which a share of the elements differ."""
    choose = random.Random(seed)
    raw = bytearray(base)
    for at in range(0, len(base) - width + 1, width):
        if choose.random() < share:
            raw[at] ^= choose.randrange(1, 256)
    return bytes(raw)


def applied(delta: bytes, base: bytes) -> bytes:
    raw = bytearray(base)
    apply_delta(memoryview(delta), raw)
    return bytes(raw)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 5000),
    st.sampled_from([0.0, 0.001, 0.1, 0.3, 1.0]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 99),
)
def test_a_delta_gives_the_chunk(nbytes: int, share: float, width: int, seed: int) -> None:
    base = random.Random(seed).randbytes(nbytes)
    raw = changed(base, share, width, seed)
    delta = encode_delta(raw, base, digest_of(base))
    if delta is not None:
        assert applied(delta, base) == raw
        assert base_of(delta) == digest_of(base)
        assert len(delta) < nbytes
        told = [(w, changed_by(memoryview(delta), memoryview(raw), w)) for w in (1, 2, 4, 8)]
        listed = [(w, found) for w, found in told if found is not None]
        assert len(listed) == is_sparse(delta)
        for its_width, (places, before, values) in listed:
            old, new = np.frombuffer(base, f"<u{its_width}"), np.frombuffer(raw, f"<u{its_width}")
            assert np.array_equal(places, np.flatnonzero(old != new))
            assert np.array_equal(before, old[places])
            assert np.array_equal(values, new[places])


def test_few_changes_take_few_bytes() -> None:
    base = random.Random(1).randbytes(1 << 20)
    for share, most in ((0.001, 0.004), (0.01, 0.03), (0.1, 0.2)):
        delta = encode_delta(changed(base, share, 2, 2), base, digest_of(base))
        assert delta is not None
        assert is_sparse(delta)
        assert len(delta) < most * len(base)


def test_nothing_in_common_makes_no_delta() -> None:
    base, other = random.Random(1).randbytes(1 << 16), random.Random(2).randbytes(1 << 16)
    assert encode_delta(other, base, digest_of(base)) is None
    assert encode_delta(other[:-1], base, digest_of(base)) is None


def test_steps_up_and_down_change_the_last_byte_of_each_number() -> None:
    choose = random.Random(1)
    base = struct.pack("<65536f", *(choose.gauss(0, 0.02) for _ in range(1 << 16)))
    bits = struct.unpack("<65536I", base)
    raw = struct.pack("<65536I", *(number + choose.choice((-1, 1)) for number in bits))
    delta = encode_delta(raw, base, digest_of(base))
    assert delta is not None
    assert not is_sparse(delta)
    assert len(delta) < 0.06 * len(base)  # XOR takes 0.07: a carry changes several bits
    assert applied(delta, base) == raw


def test_deltas_of_a_chain_apply_in_one_buffer() -> None:
    chunks = [random.Random(1).randbytes(1 << 16)]
    for step in range(5):
        chunks.append(changed(chunks[-1], 0.4 if step % 2 else 0.02, 4, step))
    deltas = [encode_delta(raw, base, digest_of(base)) for base, raw in pairwise(chunks)]
    raw = bytearray(chunks[0])
    for delta in deltas:
        assert delta is not None
        apply_delta(memoryview(delta), raw)
    assert raw == chunks[-1]


def test_impossible_deltas() -> None:
    base = bytes(1 << 12)
    head = bytes(Digest(bytes(32)))
    for text in (
        b"",
        head,
        head + bytes([2, 1]) + bytes(4),  # no such form
        head + bytes([0, 3]) + bytes(4),  # no such width
        head + bytes([1, 2]) + (1 << 31).to_bytes(4, "little"),  # more elements than there are
        head + bytes([1, 2]) + (3).to_bytes(4, "little"),  # no planes
    ):
        with pytest.raises(DamagedError):
            apply_delta(memoryview(text), bytearray(base))


@settings(max_examples=300, deadline=None)
@given(
    form=st.integers(0, 2),
    width=st.sampled_from([0, 1, 2, 3, 4, 8, 255]),
    count=st.one_of(st.integers(0, 70), st.integers(0, (1 << 32) - 1)),
    planes=st.lists(
        st.tuples(st.integers(0, 9), st.binary(max_size=80), st.booleans()), max_size=3
    ),
    rest=st.binary(max_size=20),
)
def test_any_bytes_are_refused_or_applied(
    form: int, width: int, count: int, planes: list[tuple[int, bytes, bool]], rest: bytes
) -> None:
    """Also those whose parts are whole frames, of any length and number."""
    body = b""
    for number, content, is_compressed in planes:
        frame = zstandard.compress(content) if is_compressed else content
        body += struct.pack(f"<B{number}I", number, *[len(frame)] * number) + frame * number
    delta = bytes(32) + struct.pack("<BBI", form, width, count) + body + rest
    for nbytes in (0, 7, 64):
        raw = bytearray(nbytes)
        with suppress(DamagedError):
            apply_delta(memoryview(delta), raw)
        assert len(raw) == nbytes
