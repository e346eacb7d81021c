"""The compressed form of chunks: it is read back, and numbers are small in it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casnap.errors import DamagedError, UnsupportedFormatError
from casnap.format.codec import BY_SIZE, WHOLE_CODECS, Codec, compress, decompress

ELEMENTS = [torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]


def assert_reads_back(raw: bytes) -> None:
    stored = compress(memoryview(raw))
    if stored is not None:
        assert len(stored) < len(raw)
        assert decompress(Codec.PLANES, memoryview(stored), len(raw)) == raw


@given(st.binary(max_size=64), st.integers(0, 300), st.binary(max_size=9))
def test_any_bytes_are_read_back(block: bytes, times: int, tail: bytes) -> None:
    assert_reads_back(block * times + tail)


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_numbers_are_read_back(dtype: torch.dtype, cut: int) -> None:
    x = (torch.randn(20_000) * 50).to(dtype)
    raw = x.view(torch.uint8).numpy().tobytes()
    assert_reads_back(raw[: len(raw) - cut])


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.bfloat16, 0.70), (torch.float32, 0.85), (torch.int64, 0.27)], ids=str
)
def test_how_small_numbers_are(dtype: torch.dtype, most: float) -> None:
    """The exponents of weights take few values, and so do the high bytes of tokens."""
    x = (
        torch.randn(1 << 17) * 0.02
        if dtype.is_floating_point
        else torch.randint(50_000, (1 << 17,))
    )
    raw = x.to(dtype).view(torch.uint8).numpy().tobytes()
    stored = compress(raw)
    assert stored is not None
    assert len(stored) <= most * len(raw)


def test_what_does_not_shrink_is_not_compressed() -> None:
    assert compress(torch.randint(256, (1 << 16,), dtype=torch.uint8).numpy().tobytes()) is None
    assert compress(b"") is None


@pytest.mark.parametrize("width", [0, 3, 5, 255])
def test_a_wrong_width_is_damage(width: int) -> None:
    stored = bytearray(compress(bytes(5000)) or b"")
    stored[0] = width
    with pytest.raises(DamagedError):
        decompress(Codec.PLANES, memoryview(stored), 5000)


def test_each_codec_has_its_place_and_its_case() -> None:
    """A codec that is forgotten somewhere would be taken for planes."""
    assert sorted(BY_SIZE) == sorted(WHOLE_CODECS)
    raw = bytes(4096)
    for codec in Codec:
        if codec not in WHOLE_CODECS:
            with pytest.raises(ValueError, match="two chunks"):
                compress(raw, codec)
            with pytest.raises(UnsupportedFormatError):
                decompress(codec, memoryview(raw), len(raw))
            continue
        stored_form = compress(raw, codec)
        assert decompress(codec, memoryview(stored_form or raw), len(raw)) == raw
