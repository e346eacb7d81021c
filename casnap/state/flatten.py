"""Flatten a state into leaves with paths, and build it again.

A container becomes a :class:`~casnap.format.entries.ContainerEntry`, whose spec holds the keys in
order. The leaves of its elements follow, below its path. Both directions keep their own stack, so
deep states do not hit the recursion limit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from casnap.errors import CasnapError, DamagedError, UnsupportedTypeError
from casnap.format.entries import (
    INLINE_BYTES,
    ContainerEntry,
    Payload,
    TensorEntry,
    ValueEntry,
)
from casnap.format.records import encode
from casnap.format.region import Region
from casnap.state.containers import (
    Build,
    Opened,
    container_builder,
    open_container,
    open_sparse,
)
from casnap.state.overlap import overlaps_itself
from casnap.state.parts import check_whole
from casnap.state.sharded import Shards, shards_of
from casnap.state.tensors import (
    ORDINARY_TYPES,
    Leaf,
    NoValuesError,
    TensorSubclassError,
    assemble,
    describe,
    is_fillable,
)
from casnap.state.values import (
    DECODE_ERRORS,
    PICKLE_ADVICE,
    PLAIN_BY_TYPE,
    PLAIN_TYPES,
    decode_value,
    encode_value,
)

__all__ = [
    "Known",
    "Leaf",
    "containers_of",
    "decode",
    "fill_targets",
    "flatten",
    "inflate",
    "live_parts",
    "map_leaves",
    "tensor_leaves",
]

MAX_NESTING = 1000


def _walk(value: Any, path: str, *, sparse: bool) -> Iterator[tuple[str, Any, Opened | None]]:
    """Yield each path of a state with its value; a container before its elements.

    Args:
        value: The state.
        path: Its path.
        sparse: Whether to open sparse tensors as containers of their parts.

    Yields:
        The path, the value, and the opened container; None for a tensor or plain value.
    """
    stack: list[tuple[int, Iterator[tuple[str, Any]]]] = [(0, iter(((path, value),)))]
    ancestors: set[int] = set()
    strided = torch.strided
    while stack:
        ident, items = stack[-1]
        for child_path, child in items:
            kind, node = type(child), None
            if kind in ORDINARY_TYPES:
                check_whole(child_path, child)
                if sparse and child.layout is not strided:
                    node = open_sparse(child_path, child)
            elif kind not in PLAIN_TYPES:
                node = open_container(child_path, child)
            yield child_path, child, node
            if node is not None:
                _check_nesting(child_path, child, ancestors)
                prefix = child_path + "/"
                ancestors.add(id(child))
                children = zip([prefix + s for s in node.components], node.children, strict=True)
                stack.append((id(child), children))
                break
        else:
            stack.pop()
            ancestors.discard(ident)


def _check_nesting(path: str, value: object, ancestors: set[int]) -> None:
    short = path if len(path) < 200 else f"{path[:100]}…{path[-100:]}"
    if id(value) in ancestors:
        raise UnsupportedTypeError(
            f"{short}: this {type(value).__name__} refers to itself; break the cycle to store it"
        )
    if len(ancestors) >= MAX_NESTING:
        raise UnsupportedTypeError(
            f"{short}: containers are nested more than {MAX_NESTING} deep; flatten them"
        )


def flatten(value: Any, path: str, *, allow_pickle: bool | None = None) -> Iterator[Leaf]:
    """Yield the leaves of a state: each container, then its elements.

    Args:
        value: Tensors, numpy arrays, plain values and containers of these.
        path: The path of the state; the paths of all leaves begin with it.
        allow_pickle: Whether to pickle values that have no safe encoding. None means False, for a
            caller without that option: error messages then do not advise it.

    Raises:
        UnsupportedTypeError: A value cannot be stored; the message names its path.
    """
    arrays = _arrays()
    with _naming_recursion(path):
        for child_path, child, node in _walk(value, path, sparse=True):
            if node is not None:
                yield _container_leaf(child_path, node)
            elif (codec := PLAIN_BY_TYPE.get(type(child))) is not None:
                data = codec.encode(child)
                assert data is not None, "what is plain loses nothing"
                yield _leaf_of(child_path, codec.kind, data)
            elif type(child) in ORDINARY_TYPES:
                yield describe(child_path, child)
            elif isinstance(child, arrays):
                yield _array_leaf(child_path, child, allow_pickle)
            else:
                yield _value_leaf(child_path, child, allow_pickle)


def tensor_leaves(value: Any, path: str) -> Iterator[Leaf]:
    """Yield the leaves of the tensors and arrays of a state; pass over its containers and values.

    Args:
        value: As for :func:`flatten`.
        path: As for :func:`flatten`.

    Raises:
        UnsupportedTypeError: A tensor cannot be stored; the message names its path.
    """
    arrays = _arrays()
    with _naming_recursion(path):
        for child_path, child, node in _walk(value, path, sparse=True):
            # An array of objects is a value.
            is_array = node is None and isinstance(child, arrays)
            if is_array and not getattr(child.dtype, "hasobject", False):
                yield describe(child_path, child)


@contextmanager
def _naming_recursion(path: str) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise UnsupportedTypeError(
            f"{path}: keys or elements of sets are nested too deeply; flatten them"
        ) from None


def containers_of(value: Any, path: str) -> Iterator[Leaf]:
    """Yield the leaves of all containers in a state, without those of its tensors and values."""
    for child_path, _, node in _walk(value, path, sparse=False):
        if node is not None:
            yield _container_leaf(child_path, node)


def _container_leaf(path: str, node: Opened) -> Leaf:
    spec = encode(node.spec()) if node.spec is not None else b""
    return Leaf(path, ContainerEntry(_payload(spec), node.kind, len(node.children)), spec)


def _value_leaf(path: str, value: object, allow_pickle: bool | None) -> Leaf:
    return _leaf_of(path, *encode_value(path, value, allow_pickle=allow_pickle))


def _leaf_of(path: str, kind: str, data: bytes) -> Leaf:
    return Leaf(path, ValueEntry(_payload(data), kind), data)


def _payload(data: bytes) -> Payload:
    return Payload(len(data), data if len(data) <= INLINE_BYTES else b"")


def _array_leaf(path: str, value: object, allow_pickle: bool | None) -> Leaf:
    try:
        return describe(path, value)
    except NoValuesError:
        raise
    except UnsupportedTypeError as e:
        if allow_pickle is False and isinstance(e, TensorSubclassError):
            raise UnsupportedTypeError(f"{e}{PICKLE_ADVICE}") from e
        if not allow_pickle:
            raise
    return _value_leaf(path, value, allow_pickle)


def _arrays() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return (torch.Tensor, *((numpy.ndarray, numpy.generic) if numpy is not None else ()))


def fill_targets(value: Any, path: str) -> dict[str, Shards]:
    """Return the tensors of a live state that can be filled in place, by path.

    An ordinary tensor is one shard. Left out are tensors that are quantized, sparse, expanded or on
    the meta device, views with a pending conjugation or negation, and tensors of other subclasses.

    Raises:
        UnsupportedTypeError: A container refers to itself, the placements of a sharded tensor do
            not determine which elements this rank holds, or a tensor is marked as parts of another.
    """
    targets: dict[str, Shards] = {}
    for child_path, child, node in _walk(value, path, sparse=False):
        if node is not None or not isinstance(child, torch.Tensor):
            continue
        if type(child) in ORDINARY_TYPES:
            if is_fillable(child):
                shape = tuple(child.shape)
                targets[child_path] = Shards(shape, (Region.whole(shape),), (child,), child)
        else:
            shards = shards_of(child_path, child)
            if shards is not None and all(map(_is_fillable_part, shards.tensors)):
                targets[child_path] = shards
    return targets


def _is_fillable_part(part: torch.Tensor) -> bool:
    return is_fillable(part) and not overlaps_itself(part)


# --- inflate ----------------------------------------------------------------------------------


class Reopened(NamedTuple):
    """A container that has been read from a store, though its elements have not.

    Attributes:
        components: The path component of each element: a list for the keys of a dict, an iterator
            for the indices of a sequence, since a damaged store may claim any number of elements.
        build: Makes the container from its elements.
    """

    components: Iterable[str]
    build: Build


Known: TypeAlias = Mapping[str, Any]
"""Path → a value that need not be decoded, or a :class:`Reopened` container."""


def live_parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each path of a live state with its value, in the form of :func:`inflate`'s ``known``.

    A container comes as a :class:`Reopened`.
    """
    for child_path, child, node in _walk(value, path, sparse=False):
        if node is None:
            yield child_path, child
        else:
            leaf = _container_leaf(child_path, node)
            yield child_path, decode_one(leaf)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Replace each tensor and value of a state; its containers are built again as they were.

    Args:
        value: The state.
        change: Called with each tensor and value; returns the replacement.
    """
    path = "the state"
    parts = live_parts(value, path)
    known = {p: part if isinstance(part, Reopened) else change(part) for p, part in parts}
    return inflate(path, {}, known=known)


def decode(leaves: Iterable[Leaf], *, allow_pickle: bool | None) -> dict[str, Any]:
    """Return, by path, the decoded values and containers of some leaves.

    :func:`inflate` takes the result as ``known``.

    Args:
        leaves: The leaves, none of a tensor.
        allow_pickle: Whether to unpickle pickled values. None as for :func:`flatten`.

    Raises:
        DamagedError: The bytes of a leaf are not those that were written.
        UnsupportedTypeError: A value needs a class that is not imported, or ``allow_pickle``.
        UnsupportedFormatError: An entry is of a kind that a newer version wrote.
    """
    return {leaf.path: decode_one(leaf, allow_pickle=allow_pickle) for leaf in leaves}


def decode_one(leaf: Leaf, *, allow_pickle: bool | None = None) -> Any:
    """Return the decoded value of a leaf without a tensor; a container as :class:`Reopened`.

    Raises:
        CasnapError: As :func:`decode` does.
    """
    path, entry, content = leaf.path, leaf.entry, leaf.content
    assert isinstance(entry, ValueEntry | ContainerEntry)
    if not isinstance(content, bytes):
        raise DamagedError(f"{path} is not a tensor, but has the content of one", (path,))
    if isinstance(entry, ValueEntry):
        return decode_value(path, entry.kind, content, allow_pickle=allow_pickle)
    try:
        components, build = container_builder(path, entry, content)
        return Reopened(components, build)
    except DamagedError as e:
        raise (e if e.paths else DamagedError(f"{path}: {e}", (path,))) from e
    except CasnapError:
        raise
    except RecursionError as e:
        raise DamagedError(f"{path} has keys that are nested too deeply", (path,)) from e
    except DECODE_ERRORS as e:
        raise DamagedError(f"{path} cannot be put together: {e}", (path,)) from e


def too_deep(path: str) -> DamagedError:
    """Return the error for containers that are nested too deep for casnap."""
    return DamagedError(f"{path:.200} has containers more than {MAX_NESTING:,} deep", (path,))


class _Frame(NamedTuple):
    """A container whose elements :func:`inflate` is collecting.

    Attributes:
        path: The path of the container.
        build: Makes the container from its elements.
        paths: The paths of the elements still to be collected.
        children: The elements so far.
    """

    path: str
    build: Build
    paths: Iterator[str]
    children: list[Any]


def inflate(
    path: str,
    leaves: Mapping[str, Leaf],
    *,
    allow_pickle: bool | None = None,
    known: Known | None = None,
    skipped: Collection[str] = (),
) -> Any:
    """Return the state that was flattened.

    Args:
        path: The path of the state.
        leaves: The leaves by path; leaves of other states are ignored.
        allow_pickle: Whether to unpickle pickled values. Only for a trusted store. None as for
            :func:`flatten`.
        known: Values and containers by path, decoded; for these no leaf is needed.
        skipped: Paths of elements of dicts that are left out.

    Raises:
        DamagedError: Leaves are missing or contradict each other.
        UnsupportedTypeError: A value needs a class that is not imported, or ``allow_pickle``.
        UnsupportedFormatError: An entry is of a kind that a newer version wrote.
    """
    known = known or {}
    lacking = {other.rpartition("/")[0] for other in skipped}
    stack = [_Frame(path, lambda children: children[0], iter((path,)), [])]
    while True:
        frame = stack[-1]
        for child_path in frame.paths:
            if child_path in known:
                child = known[child_path]
            elif (leaf := leaves.get(child_path)) is None:
                raise DamagedError(f"{child_path} is missing from the snapshot", (child_path,))
            elif isinstance(leaf.entry, TensorEntry):
                child = assemble(leaf)
            else:
                child = decode_one(leaf, allow_pickle=allow_pickle)
            if isinstance(child, Reopened):
                if len(stack) > MAX_NESTING:
                    raise too_deep(path)
                prefix = child_path + "/"
                if child_path in lacking:
                    child = _without(prefix, child, skipped)
                paths = map(prefix.__add__, child.components)
                stack.append(_Frame(child_path, child.build, paths, []))
                break
            frame.children.append(child)
        else:
            stack.pop()
            value = _build_container(frame)
            if not stack:
                return value
            stack[-1].children.append(value)


def _without(prefix: str, container: Reopened, skipped: Collection[str]) -> Reopened:
    """Return a container without the elements at skipped paths. Only dicts can lose elements.

    Args:
        prefix: The path of the container, with a slash.
        container: The container.
        skipped: The paths.
    """
    components = container.components
    if not isinstance(components, list):
        return container
    is_left_out = [prefix + component in skipped for component in components]
    if not any(is_left_out):
        return container

    def build(children: list[Any]) -> Any:
        given = iter(children)
        value = container.build([None if left_out else next(given) for left_out in is_left_out])
        for key in [k for k, left_out in zip(value, is_left_out, strict=True) if left_out]:
            del value[key]
        return value

    return Reopened([c for c in components if prefix + c not in skipped], build)


def _build_container(frame: _Frame) -> Any:
    try:
        return frame.build(frame.children)
    except CasnapError:
        raise
    except (*DECODE_ERRORS, RecursionError) as e:
        raise DamagedError(f"{frame.path} cannot be put together: {e}", (frame.path,)) from e
