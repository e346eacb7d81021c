"""Lay out a snapshot's tensors in safetensors files, so that the next snapshot's files are alike.

The layout depends only on the names, shapes and dtypes of the tensors, and on the options. So the
same tensors of the next snapshot lie at the same places, and a file in which no tensor has changed
is the same file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from casnap.errors import DamagedError, EntryNotFoundError, FileFormatError
from casnap.files.export_selection import (
    StoredTensor,
    equal_tensors,
    named_tensors,
    part_of,
    shards_by_size,
    without_tied,
)
from casnap.files.safetensors_header import DTYPES, header_of, itemsize_of
from casnap.files.small_files import FILES, is_carried
from casnap.files.to_safetensors import INDEX, index_of, shard_names
from casnap.format.digest import DIGEST_SIZE, Digest, digest_of
from casnap.format.entries import INLINE_BYTES, TensorEntry, ValueEntry
from casnap.format.names import key_of
from casnap.runtime.fork import cached_property
from casnap.storage import Contents, Want

# PEFT's names of these files; it knows no shards.
_ADAPTER, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


class PlacedChunk(NamedTuple):
    """A chunk of a tensor, and its place in a file.

    Attributes:
        digest: The digest of the chunk in the store.
        raw_bytes: Its length in the store, uncompressed.
        start: Where it begins in the file, in bytes.
        nbytes: Its length in the file, which a cast changes.
    """

    digest: Digest
    raw_bytes: int
    start: int
    nbytes: int


class PlacedTensor:
    """A tensor, and its place and dtype in a file.

    Args:
        contents: The snapshot.
        path: Its path in the snapshot.
        entry: Its entry.
        dtype: The dtype that it gets in the file.
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
        """The change of dtype as ``from>to``; empty if the dtype stays."""
        return "" if self.dtype == self.entry.dtype else f"{self.entry.dtype}>{self.dtype}"

    @property
    def held_bytes(self) -> bytes | None:
        """The bytes of a small tensor, which lie in its entry; None if the tensor has chunks."""
        payload = self.entry.payload
        return payload.inline if payload.nbytes <= INLINE_BYTES else None

    @cached_property
    def cells(self) -> list[PlacedChunk]:
        """The chunks of the tensor. A small tensor, whose bytes lie in its entry, counts as one.

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
            cells.append(PlacedChunk(digest, raw_bytes, at, nbytes))
            at += nbytes
        return cells

    @cached_property
    def digest(self) -> str:
        """The digest, in hex, of the joined digests of the chunks."""
        return digest_of(b"".join(cell.digest for cell in self.cells)).hex()

    @cached_property
    def cast_digests(self) -> list[Digest]:
        """The digests of a cast tensor's chunks in the file; an empty list without a cast.

        They are zeros until the writer of the file has cast each chunk, and sets its digest.
        """
        return [Digest(bytes(DIGEST_SIZE))] * len(self.cells) if self.cast else []


class PlannedFile(NamedTuple):
    """A file of tensors to be written.

    Attributes:
        name: The name of the file.
        header: Its header, in bytes.
        tensors: Its tensors, by name.
        nbytes: Its length in bytes.
    """

    name: str
    header: bytes
    tensors: dict[str, PlacedTensor]
    nbytes: int


class FileLayout(NamedTuple):
    """The files in which the tensors of a snapshot are laid out.

    Attributes:
        files: The files of tensors.
        others: The name of each other file → its content.
        tied: Each name that is left out → the name of the equal tensor that is written instead.
        equal: The name of each written tensor that has the bytes of an earlier one → the name of
            the earliest one.
        left_out: The paths of values that safetensors cannot hold.
    """

    files: list[PlannedFile]
    others: dict[str, bytes]
    tied: dict[str, str]
    equal: dict[str, str]
    left_out: list[str]

    @classmethod
    def of(
        cls,
        contents: Contents,
        path: str | None,
        *,
        rename: Callable[[str], str],
        dtype_of: Callable[[str], str],
        tied: Sequence[str] = (),
        max_shard_size: int | None = None,
    ) -> FileLayout:
        """Lay out the tensors at and below a path.

        Args:
            contents: The snapshot.
            path: The path; None for the whole snapshot.
            rename: Returns the name that a tensor gets, from its keys joined by dots.
            dtype_of: Returns the dtype that a tensor gets, from its own.
            tied: The new names of tensors to leave out, since another tensor has their bytes.
            max_shard_size: The most bytes of tensors in a file, unless a single tensor has more;
                None: any number.

        Raises:
            EntryNotFoundError: There is nothing at the path, or several ranks have entries of their
                own there.
            FileFormatError: There are no tensors, or two would get one name.
            DamagedError: A part of the snapshot is missing or damaged.
        """
        part = part_of(contents, path, only_tensors=True)
        unnamed, left_out = named_tensors(part, DTYPES, contents.label)
        tensors = _renamed(unnamed, rename, contents.label)
        if not tensors:
            raise FileFormatError(
                f"{contents.label}: no tensor that safetensors can hold is at {path or 'any path'}"
            )
        tensors, aliases = without_tied(tensors, tied, contents.label)
        names = sorted(tensors)
        dtypes = {name: dtype_of(tensors[name].entry.dtype) for name in names}
        sizes = {
            name: entry.payload.nbytes // itemsize_of(entry.dtype) * itemsize_of(dtypes[name])
            for name in names
            for entry in (tensors[name].entry,)
        }
        others = _small_files(contents)
        if _is_adapter(names, others):
            groups, file_names = [names], [_ADAPTER]
        else:
            groups = shards_by_size(sizes, max_shard_size)
            file_names = shard_names(len(groups))
        files = []
        for file_name, group in zip(file_names, groups, strict=True):
            described = {name: (dtypes[name], tensors[name].entry.shape) for name in group}
            # Nothing about the snapshot: the header of an unchanged file must stay the same.
            head, starts, length = header_of(described, {"format": "pt"})
            placed = {
                name: PlacedTensor(contents, *tensors[name], dtypes[name], starts[name])
                for name in group
            }
            files.append(PlannedFile(file_name, head, placed, length))
        if len(groups) > 1:
            shards = {n: file.name for file in files for n in file.tensors}
            others[INDEX] = index_of(shards, sum(sizes.values()))
        return cls(files, others, aliases, equal_tensors(tensors, aliases), left_out)


def _renamed(
    tensors: Mapping[str, StoredTensor], rename: Callable[[str], str], snapshot: str
) -> dict[str, StoredTensor]:
    renamed: dict[str, StoredTensor] = {}
    for old_name, tensor in tensors.items():
        name = rename(old_name)
        if name in renamed:
            raise FileFormatError(
                f"{snapshot}: rename= gives {renamed[name].path} and {tensor.path} the same name "
                f"{name!r}"
            )
        renamed[name] = tensor
    return renamed


def _is_adapter(names: Iterable[str], others: Mapping[str, bytes]) -> bool:
    """Whether the tensors are an adapter. Loaders look for an adapter under another file name.

    A whole model whose layers PEFT has wrapped is no adapter, though ``adapter_config.json`` may
    lie beside it.

    Args:
        names: The names of the tensors.
        others: The other files of the snapshot, by name.
    """
    return _ADAPTER_CONFIG in others and not any(".base_layer." in name for name in names)


def _small_files(contents: Contents) -> dict[str, bytes]:
    """Return the small files stored in a snapshot, except those that a loader could unpickle."""
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
