"""The smallest form of a chunk that its readers can afford: as a delta, in planes, or as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from casnap.format.codec import Codec, compress
from casnap.format.delta import MOST_LINKS, MOST_STORED, encode_delta
from casnap.format.digest import Digest
from casnap.format.records import Place, Record, with_base
from casnap.storage.lookup.chains import can_carry, chains_below
from casnap.storage.lookup.index import Index, IndexView
from casnap.storage.writing.new_packs import NewPacks

# A reader takes the longer for a link the more of the chunk it changes, up to that of a dense one.
# So a chain has at most 32 links that take up to 1/56 of it each, or 4 that take 1/7 or more.
_WEIGHT, _MOST_WEIGHT = 56.0, 8.0
# If a delta takes more than this, the chunk alone may take less.
_LARGE_SHARE = 0.5


class Form(NamedTuple):
    """How a chunk is to be stored.

    Attributes:
        content: The bytes.
        codec: What they are.
        base: The base, if they are a delta.
    """

    content: bytes | memoryview
    codec: Codec
    base: Digest | None


class Base(NamedTuple):
    """What a chunk may be a delta of.

    Attributes:
        digest: Another chunk of the store, of the same length.
        raw: Its bytes.
        chain: It, and all that it stands on: :meth:`ChunkForms.chains_below`.
    """

    digest: Digest
    raw: memoryview
    chain: Sequence[Record]


class ChunkForms:
    """Chooses forms for new chunks of one store.

    Args:
        index: The index of that store.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        # What was written since, in packs without a name.
        self._written: dict[Digest, Place] = {}

    def has_written(self, digest: Digest) -> bool:
        """Whether a chunk was written in a smaller form."""
        return digest in self._written

    def chains_below(
        self, view: IndexView, digests: Iterable[Digest]
    ) -> dict[Digest, list[Record]]:
        """Return some chunks with all bases below them, as :func:`~.chains.chains_below` does.

        Args:
            view: The index as the change sees it that writes new chunks.
            digests: The chunks.
        """
        return chains_below(digests, partial(self._find, view))

    def choose(self, digest: Digest, raw: memoryview, base: Base | None) -> Form | None:
        """Return the smallest form of a chunk; None if none is smaller. Several threads may ask.

        Args:
            digest: Its digest.
            raw: The chunk.
            base: What it may be like.
        """
        delta = None if base is None else self._delta(digest, raw, base)
        if delta is not None and len(delta.content) <= _LARGE_SHARE * len(raw):
            return delta
        planes = compress(raw)
        if planes is not None and (delta is None or len(planes) <= len(delta.content)):
            return Form(planes, Codec.PLANES, None)
        return delta

    def _delta(self, digest: Digest, raw: memoryview, base: Base) -> Form | None:
        """Return a chunk as a delta; None if that saves little, or its readers cannot afford it."""
        sizes = [place.stored_size for _, place in base.chain]
        if can_carry(base.chain, digest) and _is_affordable([0, *sizes], len(raw)):
            delta = encode_delta(raw, base.raw, base.digest)
            if delta is not None and _is_affordable([len(delta), *sizes], len(raw)):
                return Form(delta, Codec.DELTA, base.digest)
        return None

    def write(self, new_packs: NewPacks, digest: Digest, nbytes: int, form: Form) -> None:
        """Write a chunk of so many bytes in a form that was chosen."""
        place = Place(b"", 0, len(form.content), nbytes, int(form.codec))
        self._written[digest] = place if form.base is None else with_base(place, form.base)
        new_packs.copy_stored(digest, form.content, nbytes, form.codec)

    def _find(self, view: IndexView, digests: list[Digest]) -> list[Place | None]:
        """Return where each chunk was written, and of others the newest live places."""
        others = [digest for digest in digests if digest not in self._written]
        places = dict(zip(others, self._index.find_newest(view, others), strict=True))
        return [self._written.get(digest) or places[digest] for digest in digests]


def _is_affordable(sizes: list[int], nbytes: int) -> bool:
    """Whether a chain is read fast enough; its first chunk, which is no delta, comes last."""
    weights = (min(_MOST_WEIGHT, max(1.0, _WEIGHT * size / nbytes)) for size in sizes[:-1])
    return sum(weights) <= MOST_LINKS and sum(sizes) <= MOST_STORED * nbytes
