"""The part of a snapshot to export: its tensors by name, and values that a format cannot hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from casnap.errors import FileFormatError
from casnap.format.entries import INLINE_BYTES, ContainerEntry, Entry, TensorEntry
from casnap.format.names import key_of
from casnap.storage.contents import Contents


class ChosenTensor(NamedTuple):
    """A tensor to export: its path in the snapshot, and its entry."""

    path: str
    entry: TensorEntry


class ChosenPart(NamedTuple):
    """What is to be exported.

    Attributes:
        path: The path of it, without the rank; empty for the whole snapshot.
        entries: Path, without the rank, and entry of all that is there.
    """

    path: str
    entries: dict[str, Entry]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors."""
        return sum(e.data.nbytes for e in self.entries.values() if isinstance(e, TensorEntry))


def part_of(contents: Contents, path: str | None) -> ChosenPart:
    """Return what is at and below a path; by default everything that rank 0 sees.

    Raises:
        EntryNotFoundError: There is no such path.
    """
    if path is None:
        trees = sorted(contents.trees(None).items())
        return ChosenPart("", {key + inner: e for key, tree in trees for inner, e in tree.items()})
    full, entry, tree = contents.entry(path.strip("/"))
    key, slash, inner = full.partition("/")
    below = {key + where: e for where, e in tree.below(f"{slash}{inner}/")}
    return ChosenPart(full, {full: entry, **below})


def is_plain(entry: Entry) -> bool:
    """Whether an entry is an ordinary tensor, whose bytes are its elements."""
    kinds = ("tensor", "parameter", "buffer")
    return isinstance(entry, TensorEntry) and entry.kind in kinds and entry.quantization is None


def sparse_below(part: ChosenPart) -> tuple[str, ...]:
    """Return the beginnings of the paths of what sparse tensors are made of."""
    return tuple(
        f"{path}/"
        for path, entry in part.entries.items()
        if isinstance(entry, ContainerEntry) and entry.kind.startswith("sparse")
    )


def tensors_of(
    part: ChosenPart, dtypes: Collection[str], where: str
) -> tuple[dict[str, ChosenTensor], list[str]]:
    """Return the tensors by the names that they get, and the paths of what is not among them.

    Args:
        part: What is to be exported.
        dtypes: The dtypes that the format has.
        where: The snapshot, for messages.

    Raises:
        FileFormatError: Two tensors would get one name.
    """
    found: dict[str, ChosenTensor] = {}
    rest: list[str] = []
    inside = sparse_below(part)
    for path, entry in part.entries.items():
        if path.startswith(inside) or (
            isinstance(entry, ContainerEntry) and f"{path}/" not in inside
        ):
            continue
        if not isinstance(entry, TensorEntry) or not is_plain(entry) or entry.dtype not in dtypes:
            rest.append(path)
            continue
        name = _name(part.path, path)
        if name in found:
            raise FileFormatError(
                f"{where}: {found[name].path} and {path} would both be named {name!r}; export one "
                "of the containers alone, by its path"
            )
        found[name] = ChosenTensor(path, entry)
    return found, rest


def _name(base: str, path: str) -> str:
    """Return the keys below a path, joined by dots; of the path itself the last one."""
    below = path[len(base) :].lstrip("/") if base else path
    return ".".join(map(key_of, (below or path.rpartition("/")[2]).split("/")))


def equal_ones(tensors: dict[str, ChosenTensor]) -> Iterator[tuple[str, str]]:
    """Yield the names of tensors whose bytes an earlier one has, and the name of the first one."""
    first: dict[tuple[object, ...], str] = {}
    for name, (_, entry) in tensors.items():
        if entry.data.nbytes > INLINE_BYTES:
            same = first.setdefault((entry.dtype, entry.shape, entry.data), name)
            if same != name:
                yield name, same


def without_tied(
    tensors: dict[str, ChosenTensor], tied: Sequence[str], where: str
) -> tuple[dict[str, ChosenTensor], dict[str, str]]:
    """Leave out tensors that are stored under another name; return the others, and those names.

    Raises:
        FileFormatError: There is no tensor of a name, or no other one has its bytes.
    """
    kept = {name: chosen for name, chosen in tensors.items() if name not in tied}
    names = {(c.entry.dtype, c.entry.shape, c.entry.data): name for name, c in kept.items()}
    found = {}
    for name in tied:
        entry = tensors[name].entry if name in tensors else None
        same = names.get((entry.dtype, entry.shape, entry.data)) if entry is not None else None
        if same is None:
            raise FileFormatError(
                f"{where}: {name!r} is said to be tied, but "
                + (
                    "no other tensor has its bytes"
                    if name in tensors
                    else "there is no such tensor"
                )
            )
        found[name] = same
    return kept, found
