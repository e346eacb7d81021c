"""Find the tensors of a snapshot that equal given tensors once they are cast to fewer bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from casnap.files.export_selection import TensorContent, content_of
from casnap.format.digest import Digest
from casnap.format.entries import INLINE_BYTES, Entry, TensorEntry
from casnap.format.region import Region
from casnap.restore.loading import elements_of
from casnap.runtime.batches import batches
from casnap.state.tensors import TENSOR_DTYPES, Leaf
from casnap.storage import Contents, Want

# The dtypes that weights may have had before they were cast to one of fewer bits.
_WIDER = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
}
MOST_SNAPSHOTS = 16
"""How many snapshots are looked at, the newest first."""
_MOST_MISSES = 8
"""A snapshot is given up after this many tensors that differ, if none was equal before."""

# The bytes of stored chunks that are read at a time.
_WINDOW_BYTES = 32 << 20


class RoundedSearch:
    """Compares tensors with stored tensors of wider dtypes. No two tensors are compared twice.

    Args:
        leaves: The tensors that are looked for, by path.
    """

    def __init__(self, leaves: Mapping[str, Leaf]) -> None:
        self._leaves = {
            path: leaf
            for path, leaf in leaves.items()
            if isinstance(leaf.entry, TensorEntry)
            and leaf.entry.dtype in _WIDER
            and isinstance(leaf.content, torch.Tensor)
        }
        self._compared: dict[tuple[str, TensorContent], bool] = {}

    def found_in(self, contents: Contents) -> dict[str, TensorContent]:
        """Return the tensors that equal a stored tensor once that is cast to the same dtype.

        A tensor is compared with stored tensors of the same shape and of the same path below the
        key. Chunks are read one by one, up to the first that differs. After eight tensors that
        differ, if none was equal, nothing more of the snapshot is read.

        Args:
            contents: The snapshot.

        Returns:
            The path of each tensor that was found → dtype, shape and payload of the stored one.

        Raises:
            DamagedError: A node or a chunk is missing or damaged.
        """
        found: dict[str, TensorContent] = {}
        misses = 0
        with contents.reading():
            for path, leaf in self._leaves.items():
                for stored_path, entry in _candidates(contents, leaf):
                    asked = (path, content_of(entry))
                    if asked not in self._compared:
                        self._compared[asked] = _is_equal(contents, stored_path, entry, leaf)
                    if self._compared[asked]:
                        found[path] = asked[1]
                        break
                    misses += 1
                if misses >= _MOST_MISSES and not found:
                    break
        return found


def _candidates(contents: Contents, leaf: Leaf) -> Iterator[tuple[str, TensorEntry]]:
    """Yield path and entry of each stored tensor of a wider dtype with a leaf's name and shape."""
    _, slash, below = leaf.path.partition("/")
    own = leaf.entry
    assert isinstance(own, TensorEntry)
    for _, component, top in contents.manifest.trees():
        entry: Entry | None = contents.tree(top).get(slash + below)
        if not isinstance(entry, TensorEntry) or not entry.payload.nbytes:
            continue
        if entry.shape == own.shape and entry.dtype in _WIDER[own.dtype]:
            yield component + slash + below, entry


def _is_equal(contents: Contents, path: str, entry: TensorEntry, leaf: Leaf) -> bool:
    """Whether a stored tensor, cast to the dtype of a leaf, has the same bits as the leaf."""
    if entry.payload.nbytes <= INLINE_BYTES:
        raw = memoryview(bytearray(entry.payload.inline))
        return _is_equal_in(leaf, Region.whole(entry.shape), entry, raw)
    grid = contents.cells(path, entry)
    cells = list(enumerate(contents.chunks(path, entry)))
    # Mostly the first chunk differs already. All others are read many at a time.
    for window in (cells[:1], *batches(cells[1:], lambda cell: cell[1][1], _WINDOW_BYTES)):
        equal: list[bool] = []

        def want(cell: tuple[int, tuple[Digest, int]], equal: list[bool] = equal) -> Want:
            number, (digest, nbytes) = cell

            def sink(raw: memoryview) -> None:
                equal.append(_is_equal_in(leaf, grid.region(number), entry, raw))

            return Want(digest, nbytes, sink, path)

        contents.store.fetch(map(want, window))
        if not all(equal):
            return False
    return True


def _is_equal_in(leaf: Leaf, cell: Region, entry: TensorEntry, raw: memoryview) -> bool:
    """Whether the elements of one cell are equal, given the stored bytes of the cell."""
    content, own = leaf.content, leaf.entry
    assert isinstance(content, torch.Tensor)
    assert isinstance(own, TensorEntry)
    dtype = TENSOR_DTYPES[own.dtype]
    part = content[tuple(slice(o, o + n) for o, n in zip(cell.offsets, cell.sizes, strict=True))]
    if part.dtype == torch.uint8:
        # The content of a leaf of a file: its last axis has the bytes of an element.
        part = part.contiguous().view(dtype)
    part = part.to("cpu").reshape(cell.sizes).contiguous()
    cast = elements_of(entry, raw, cell).to(dtype).contiguous()
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return torch.equal(cast.view(bits), part.view(bits))
