"""Choose the smallest form of a chunk that is not too slow to read: delta, planes, or raw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from casnap.format.codec import Codec, compress
from casnap.format.delta import MOST_LINKS, MOST_STORED, encode_delta
from casnap.format.digest import Digest
from casnap.format.records import PackId, Place, Record, with_base
from casnap.storage.lookup.chains import can_carry, chains_below
from casnap.storage.lookup.index import Index, IndexView
from casnap.storage.writing.new_packs import NewPacks

# The more of a chunk a delta changes, the longer a reader takes to apply it, up to the time that a
# dense delta takes. So a chain has at most 32 deltas of up to 1/56 of the chunk each, or 4 of 1/7
# or more.
_WEIGHT, _MOST_WEIGHT = 56.0, 8.0
# If a delta takes a greater share of its chunk, planes may take less: try both.
_LARGE_SHARE = 0.5


class ChosenForm(NamedTuple):
    """The form in which to store a chunk.

    Attributes:
        content: The stored bytes.
        codec: The codec of these bytes.
        base: The digest of the base if they are a delta; else None.
    """

    content: bytes | memoryview
    codec: Codec
    base: Digest | None


class Base(NamedTuple):
    """A possible base for a delta: another chunk of the store.

    Attributes:
        digest: The digest of the base.
        raw: The bytes of the base.
        chain: The chain of the base, from :meth:`ChunkForms.chains_below`.
    """

    digest: Digest
    raw: memoryview
    chain: Sequence[Record]


class ChunkForms:
    """Chooses and writes the forms of new chunks of one store.

    Args:
        index: The index of the store.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        # Chunks that this object wrote, in packs that no root names yet.
        self._written: dict[Digest, Place] = {}

    def has_written(self, digest: Digest) -> bool:
        """Whether :meth:`write` has written a chunk."""
        return digest in self._written

    def chains_below(
        self, view: IndexView, digests: Iterable[Digest]
    ) -> dict[Digest, list[Record]]:
        """Return the chains of some chunks, as :func:`~.chains.chains_below` does.

        A chunk that :meth:`write` has written counts with its new form.

        Args:
            view: The index according to the root that the change began from.
            digests: The digests of the chunks.
        """
        return chains_below(digests, partial(self._find, view))

    def choose(self, digest: Digest, raw: memoryview, base: Base | None) -> ChosenForm | None:
        """Return the smallest form of a chunk; None if no form is smaller than the raw chunk.

        Several threads may call this.

        Args:
            digest: The digest of the chunk.
            raw: The bytes of the chunk.
            base: A possible base; None for none.
        """
        delta = None if base is None else self._delta(digest, raw, base)
        if delta is not None and len(delta.content) <= _LARGE_SHARE * len(raw):
            return delta
        planes = compress(raw)
        if planes is not None and (delta is None or len(planes) <= len(delta.content)):
            return ChosenForm(planes, Codec.PLANES, None)
        return delta

    def _delta(self, digest: Digest, raw: memoryview, base: Base) -> ChosenForm | None:
        """Return a chunk as a delta; None if that saves little, or costs readers too much."""
        sizes = [place.stored_size for _, place in base.chain]
        if can_carry(base.chain, digest) and _is_affordable([0, *sizes], len(raw)):
            delta = encode_delta(raw, base.raw, base.digest)
            if delta is not None and _is_affordable([len(delta), *sizes], len(raw)):
                return ChosenForm(delta, Codec.DELTA, base.digest)
        return None

    def write(self, new_packs: NewPacks, digest: Digest, nbytes: int, form: ChosenForm) -> None:
        """Write a chunk in a form.

        Args:
            new_packs: The packs to write to.
            digest: The digest of the chunk.
            nbytes: The raw length of the chunk.
            form: The form.
        """
        place = Place(PackId(b""), 0, len(form.content), nbytes, int(form.codec))
        self._written[digest] = place if form.base is None else with_base(place, form.base)
        new_packs.copy_stored(digest, form.content, nbytes, form.codec)

    def _find(self, view: IndexView, digests: list[Digest]) -> list[Place | None]:
        """Return a place for each chunk: from :meth:`write`, or else in the newest live pack."""
        others = [digest for digest in digests if digest not in self._written]
        places = dict(zip(others, self._index.find_newest(view, others), strict=True))
        return [self._written.get(digest) or places[digest] for digest in digests]


def _is_affordable(sizes: list[int], nbytes: int) -> bool:
    """Whether a chain costs readers no more than is allowed.

    Args:
        sizes: The stored lengths of the deltas of the chain, and last the stored length of the
            whole chunk.
        nbytes: The raw length of the chunk.
    """
    weights = (min(_MOST_WEIGHT, max(1.0, _WEIGHT * size / nbytes)) for size in sizes[:-1])
    return sum(weights) <= MOST_LINKS and sum(sizes) <= MOST_STORED * nbytes
