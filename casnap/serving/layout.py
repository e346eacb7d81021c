"""How a snapshot becomes a folder: which tensors go where in which files.

The layout depends only on the names, shapes and dtypes of the tensors, and on the options. So the
same tensors of the next snapshot lie at the same places, and a file in which no tensor has changed
is the same file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from casnap.errors import DamagedError, EntryNotFoundError, FileFormatError
from casnap.extending import (
    DIGEST_SIZE,
    DTYPES,
    FILES,
    INDEX,
    INLINE_BYTES,
    Contents,
    Digest,
    StoredTensor,
    TensorEntry,
    ValueEntry,
    Want,
    bytes_of,
    cached_property,
    digest_of,
    equal_tensors,
    header_of,
    index_of,
    is_carried,
    itemsize_of,
    key_of,
    named_tensors,
    part_of,
    shard_names,
    shards_by_size,
    without_tied,
)
from casnap.serving.options import FLOATS, PullOptions
from casnap.serving.version import VersionTensor

# As PEFT names them; it knows no shards.
_ADAPTER, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


class Cell(NamedTuple):
    """A chunk of a tensor in a file.

    Attributes:
        digest: The digest of the chunk in the store.
        raw_bytes: Its length there.
        start: The byte of the file at which it begins.
        nbytes: Its length in the file.
    """

    digest: Digest
    raw_bytes: int
    start: int
    nbytes: int


class PlacedTensor:
    """A tensor in a file.

    Args:
        contents: The snapshot.
        path: Its path there.
        entry: Its entry.
        dtype: The dtype that it gets.
        start: The byte of the file at which it begins.
    """

    def __init__(
        self, contents: Contents, path: str, entry: TensorEntry, dtype: str, start: int
    ) -> None:
        self._contents = contents
        self.path = path
        self.entry = entry
        self.dtype = dtype
        self.start = start

    @property
    def cast(self) -> str:
        """The cast as ``from>to``; empty for none."""
        return "" if self.dtype == self.entry.dtype else f"{self.entry.dtype}>{self.dtype}"

    @cached_property
    def cells(self) -> list[Cell]:
        """Its chunks. A small tensor, which the entry holds itself, has one.

        Raises:
            DamagedError: The entry contradicts itself.
        """
        payload = self.entry.payload
        chunks = self._contents.chunks(self.path, self.entry)
        if 0 < payload.nbytes <= INLINE_BYTES:
            if len(payload.inline) != payload.nbytes:
                raise DamagedError(f"{self._contents.label}: {self.path} is cut off", (self.path,))
            chunks = [(digest_of(payload.inline), payload.nbytes)]
        sizes, cells, at = (itemsize_of(self.entry.dtype), itemsize_of(self.dtype)), [], self.start
        for digest, raw_bytes in chunks:
            nbytes = raw_bytes // sizes[0] * sizes[1]
            cells.append(Cell(digest, raw_bytes, at, nbytes))
            at += nbytes
        return cells

    @cached_property
    def digest(self) -> str:
        """The digest of the digests of its chunks."""
        return digest_of(b"".join(cell.digest for cell in self.cells)).hex()

    def described(self, file: str) -> VersionTensor:
        """Return what the version says of it."""
        return VersionTensor(
            self.path,
            self.dtype,
            self.entry.shape,
            self.digest,
            file,
            self.start,
            self.entry.dtype if self.cast else "",
            digest_of(b"".join(self.cast_digests)).hex() if self.cast else "",
        )

    @cached_property
    def cast_digests(self) -> list[Digest]:
        """The digests of the chunks of a tensor that is cast, as they are set; else none."""
        return [Digest(bytes(DIGEST_SIZE))] * len(self.cells) if self.cast else []


class PlannedFile(NamedTuple):
    """A file of tensors: its name, how it begins, its tensors, and its length."""

    name: str
    header: bytes
    tensors: dict[str, PlacedTensor]
    nbytes: int


class Layout(NamedTuple):
    """The files of a version.

    Attributes:
        files: Those of tensors.
        others: The contents of other files.
        tied: Names of tensors that are there only under another name, and that name.
        equal: Names whose bytes an earlier name has, and that name.
        left_out: The paths of what safetensors cannot hold.
    """

    files: list[PlannedFile]
    others: dict[str, bytes]
    tied: dict[str, str]
    equal: dict[str, str]
    left_out: list[str]


def plan(contents: Contents, options: PullOptions) -> Layout:
    """Lay out the files of a version.

    Raises:
        EntryNotFoundError: There is nothing at the path, or several ranks have their own there.
        FileFormatError: There are no tensors, or two would get one name.
        DamagedError: Something is missing or damaged.
    """
    part = part_of(contents, options.path, only_tensors=True)
    unnamed, left_out = named_tensors(part, DTYPES, contents.label)
    tensors: dict[str, StoredTensor] = {}
    renamed = options.renaming()
    for old_name, tensor in unnamed.items():
        name = renamed(old_name)
        if name in tensors:
            raise FileFormatError(
                f"{contents.label}: rename= gives {tensors[name].path} and {tensor.path} the same "
                f"name {name!r}"
            )
        tensors[name] = tensor
    if not tensors:
        place = options.path or "any path"
        raise FileFormatError(
            f"{contents.label}: no tensor that safetensors can hold is at {place}"
        )
    tensors, tied = without_tied(tensors, options.tied, contents.label)
    names = sorted(tensors)
    dtypes = {name: _dtype(tensors[name].entry.dtype, options.dtype) for name in names}
    sizes = {
        name: entry.payload.nbytes // itemsize_of(entry.dtype) * itemsize_of(dtypes[name])
        for name in names
        for entry in (tensors[name].entry,)
    }
    others = _small_files(contents)
    if _is_adapter(names, others):
        groups, file_names = [names], [_ADAPTER]
    else:
        groups = shards_by_size(sizes, bytes_of("max_shard_size", options.max_shard_size))
        file_names = shard_names(len(groups))
    files = []
    for file_name, group in zip(file_names, groups, strict=True):
        described = {name: (dtypes[name], tensors[name].entry.shape) for name in group}
        # Nothing of the snapshot: the header of an unchanged file must be the same.
        head, starts, length = header_of(described, {"format": "pt"})
        placed = {
            name: PlacedTensor(contents, *tensors[name], dtypes[name], starts[name])
            for name in group
        }
        files.append(PlannedFile(file_name, head, placed, length))
    if len(groups) > 1:
        shards = {n: file.name for file in files for n in file.tensors}
        others[INDEX] = index_of(shards, sum(sizes.values()))
    return Layout(files, others, tied, equal_tensors(tensors, tied), left_out)


def _dtype(dtype: str, wanted: str | None) -> str:
    return wanted if wanted is not None and dtype in FLOATS else dtype


def _is_adapter(names: Iterable[str], others: Mapping[str, bytes]) -> bool:
    """Whether the tensors are an adapter, which loaders look for under another name.

    PEFT wraps the layers of a whole model, which is no adapter, even with the same file beside it.
    """
    return _ADAPTER_CONFIG in others and not any(".base_layer." in name for name in names)


def _small_files(contents: Contents) -> dict[str, bytes]:
    """Return the small files that a snapshot holds, but none that a loader could unpickle."""
    try:
        part = part_of(contents, FILES)
    except EntryNotFoundError:
        return {}
    files: dict[str, bytes] = {}
    for path, entry in part.entries.items():
        name = key_of(path[len(part.path) + 1 :])
        if (
            isinstance(entry, ValueEntry)
            and entry.kind in ("str", "bytes")
            and is_carried(name, entry.payload.nbytes)
        ):
            files[name] = _content(contents, path, entry)
    return files


def _content(contents: Contents, path: str, entry: ValueEntry) -> bytes:
    parts: dict[int, bytes] = {}
    wants = [
        Want(digest, nbytes, lambda raw, i=i: parts.__setitem__(i, bytes(raw)), path)  # type: ignore[misc]
        for i, (digest, nbytes) in enumerate(contents.chunks(path, entry))
    ]
    contents.store.fetch(wants)
    return b"".join(parts[i] for i in range(len(wants))) if wants else entry.payload.inline
