"""Select the part of a snapshot to export: tensors by name, and values that must be left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from casnap.errors import FileFormatError
from casnap.format.entries import (
    INLINE_BYTES,
    ContainerEntry,
    Entry,
    Payload,
    TensorEntry,
    check_known,
)
from casnap.format.names import key_of
from casnap.storage import Contents

TensorContent: TypeAlias = tuple[str, tuple[int, ...], Payload]
"""The dtype, shape and payload of a tensor, which equal tensors share."""


class StoredTensor(NamedTuple):
    """The entry of a tensor in the snapshot, with its path."""

    path: str
    entry: TensorEntry


class Part(NamedTuple):
    """The part of a snapshot that is exported.

    Attributes:
        path: Its path, without the rank; empty for the whole snapshot.
        entries: Each entry at and below it, by path without the rank.
    """

    path: str
    entries: dict[str, Entry]


def part_of(contents: Contents, path: str | None, *, only_tensors: bool = False) -> Part:
    """Return the part of a snapshot at and below a path.

    Args:
        contents: The snapshot.
        path: The path; None for everything that rank 0 sees.
        only_tensors: Whether to ignore containers. The stages of a pipeline have different
            containers on each rank; without these, they are one model.

    Raises:
        EntryNotFoundError: There is no such path, or several ranks have entries of their own there
            and ``path`` does not name the rank.
        UnsupportedFormatError: A newer casnap wrote some of the entries.
    """
    if path is None:
        trees = sorted(contents.trees(None).items())
        part = Part("", {key + inner: e for key, tree in trees for inner, e in tree.items()})
        check_known(contents.label, part.entries.items())
        return part
    full, entry, tree = contents.entry(path.strip("/"), only_leaves=only_tensors)
    key, slash, inner = full.partition("/")
    entries = {key + inner_path: e for inner_path, e in tree.items_below(f"{slash}{inner}/")}
    check_known(contents.label, [(full, entry), *entries.items()])
    return Part(full, {full: entry, **entries})


def is_plain(entry: Entry) -> bool:
    """Whether an entry is an ordinary tensor, whose bytes are its elements."""
    kinds = ("tensor", "parameter", "buffer")
    return isinstance(entry, TensorEntry) and entry.kind in kinds and entry.quantization is None


def sparse_below(part: Part) -> tuple[str, ...]:
    """Return, for each sparse tensor, the prefix of the paths of its indices and values."""
    return tuple(
        f"{path}/"
        for path, entry in part.entries.items()
        if isinstance(entry, ContainerEntry) and entry.kind.startswith("sparse")
    )


def named_tensors(
    part: Part, dtypes: Collection[str], snapshot: str
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors that the format can hold, by their names in it, and all other paths.

    Args:
        part: The part that is exported.
        dtypes: The dtypes that the format has.
        snapshot: The label of the snapshot, for messages.

    Raises:
        FileFormatError: Two tensors would get one name.
    """
    tensors: dict[str, StoredTensor] = {}
    unnamed: list[str] = []
    inside = sparse_below(part)
    for path, entry in part.entries.items():
        if path.startswith(inside) or (
            isinstance(entry, ContainerEntry) and f"{path}/" not in inside
        ):
            continue
        if not isinstance(entry, TensorEntry) or not is_plain(entry) or entry.dtype not in dtypes:
            unnamed.append(path)
            continue
        name = _name(part.path, path)
        if name in tensors:
            raise FileFormatError(
                f"{snapshot}: {tensors[name].path} and {path} would both be named {name!r}; export "
                "one of the containers alone, by its path"
            )
        tensors[name] = StoredTensor(path, entry)
    return tensors, unnamed


def _name(base: str, path: str) -> str:
    """Return a tensor's name: the keys of ``path`` below ``base``, joined by dots.

    For ``base`` itself it is the last key.
    """
    relative = path[len(base) :].lstrip("/") if base else path
    return ".".join(map(key_of, (relative or path.rpartition("/")[2]).split("/")))


def equal_tensors(tensors: Mapping[str, StoredTensor], without: Collection[str]) -> dict[str, str]:
    """Return, for each tensor that equals an earlier one: its name → the name of the earliest.

    Args:
        tensors: The tensors by name.
        without: Names to leave out of the result.
    """
    names: dict[tuple[object, ...], str] = {}
    equal = {
        name: names.setdefault(content_of(entry), name)
        for name, (_, entry) in tensors.items()
        if entry.payload.nbytes > INLINE_BYTES
    }
    return {n: same_as for n, same_as in equal.items() if n != same_as and n not in without}


def without_tied(
    tensors: Mapping[str, StoredTensor], tied: Sequence[str], snapshot: str
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Leave out tied tensors, since their bytes are written under another name.

    Args:
        tensors: The tensors by name.
        tied: The names to leave out.
        snapshot: The label of the snapshot, for messages.

    Returns:
        The other tensors by name; and each name that was left out → the name of the equal tensor.

    Raises:
        FileFormatError: There is no tensor of a tied name, or no other tensor has its bytes.
    """
    others = {name: tensor for name, tensor in tensors.items() if name not in tied}
    names = {content_of(tensor.entry): name for name, tensor in others.items()}
    aliases = {}
    for name in tied:
        if name not in tensors:
            raise FileFormatError(
                f"{snapshot}: {name!r} is said to be tied, but there is no such tensor"
            )
        first_name = names.get(content_of(tensors[name].entry))
        if first_name is None:
            raise FileFormatError(
                f"{snapshot}: {name!r} is said to be tied, but no other tensor has its bytes"
            )
        aliases[name] = first_name
    return others, aliases


def content_of(entry: TensorEntry) -> TensorContent:
    """Return a key for a tensor's dtype, shape and bytes: equal tensors have equal keys."""
    return entry.dtype, entry.shape, entry.payload


def shards_by_size(sizes: Mapping[str, int], most: int | None) -> list[list[str]]:
    """Divide tensors among files, in order; return the names of the tensors in each file.

    Args:
        sizes: The bytes of each tensor, by name.
        most: The most bytes of a file, unless a single tensor has more; None: any number.
    """
    shards: list[list[str]] = [[]]
    fill = 0
    for name, nbytes in sizes.items():
        if most is not None and shards[-1] and fill + nbytes > most:
            shards.append([])
            fill = 0
        shards[-1].append(name)
        fill += nbytes
    return shards
