"""Find the snapshots that hold given weights, by digests.

A tensor whose values all fit into a narrower dtype is also looked for in that dtype. For a tensor
that may be a rounded copy of a stored one, the stored elements are read and cast.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from casnap.errors import SnapshotNotFoundError, StateError, UnsupportedTypeError
from casnap.files.export_selection import TensorContent, content_of
from casnap.files.importing import read_source
from casnap.files.sources import MODEL
from casnap.format.digest import Digest, digest_of
from casnap.format.entries import Entry, OwnedTree, TensorEntry
from casnap.format.records import encode
from casnap.format.tree import LeafNode
from casnap.history.rounded import MOST_SNAPSHOTS, RoundedSearch
from casnap.runtime.sizes import size
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.flatten import tensor_leaves
from casnap.state.roles import is_trained
from casnap.state.tensors import TENSOR_DTYPES, Leaf
from casnap.storage import Contents
from casnap.take.capture import DividedLeaves
from casnap.take.comparison import entries_of

# The dtypes that may have been cast to one of more bits.
_NARROWER = {"float32": ("bfloat16", "float16"), "float64": ("float32",)}
_MOST_NAMED = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Holder:
    """A snapshot that holds some of the tensors.

    Attributes:
        name: Its name.
        found: How many of the tensors it holds, under any path.
        lacking: The paths of the tensors that it lacks.
    """

    name: str
    found: int
    lacking: tuple[str, ...]


@dataclass(frozen=True)
class WhoReport:
    """The snapshots that hold the tensors that were asked about.

    Attributes:
        tensors: How many tensors there are. Those without elements do not count.
        holders: The snapshots that hold some of them. The one that holds most comes first; among
            equals, the newest that has none of them under the name of another one, then the newest.
        elsewhere: For each tensor that the first holder lacks, the names of other holders, the
            newest first; empty if no snapshot has it.
        cast: For each tensor that is stored in another dtype with the same values, that dtype.
        rounded: For each tensor that equals a stored tensor of a wider dtype once that is cast, the
            wider dtype.
        renamed: For each tensor that the first holder has only under other names, although it has
            a tensor of this name, the path there. Two that were exchanged have each other's paths.
    """

    tensors: int
    holders: list[Holder]
    elsewhere: dict[str, list[str]] = field(default_factory=dict)
    cast: dict[str, str] = field(default_factory=dict)
    rounded: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> list[str]:
        """The names of the snapshots that hold all tensors, the newest first."""
        return [holder.name for holder in self.holders if not holder.lacking]

    def __str__(self) -> str:
        """Return the report in several lines."""
        if not self.holders:
            return f"no snapshot holds any of the {self.tensors:,} tensors"
        named = self.holders[:_MOST_NAMED]
        lines = [f"{each.found:,} of {self.tensors:,} tensors: {each.name}" for each in named]
        lines += _more(self.holders, "snapshots")
        for path, names in list(self.elsewhere.items())[:_MOST_NAMED]:
            others = ", ".join(names[:_MOST_NAMED]) or "no snapshot"
            lines.append(f"{self.holders[0].name} lacks {path}: it is of {others}")
        lines += _more(self.elsewhere, "tensors")
        for path, there in list(self.renamed.items())[:_MOST_NAMED]:
            lines.append(f"{path} is not what {self.holders[0].name} has there, but its {there}")
        lines += _more(self.renamed, "tensors")
        for dtype, count in Counter(self.cast.values()).items():
            lines.append(f"{count:,} of these tensors are held as {dtype}, with the same values")
        for dtype, count in Counter(self.rounded.values()).items():
            lines.append(
                f"{count:,} of these tensors are held as {dtype}, and equal once it is cast"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Asked:
    """The tensors that are looked for.

    Attributes:
        entries: The entries, by path, as the store would have them.
        chunk_size: The most bytes of a chunk.
        leaves: The leaves, by path, if the bytes of the tensors are available.
        of_ranks: The paths that begin with a rank. In others, digits at the start are a key.
    """

    entries: Mapping[str, Entry]
    chunk_size: int
    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    of_ranks: Collection[str] = ()


def tensors_of(source: object, key: str | None, chunk_size: int) -> Asked:
    """Return the tensors of files, of a module or of a state dict. All bytes are hashed.

    Args:
        source: The path of a file or folder, as :meth:`casnap.Store.import_file` takes it; an
            object with ``state_dict``; or a dict.
        key: The key for a state that is not an app state; by default ``model``.
        chunk_size: The chunk size of the store, in bytes.

    Raises:
        FileFormatError: The files are malformed, or in no known format.
        UnsupportedTypeError: The source is none of these.
    """
    if isinstance(source, str | os.PathLike):
        leaves = read_source(Path(source), key, None).leaves
    else:
        state = source.state_dict() if hasattr(source, "state_dict") else source
        if not isinstance(state, Mapping):
            raise UnsupportedTypeError(
                "who() takes the path of a file or folder, a module, a state dict or a snapshot; "
                f"got {type(source).__name__}"
            )
        leaves = {key or MODEL: list(tensor_leaves(state, key or MODEL))}
    with without_torch_modes():
        entries = entries_of(DividedLeaves(leaves), chunk_size)
    return Asked(
        entries, chunk_size, {leaf.path: leaf for of_key in leaves.values() for leaf in of_key}
    )


def who(snapshots: Mapping[str, Contents], asked: Asked, chunk_size: int) -> WhoReport:
    """Return which snapshots hold tensors.

    Args:
        snapshots: The snapshots to look at, by the names for the report, in the order of their
            commits.
        asked: The tensors.
        chunk_size: The most bytes of a chunk of the snapshots.

    Raises:
        StateError: There is no tensor with elements; or the tensors were cut into chunks of another
            size, and so have other digests.
        DamagedError: A node or a chunk of a snapshot is missing or damaged.
    """
    forms = {path: [i] for path, entry in asked.entries.items() if (i := _identity(entry))}
    if not forms:
        raise StateError("there is no tensor with elements to look for")
    if asked.chunk_size != chunk_size:
        raise StateError(
            f"the snapshot has chunks of up to {size(asked.chunk_size)}, and this store of up to "
            f"{size(chunk_size)}, so their digests differ; pass its state dict, or export it"
        )
    held = _held(snapshots, forms)
    if not any(len(paths) == len(forms) for paths in held.values()):
        for path, leaf in asked.leaves.items():
            if path in forms:
                forms[path] += _narrowed(leaf, asked.chunk_size)
        held = _held(snapshots, forms)
    rounded = _add_rounded(held, snapshots, asked, forms)
    order = {name: i for i, name in enumerate(snapshots)}
    names = sorted(held, key=lambda name: (-len(held[name]), -order[name]))
    holders = [
        Holder(name, len(held[name]), tuple(path for path in forms if path not in held[name]))
        for name in names
    ]
    newest_first = sorted(names, key=order.__getitem__, reverse=True)
    # Among equals, one that has the tensors under their own names comes first.
    alike = [each for each in holders[:_MOST_NAMED] if each.found == holders[0].found]
    for each in alike:
        if not _renamed(snapshots[each.name], held[each.name], asked.of_ranks):
            holders.remove(each)
            holders.insert(0, each)
            break
    first = holders[0] if holders else None
    elsewhere = {
        path: [name for name in newest_first if path in held[name]]
        for path in (first.lacking if first else ())
    }
    cast = {
        path: identity[0]
        for path, identity in (held[first.name].items() if first else ())
        if identity != forms[path][0] and (path, identity) not in rounded
    }
    of_more_bits = {
        path: identity[0]
        for path, identity in (held[first.name].items() if first else ())
        if (path, identity) in rounded
    }
    renamed = _renamed(snapshots[first.name], held[first.name], asked.of_ranks) if first else {}
    return WhoReport(len(forms), holders, elsewhere, cast, of_more_bits, renamed)


def _more(found: Sized, things: str) -> list[str]:
    """Return a line that says how many things are not named; no line if all are."""
    more = len(found) - _MOST_NAMED
    return [f"… and {more:,} more {things}"] if more > 0 else []


def _renamed(
    contents: Contents, held: Mapping[str, TensorContent], of_ranks: Collection[str]
) -> dict[str, str]:
    """Return the tensors that a snapshot has under other names, while theirs mean others.

    A name is a path below a key: what an average of the weights has under the same name counts.

    Args:
        contents: The snapshot.
        held: The path of each tensor that it holds → what it has of it.
        of_ranks: The paths that begin with a rank.

    Returns:
        Path → a path of the tensor in the snapshot.
    """

    def tensors_in(_: str, items: Sequence[tuple[str, Entry]]) -> list[tuple[str, TensorContent]]:
        return [(inner, identity) for inner, entry in items if (identity := _identity(entry))]

    paths: dict[TensorContent, dict[str, str]] = {}
    for tree, tensors in _leaf_nodes(contents, tensors_in, {}):
        for inner, identity in tensors:
            paths.setdefault(identity, {}).setdefault(inner, tree.label + inner)
    names = {inner for found in paths.values() for inner in found}
    renamed = {}
    for path, identity in held.items():
        name = path[path.find("/", path.find("/") + 1 if path in of_ranks else 0) :]
        if name in names and name not in paths[identity]:
            renamed[path] = next(iter(paths[identity].values()))
    return renamed


def _add_rounded(
    held: dict[str, dict[str, TensorContent]],
    snapshots: Mapping[str, Contents],
    asked: Asked,
    forms: Mapping[str, Sequence[TensorContent]],
) -> set[tuple[str, TensorContent]]:
    """Add the tensors that were cast to fewer bits, if no snapshot holds all.

    Args:
        held: What each snapshot holds, as :func:`_held` returns it. This adds to it.
        snapshots: The snapshots, in the order of their commits.
        asked: The tensors.
        forms: The path of each tensor → its identities, as for :func:`_held`.

    Returns:
        Path and stored form of each tensor that was added.
    """
    if any(len(paths) == len(forms) for paths in held.values()):
        return set()
    search = RoundedSearch({path: leaf for path, leaf in asked.leaves.items() if path in forms})
    added = set[tuple[str, TensorContent]]()
    for name in list(snapshots)[: -MOST_SNAPSHOTS - 1 : -1]:
        found = search.found_in(snapshots[name])
        more = {path: form for path, form in found.items() if path not in held.get(name, ())}
        if more:
            added.update(more.items())
            held.setdefault(name, {}).update(more)
            if len(held[name]) == len(forms):
                break
    return added


def equal_weights(snapshots: Mapping[str, Contents]) -> list[list[str]]:
    """Return groups of snapshots; the snapshots of one group have equal weights.

    Buffers do not count, since each forward of a model may change them.

    Args:
        snapshots: The snapshots, by the names to return, in the order of their commits.

    Returns:
        Groups of at least two names, in the order of their first ones. Snapshots without weights
        are in none.

    Raises:
        DamagedError: A node of a snapshot is missing or damaged.
    """

    def weights_in(component: str, items: Sequence[tuple[str, Entry]]) -> list[Any]:
        """Return path and identity of each tensor of weights in a leaf node."""
        return [
            (inner, identity)
            for inner, entry in items
            if (identity := _identity(entry)) and is_trained(component + inner, entry)
        ]

    groups: dict[bytes, list[str]] = {}
    read: dict[tuple[str, bytes], list[Any]] = {}
    for name, contents in snapshots.items():
        found = [
            (tree.label, inner, identity)
            for tree, weights in _leaf_nodes(contents, weights_in, read)
            for inner, identity in weights
        ]
        if found:
            groups.setdefault(digest_of(encode(found)), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _identity(entry: Entry) -> TensorContent | None:
    """Return dtype, shape and payload, which equal tensors share; None without elements.

    The result is also None for an entry that is no tensor.
    """
    if not isinstance(entry, TensorEntry) or not entry.payload.nbytes:
        return None
    return content_of(entry)


def _narrowed(leaf: Leaf, chunk_size: int) -> Iterator[TensorContent]:
    """Yield the identity of a tensor in each narrower dtype that holds its values."""
    tensor, entry = leaf.content, leaf.entry
    if not (isinstance(tensor, torch.Tensor) and isinstance(entry, TensorEntry)):
        return
    if entry.dtype not in _NARROWER:
        return
    if tensor.dtype == torch.uint8:
        # The content of a leaf of a file: its last axis has the bytes of an element.
        tensor = tensor.contiguous().view(TENSOR_DTYPES[entry.dtype]).reshape(entry.shape)
    for dtype in _NARROWER[entry.dtype]:
        narrow = tensor.to(TENSOR_DTYPES[dtype])
        if torch.equal(narrow.to(tensor.dtype), tensor):
            source = DividedLeaves({MODEL: list(tensor_leaves({"x": narrow}, MODEL))})
            yield from filter(None, map(_identity, entries_of(source, chunk_size).values()))


def _held(
    snapshots: Mapping[str, Contents], forms: Mapping[str, Sequence[TensorContent]]
) -> dict[str, dict[str, TensorContent]]:
    """Return, for each snapshot that holds any of the tensors, which of them it holds.

    Args:
        snapshots: The snapshots, by name.
        forms: The path of each tensor → its identity, then its identities in narrower dtypes.

    Returns:
        Name → path of each tensor that the snapshot holds → the first of its identities that it
        has.
    """
    wanted = {identity for identities in forms.values() for identity in identities}

    def held_in(_: str, items: Sequence[tuple[str, Entry]]) -> set[TensorContent]:
        return {i for _, entry in items if (i := _identity(entry)) and i in wanted}

    held: dict[str, dict[str, TensorContent]] = {}
    read: dict[tuple[str, bytes], set[TensorContent]] = {}
    for name, contents in snapshots.items():
        there = set[TensorContent]().union(
            *(got for _, got in _leaf_nodes(contents, held_in, read))
        )
        paths = {
            path: identity
            for path, identities in forms.items()
            for identity in reversed(identities)
            if identity in there
        }
        if paths:
            held[name] = paths
    return held


def _leaf_nodes(
    contents: Contents,
    look: Callable[[str, Sequence[tuple[str, Entry]]], T],
    read: dict[tuple[str, bytes], T],
) -> list[tuple[OwnedTree, T]]:
    """Return the result of ``look`` for each leaf node of a snapshot, with the tree of the node.

    The list is empty if the snapshot is deleted or replaced meanwhile, and its nodes are collected.

    Args:
        contents: The snapshot.
        look: Called with a component, and with the items of a leaf node: paths below the component,
            each with its entry.
        read: Component and digest of a leaf node → the result of ``look``. So ``look`` is called
            once for a node that several snapshots share.
    """
    found: list[tuple[OwnedTree, T]] = []
    try:
        with contents.reading():
            for owned in contents.manifest.trees():
                component, tree = owned.component, contents.tree(owned.digest)
                pending = [Digest(digest) for _, digest, _ in reversed(tree.children)]
                while pending:
                    digest = pending.pop()
                    if (component, digest) not in read:
                        node = tree.node(digest)
                        if not isinstance(node, LeafNode):
                            pending += [Digest(d) for _, d, _ in reversed(node.children)]
                            continue
                        read[component, digest] = look(component, node.items)
                    found.append((owned, read[component, digest]))
    except SnapshotNotFoundError:
        return []
    return found
