"""A handle on an entry of a snapshot. It describes the entry, and reads parts of it on demand."""

from __future__ import annotations

from typing import Any

import torch

from casnap.errors import MismatchError
from casnap.format.entries import ContainerEntry, Entry, TensorEntry, check_known
from casnap.restore.indexing import Index
from casnap.restore.read_object import read_objects, read_tensor
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.numpy_values import is_numpy, numpy_dtype
from casnap.state.roles import Role, role_of
from casnap.state.tensors import torch_dtype
from casnap.storage import Contents


class Handle:
    """A tensor, value or container of a snapshot, which is read only on demand.

    ``handle[index]`` reads a part of a tensor. The index is as in ``tensor[index]``: ints, slices
    and ``...``. Only the chunks that hold selected elements are read.

    Args:
        contents: The snapshot.
        path: The path by which the caller asked for the entry.
        entry: The entry.
        rank: The rank that it belongs to; None for a global entry.

    Attributes:
        path: The path. It begins with a rank if the caller's path did, or if the entry belongs to
            one rank.
        rank: The only rank that can restore the entry; None if all ranks can, however many there
            are.
    """

    def __init__(self, contents: Contents, path: str, entry: Entry, rank: int | None) -> None:
        self._contents = contents
        self._entry = entry
        self.path = path
        self.rank = rank

    @property
    def kind(self) -> str:
        """The kind of the entry, such as ``parameter``, ``tensor``, ``int`` or ``dict``."""
        return self._entry.kind

    @property
    def role(self) -> Role:
        """The purpose of the entry in a training, such as ``weights``; guessed from its path."""
        return role_of(self.path, self._entry)

    @property
    def shape(self) -> torch.Size | None:
        """The global shape of a tensor or array; None for anything else."""
        return torch.Size(self._entry.shape) if isinstance(self._entry, TensorEntry) else None

    @property
    def dtype(self) -> Any:
        """The dtype, of torch or numpy; None for anything that is neither a tensor nor an array.

        Raises:
            UnsupportedTypeError: This torch does not know the dtype, or numpy is not installed.
        """
        entry = self._entry
        if not isinstance(entry, TensorEntry):
            return None
        check_known(self._contents.label, [(self.path, entry)])
        return numpy_dtype(self.path, entry) if is_numpy(entry) else torch_dtype(entry)

    @property
    def nbytes(self) -> int:
        """The bytes of a tensor or value; for a container, the bytes of everything below it."""
        if not isinstance(self._entry, ContainerEntry):
            return self._entry.payload.nbytes
        with self._contents.reading():
            listed = {e.path: e.entry for e in self._contents.listed(f"{self.path}/")}
        entries = (entry for entry in listed.values() if not isinstance(entry, ContainerEntry))
        return sum(entry.payload.nbytes for entry in entries)

    @property
    def is_global(self) -> bool:
        """Whether any rank can restore the entry, on any number of ranks."""
        return self.rank is None

    @property
    def is_sharded(self) -> bool | None:
        """Whether ranks held different parts of the tensor; None if the snapshot does not say.

        A snapshot has the same chunks however a tensor was sharded, so that it can be restored
        under any sharding. So the answer is known only where there can have been no shards: in a
        take of one rank, and in a rank's own entry.
        """
        is_whole = not self.is_global or self._contents.row.world_size == 1
        return False if is_whole or not isinstance(self._entry, TensorEntry) else None

    def __getitem__(self, index: Index) -> Any:
        """Read a part of a tensor, or of an array.

        Raises:
            MismatchError: The entry is not a tensor.
            IndexError: The index does not fit the shape.
            TypeError: The index holds other things than ints, slices and ``...``.
            ValueError: A slice has a step below 1.
            DamagedError: Stored bytes are missing or damaged.
        """
        if not isinstance(self._entry, TensorEntry):
            raise MismatchError(
                f"{self._contents.label}: {self.path} is not a tensor, so it takes no index; "
                "use read()"
            )
        if index is None:  # read_tensor() takes None for no index
            raise TypeError("an index holds ints, slices and ..., not None; use read() for all")
        with self._contents.reading(), without_torch_modes():
            return read_tensor(self._contents, self.path, self._entry, None, None, index)

    def read(self, *, allow_pickle: bool = False) -> Any:
        """Read the whole entry, as :meth:`casnap.Snapshot.read_object` does.

        Raises:
            DamagedError: Stored bytes are missing or damaged.
        """
        with self._contents.reading():
            values = read_objects(self._contents, [self.path], allow_pickle=allow_pickle)
            return values[self.path]

    def __repr__(self) -> str:
        entry = self._entry
        text = entry.kind
        if isinstance(entry, TensorEntry):
            text = f"{text}, {entry.dtype} {list(entry.shape)}"
        whose = "global" if self.is_global else f"rank {self.rank}'s own"
        return f"<{self.path}: {text}, {whose}>"


def handle_of(contents: Contents, path: str) -> Handle:
    """Return the handle on the entry at a path.

    Raises:
        EntryNotFoundError: There is no entry, or the path names entries of several ranks.
    """
    full, entry, entries = contents.entry(path)
    return Handle(contents, path, entry, entries.owner(full[len(full.partition("/")[0]) :]))


def handles(contents: Contents, pattern: str) -> dict[str, Handle]:
    """Return, by path, handles on the tensors and values whose paths match a glob."""
    entries = contents.matching(pattern)
    return {each.name: Handle(contents, each.name, each.entry, each.owner) for each in entries}
