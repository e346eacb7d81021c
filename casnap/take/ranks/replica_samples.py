"""Samples of tensors, by which ranks check that their replicas are equal.

A tensor of up to 64 KiB is compared as a whole. From a larger tensor, 64 bytes are drawn at a
random place in each eighth of a chunk. A quarter of a chunk always contains such a place. So ranks
notice replicas that differ throughout a quarter of a chunk, as training makes them differ. They
mostly miss a single element that differs. With chunks of 1 MiB, this reads about a two-thousandth
of the bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from casnap.format.digest import digest_of
from casnap.runtime.buffers import view_at

_WHOLE_BYTES = 64 << 10
_LINE_BYTES = 64
_LINES_A_CHUNK = 8
_SAMPLE_BYTES = 16
# The dtype that tensors are compared as, by item size; as floats, equal NaNs would differ.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Sampler:
    """Takes samples that ranks can compare.

    Args:
        seed: Chooses the places; the same on all ranks, and new for each take.
        chunk_size: The chunk size of the store, in bytes.
    """

    def __init__(self, seed: int, chunk_size: int) -> None:
        self._seed = seed
        self._stride = chunk_size // _LINES_A_CHUNK
        self._places: dict[tuple[int, int], torch.Tensor] = {}

    def samples(self, contents: Sequence[torch.Tensor | bytes]) -> list[bytes]:
        """Return a short digest for each content. Two ranks with equal contents get equal digests.

        The digest of a large tensor covers only the elements drawn from it.
        """
        samples = [b""] * len(contents)
        elsewhere: defaultdict[torch.device, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        for i, content in enumerate(contents):
            if isinstance(content, bytes):
                samples[i] = digest_of(content)[:_SAMPLE_BYTES]
                continue
            words = self._drawn(content)
            if words.is_cpu:
                samples[i] = _digest(words)
            else:
                elsewhere[words.device].append((i, words.reshape(-1).view(torch.uint8)))
        for drawn in elsewhere.values():
            # Each device is copied from once, not once for each tensor.
            joined = torch.cat([words for _, words in drawn]).cpu()
            each = torch.split(joined, [len(words) for _, words in drawn])
            for (i, _), words in zip(drawn, each, strict=True):
                samples[i] = _digest(words)
        return samples

    def _drawn(self, content: torch.Tensor) -> torch.Tensor:
        if content.nbytes <= _WHOLE_BYTES:
            return _as_words(content).contiguous()
        words = _as_words(content)
        # take() works for any layout, in the order of the elements, and copies only the drawn ones.
        return torch.take(words, self._positions(words.numel(), words.itemsize).to(words.device))

    def _positions(self, count: int, itemsize: int) -> torch.Tensor:
        """Return the flat indices of the elements that make up the sample of a tensor.

        Args:
            count: The number of elements of the tensor.
            itemsize: The bytes of one element.
        """
        places = self._places.get((count, itemsize))
        if places is None:
            stride, line = self._stride // itemsize, _LINE_BYTES // itemsize
            generator = torch.Generator("cpu").manual_seed(self._seed)
            starts = torch.arange(0, count, stride, device="cpu")
            room = ((count - starts).clamp(max=stride) - line + 1).clamp(min=1)
            drawn = torch.rand(len(starts), generator=generator, dtype=torch.float64, device="cpu")
            starts = starts + (drawn * room).long()
            places = starts[:, None] + torch.arange(line, device="cpu")
            places = self._places[count, itemsize] = places.clamp(max=count - 1)
        return places


def _as_words(content: torch.Tensor) -> torch.Tensor:
    if content.itemsize not in _WORDS:  # complex128
        content = torch.view_as_real(content)
    return content.view(_WORDS[content.itemsize])


def _digest(words: torch.Tensor) -> bytes:
    return digest_of(view_at(words.data_ptr(), words.nbytes))[:_SAMPLE_BYTES]
