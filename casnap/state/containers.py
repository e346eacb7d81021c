"""Containers: open them into their elements, and build them again from elements.

``casnap.format.names`` turns keys into path components.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from msgspec import Struct

from casnap.errors import DamagedError, UnsupportedFormatError, UnsupportedTypeError
from casnap.format.entries import ContainerEntry, Entry
from casnap.format.names import Key, Tagged, components_of
from casnap.format.records import decode, encode
from casnap.state.values import (
    decode_keys,
    encode_key,
    find_class,
    is_packable,
    stable_order,
)

_log = logging.getLogger("casnap")

# --- specs ------------------------------------------------------------------------------------


class _Keys(Struct, frozen=True, array_like=True):
    """The spec of a dict: all that is stored of it except its elements.

    Attributes:
        keys: The keys in order.
        factory: The name of a defaultdict's factory.
        metadata: The metadata that nn.Module adds to its state dict: submodule → its version and
            the like.
    """

    keys: list[Key]
    factory: str | None = None
    metadata: dict[str, dict[str, bool | int | float | str | None]] | None = None


class _Deque(Struct, frozen=True, array_like=True):
    maxlen: int | None


class _Named(Struct, frozen=True, array_like=True):
    module: str
    name: str
    fields: tuple[str, ...]


class _Sparse(Struct, frozen=True, array_like=True):
    size: tuple[int, ...]
    coalesced: bool
    parameter: bool
    requires_grad: bool


_FACTORIES: dict[str, Any] = {
    f.__name__: f for f in (list, dict, int, float, str, set, tuple, bool)
}

_METADATA_TYPES = {bool, int, float, str, type(None)}

_SPARSE = {
    torch.sparse_coo: ("sparse_coo", ("indices", "values")),
    torch.sparse_csr: ("sparse_csr", ("crow_indices", "col_indices", "values")),
    torch.sparse_csc: ("sparse_csc", ("ccol_indices", "row_indices", "values")),
    torch.sparse_bsr: ("sparse_bsr", ("crow_indices", "col_indices", "values")),
    torch.sparse_bsc: ("sparse_bsc", ("ccol_indices", "row_indices", "values")),
}
DICT_KINDS = frozenset({"dict", "OrderedDict", "defaultdict", "Counter"})
_SPARSE_KINDS = {kind: (layout, parts) for layout, (kind, parts) in _SPARSE.items()}


# --- components -------------------------------------------------------------------------------


def _are_components(keys: Sequence[Any]) -> bool:
    """Whether each key is an ASCII text that is a component of a path without escapes.

    All keys are checked together, since a call for each would take longer.
    """
    if set(map(type, keys)) != {str}:
        return False
    joined = "".join(keys)
    return joined.isascii() and "%" not in joined and "/" not in joined


def _components(keys: list[Key]) -> list[str]:
    return list(keys) if _are_components(keys) else components_of(keys)  # type: ignore[arg-type]


_UNSTORABLE = Tagged("", b"")
"""Stands for a key that cannot be stored. No path in a snapshot has the component of this key."""


def _encoded(keys: list[Any]) -> list[Key]:
    if _are_components(keys):
        return keys
    encoded = list[Key]()
    for key in keys:
        try:
            encoded.append(encode_key(key))
        except UnsupportedTypeError:
            encoded.append(_UNSTORABLE)
    return encoded


def live_components(keys: Iterable[Any]) -> list[str]:
    """Return the path component of each key of a live dict, even of a key that cannot be stored."""
    return _components(_encoded(list(keys)))


def _first_twice(components: list[str]) -> str | None:
    """Return a component that two keys share; None if all components differ."""
    if len(set(components)) == len(components):
        return None
    return Counter(components).most_common(1)[0][0]


# --- opening ------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """A container, opened into its elements.

    Attributes:
        kind: The kind of the container.
        components: The path component of each element.
        children: The elements.
        spec: Returns the spec: all that is stored of the container besides its elements. It is
            called only by a take; a restore does not need the spec. None if the kind has no spec.
    """

    kind: str
    components: Iterable[str]
    children: list[Any]
    spec: Callable[[], Struct] | None = None


_Opener: TypeAlias = Callable[[str, Any], Opened | None]


def _open_mapping(path: str, value: Any) -> Opened:
    kind = type(value).__name__
    keys = list(value)
    encoded = _encoded(keys)
    components = _components(encoded)

    def spec() -> _Keys:
        _check_storable(path, keys, encoded, components)
        factory = _factory_name(path, value.default_factory) if kind == "defaultdict" else None
        metadata = _metadata_of(path, value) if kind == "OrderedDict" else None
        return _Keys(encoded, factory, metadata)

    return Opened(kind, components, list(value.values()), spec)


def _metadata_of(path: str, value: Any) -> dict[str, Any] | None:
    """Return the metadata of a module's state dict, as they are stored.

    Items that cannot be stored are left out, with a warning. The warning also names attributes of
    the dict other than its metadata, which are never stored.
    """
    left_out = [f"the attribute {name}" for name in vars(value) if name != "_metadata"]
    metadata = getattr(value, "_metadata", None)
    kept: dict[str, dict[str, Any]] | None = None
    if isinstance(metadata, Mapping):
        kept = {}
        for name, local in metadata.items():
            if not isinstance(local, Mapping) or not _is_storable(name, 0):
                left_out.append(f"the metadata of the submodule {name!r:.80}")
                continue
            kept[name] = {key: item for key, item in local.items() if _is_storable(key, item)}
            left_out += [
                f"{key!r:.80} of the metadata of the submodule {name!r:.80}"
                for key in local
                if key not in kept[name]
            ]
    elif metadata is not None:
        left_out.append("the attribute _metadata")
    if left_out:
        _say_left_out(path, tuple(left_out))
    return None if kept is None else _named_as_keys(kept, value)


def _is_storable(key: object, value: object) -> bool:
    """Whether a key and a value of a module's metadata have plain types, and can be encoded."""
    if type(key) is not str or type(value) not in _METADATA_TYPES:
        return False
    if key.isascii() and type(value) is int and -(1 << 31) < value < 1 << 31:
        return True  # fast, for nearly all items: there may be a hundred thousand submodules
    try:
        encode((key, value))
    except (OverflowError, UnicodeEncodeError):  # an int beyond 64 bits, a lone surrogate
        return False
    return True


@lru_cache(maxsize=256)
def _say_left_out(path: str, names: tuple[str, ...]) -> None:
    """Warn, once and not at each take, that parts of a state dict are not stored."""
    some = ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
    _log.warning(
        "%s: beside the items of this state dict, %s cannot be stored and is left out; the rest, "
        "such as the versions of modules, is kept",
        path,
        some,
    )


def _named_as_keys(metadata: dict[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the metadata of a state dict, under the names that a loader may look up.

    DDP and ``torch.compile`` add parts such as ``module`` or ``_orig_mod`` to names of submodules.
    ``get_state_dict`` removes these parts from the keys, but not from the names in the metadata. So
    this function adds the metadata under the plain names too.

    It replaces names with the part of DDP, so that a snapshot is the same with DDP and without. If
    the keys have such parts as well, the metadata are returned unchanged.

    Args:
        metadata: The metadata of each submodule, by name.
        keys: The state dict.
    """
    levels = _ddp_levels(metadata, keys)
    plain_names = _plain_names(metadata, levels)
    if not any(name != plain for name, plain in plain_names.items()):
        return metadata
    for parts in (str(key).split(".") for key in keys):
        if parts[0] == _DDP or not _WRAPPERS.isdisjoint(parts):
            return metadata
    # The innermost comes last: a wrapper has the plain name of its module too.
    inner = {_without_ddp(name, levels): local for name, local in metadata.items()}
    return inner | {plain_names[name]: metadata[name] for name in sorted(metadata, key=len)}


_DDP = "module"
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""The parts that torch.compile, FSDP1 and activation checkpointing add to names of submodules."""


def without_wrappers(names: Iterable[str], keys: Iterable[Any]) -> dict[str, str]:
    """Remove from the names of submodules the parts that wrappers add.

    Args:
        names: The names of all submodules of a module.
        keys: The keys of the module's state dict.

    Returns:
        Name → plain name.
    """
    names = list(names)
    return _plain_names(names, _ddp_levels(names, keys))


def _plain_names(names: Iterable[str], levels: int) -> dict[str, str]:
    """Return names without the parts that wrappers add.

    Args:
        names: The names of submodules.
        levels: How many DDPs are around the module. Each adds the part ``module``.
    """
    parts = {name: _plain_parts(name) for name in names}
    return {name: ".".join(each[min(levels, _depth(each)) :]) for name, each in parts.items()}


def _ddp_levels(names: Iterable[str], keys: Iterable[Any]) -> int:
    """Return how many DDPs are around a module.

    DDP puts the part ``module`` before the names of all submodules. A submodule itself may also be
    called ``module``. A leading part counts as DDP's if all submodules have it, and no key has it:
    ``get_state_dict`` removes DDP's parts from the keys, but not the names of submodules.

    Args:
        names: The names of all submodules.
        keys: The keys of the module's state dict.
    """
    parts = [_plain_parts(name) for name in names]
    if [_DDP] not in parts:
        return 0
    depths = [(_depth(each), len(each)) for each in parts]
    inner = [depth for depth, length in depths if depth < length]
    in_names = min(inner) if inner else max(depths)[0]
    in_keys = max((_depth(_plain_parts(str(key))[:-1]) for key in keys), default=0)
    return max(in_names - in_keys, 0)


def _without_ddp(name: str, levels: int) -> str:
    """Return a name without the parts ``module`` that ``levels`` DDPs add to it."""
    parts = name.split(".")
    for _ in range(min(levels, _depth(_plain_parts(name)))):
        parts.remove(_DDP)
    return ".".join(parts)


def _plain_parts(name: str) -> list[str]:
    return [part for part in name.split(".") if part and part not in _WRAPPERS]


def _depth(parts: Sequence[str]) -> int:
    """Return how many leading parts of a name are ``module``, the part that DDP adds."""
    return next((i for i, part in enumerate(parts) if part != _DDP), len(parts))


def _factory_name(path: str, factory: object) -> str | None:
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise UnsupportedTypeError(
            f"{path}: a defaultdict whose factory is {factory!r} cannot be stored; use None or one "
            f"of {', '.join(_FACTORIES)}, or store dict(value)"
        )
    return name


def _open_collection(path: str, value: Any) -> Opened | None:
    if is_packable(value):
        return None
    children = stable_order(value) if isinstance(value, set | frozenset) else list(value)
    return Opened(type(value).__name__, map(str, range(len(value))), children)


def _open_size(path: str, value: Any) -> Opened:
    return Opened("size", map(str, range(len(value))), list(value))


def _open_deque(path: str, value: Any) -> Opened:
    children = list(value)
    return Opened("deque", map(str, range(len(children))), children, lambda: _Deque(value.maxlen))


def _open_namedtuple(path: str, value: Any) -> Opened:
    kind = type(value)
    fields = kind._fields
    spec = _Named(kind.__module__, kind.__qualname__, fields)
    return Opened("namedtuple", components_of(fields), list(value), lambda: spec)


def open_sparse(path: str, value: torch.Tensor) -> Opened | None:
    """Open a sparse tensor as a container of its parts; return None for other layouts."""
    kind, parts = _SPARSE.get(value.layout, ("", ()))
    if not kind or value.is_nested:
        return None
    detached = value.detach()
    is_coo = kind == "sparse_coo"
    # An uncoalesced tensor has only the private names.
    children = [getattr(detached, f"_{part}" if is_coo else part)() for part in parts]
    spec = _Sparse(
        tuple(value.shape),
        is_coo and value.is_coalesced(),
        isinstance(value, torch.nn.Parameter),
        value.requires_grad,
    )
    return Opened(kind, parts, children, lambda: spec)


def is_sparse(entry: Entry) -> bool:
    """Whether an entry is a sparse tensor, which is stored as a container of its parts."""
    return isinstance(entry, ContainerEntry) and entry.kind in _SPARSE_KINDS


_OPENERS: dict[type, _Opener] = {
    **dict.fromkeys((dict, OrderedDict, defaultdict, Counter), _open_mapping),
    **dict.fromkeys((list, tuple, set, frozenset), _open_collection),
    deque: _open_deque,
    torch.Size: _open_size,
}


def _check_storable(path: str, keys: list[Any], encoded: list[Key], components: list[str]) -> None:
    if encoded is keys:
        return
    for key, as_stored in zip(keys, encoded, strict=True):
        if as_stored is _UNSTORABLE:
            kind = type(key)
            raise UnsupportedTypeError(
                f"{path}: the key {key!r:.80} of type {kind.__module__}.{kind.__qualname__} "
                "cannot be stored; use str, int, bool, float, complex, bytes, None, torch.dtype, "
                "or tuples of those"
            )
    if (twice := _first_twice(components)) is not None:
        alike = [key for key, c in zip(keys, components, strict=True) if c == twice]
        raise UnsupportedTypeError(
            f"{path}: the keys {alike[0]!r:.80} and {alike[1]!r:.80} are stored alike; keep one of "
            "them"
        )


def _is_namedtuple(value: object) -> bool:
    if not isinstance(value, tuple):
        return False
    fields = getattr(type(value), "_fields", None)
    return type(fields) is tuple and len(fields) == len(value) and _are_fields(fields)


def _are_fields(fields: Sequence[object]) -> bool:
    are_identifiers = all(type(f) is str and f.isidentifier() for f in fields)
    return are_identifiers and len(set(fields)) == len(fields)


def open_container(path: str, value: Any) -> Opened | None:
    """Open a container into its elements; return None if the value is not a container.

    Raises:
        UnsupportedTypeError: The container cannot be stored.
    """
    opener = _OPENERS.get(type(value))
    if opener is not None:
        return opener(path, value)
    return _open_namedtuple(path, value) if _is_namedtuple(value) else None


# --- building -----------------------------------------------------------------------------------

Build: TypeAlias = Callable[[list[Any]], Any]


class _Numbers(Iterable[str]):
    """Iterates over the path components "0", "1", … of numbered elements.

    It makes no list of them, since the count in a damaged store may be huge.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[str]:
        return map(str, range(self._count))


def container_builder(path: str, entry: ContainerEntry, spec: bytes) -> tuple[Iterable[str], Build]:
    """Return the path components of a container's elements, and the function that builds it.

    Args:
        path: The path of the container, for messages.
        entry: The entry of the container.
        spec: The encoded spec.

    Raises:
        DamagedError: The spec is not what was written.
        UnsupportedFormatError: A newer version wrote this kind of container.
    """
    reader = _READERS.get(entry.kind)
    if reader is None:
        raise UnsupportedFormatError(
            f"{path} is a container of the unknown kind {entry.kind[:40]!r}; update casnap"
        )
    components, build = reader(f"the spec of {path}", entry, spec)
    if entry.count < 0:
        raise DamagedError(f"{path} has {entry.count} elements", (path,))
    if components is None:
        return _Numbers(entry.count), build
    if len(components) != entry.count:
        raise DamagedError(f"{path} has {entry.count} elements, but not their keys", (path,))
    return components, build


_Reader: TypeAlias = Callable[[str, ContainerEntry, bytes], tuple[list[str] | None, Build]]


def _read_dict(label: str, entry: ContainerEntry, data: bytes) -> tuple[list[str], Build]:
    spec = decode(data, _Keys, label)
    keys, components = decode_keys(spec.keys), _components(spec.keys)
    if _first_twice(components) is not None or len(set(keys)) < len(keys):
        raise DamagedError(f"{label} has a key twice")
    if spec.factory is not None and spec.factory not in _FACTORIES:
        raise UnsupportedFormatError(
            f"{label} names the unknown factory {spec.factory[:40]!r}; update casnap"
        )

    def build(children: list[Any]) -> Any:
        result: dict[Any, Any] = dict(zip(keys, children, strict=True))
        if entry.kind == "dict":
            return result
        if entry.kind == "Counter":
            return Counter(result)
        if entry.kind == "defaultdict":
            return defaultdict(None if spec.factory is None else _FACTORIES[spec.factory], result)
        ordered = OrderedDict(result)
        if spec.metadata is not None:
            ordered._metadata = OrderedDict(spec.metadata)  # type: ignore[attr-defined]
        return ordered

    return components, build


def _read_plain(kind: Callable[[list[Any]], Any]) -> _Reader:
    def read(label: str, entry: ContainerEntry, data: bytes) -> tuple[None, Build]:
        if data:
            raise DamagedError(f"{label} should be empty")

        def build(children: list[Any]) -> Any:
            result = kind(children)
            if len(result) != len(children):
                raise ValueError("an element is there twice")
            return result

        return None, build

    return read


def _read_deque(label: str, entry: ContainerEntry, data: bytes) -> tuple[None, Build]:
    spec = decode(data, _Deque, label)
    if spec.maxlen is not None and spec.maxlen < entry.count:
        raise DamagedError(f"{label} allows fewer elements than there are")
    return None, lambda children: deque(children, spec.maxlen)


def _read_namedtuple(label: str, entry: ContainerEntry, data: bytes) -> tuple[list[str], Build]:
    spec = decode(data, _Named, label)
    components, kind = components_of(spec.fields), _namedtuple_class(label, spec)
    # tuple.__new__ runs no code of the class, which the store names, not the caller.
    return components, partial(tuple.__new__, kind)


def _namedtuple_class(label: str, spec: _Named) -> Any:
    kind: Any = find_class(spec.module, spec.name)
    is_same = kind is not None and issubclass(kind, tuple)
    if not is_same or getattr(kind, "_fields", None) != spec.fields:
        kind = _fresh_namedtuple(spec)
    if kind._fields != spec.fields:
        raise UnsupportedTypeError(
            f"{label} has the fields {spec.fields[:20]}, which only its own class "
            f"{spec.module}.{spec.name} can have; import {spec.module} first"
        )
    return kind


@lru_cache(maxsize=256)
def _fresh_namedtuple(spec: _Named) -> Any:
    name = spec.name.rpartition(".")[2]
    if not _are_fields(spec.fields):
        raise ValueError(f"{spec.fields[:20]} cannot be fields of a namedtuple")
    # Fields that were renamed, like "_1", get the same names again.
    return namedtuple(name, spec.fields, module=spec.module, rename=True)


def _read_sparse(label: str, entry: ContainerEntry, data: bytes) -> tuple[list[str], Build]:
    spec = decode(data, _Sparse, label)
    layout, parts = _SPARSE_KINDS[entry.kind]

    def build(children: list[Any]) -> Any:
        if not all(isinstance(child, torch.Tensor) for child in children):
            raise TypeError("a part of a sparse tensor is not a tensor")
        if layout is torch.sparse_coo:
            indices, values = children
            tensor = torch.sparse_coo_tensor(
                indices, values, spec.size, is_coalesced=spec.coalesced, check_invariants=True
            )
        else:
            compressed, uncompressed, values = children
            tensor = torch.sparse_compressed_tensor(
                compressed, uncompressed, values, spec.size, layout=layout, check_invariants=True
            )
        if spec.parameter:
            return torch.nn.Parameter(tensor, spec.requires_grad)
        return tensor.requires_grad_(spec.requires_grad)

    return list(parts), build


_READERS: dict[str, _Reader] = {
    "dict": _read_dict,
    "OrderedDict": _read_dict,
    "defaultdict": _read_dict,
    "Counter": _read_dict,
    "list": _read_plain(list),
    "tuple": _read_plain(tuple),
    "set": _read_plain(set),
    "frozenset": _read_plain(frozenset),
    "size": _read_plain(torch.Size),
    "deque": _read_deque,
    "namedtuple": _read_namedtuple,
    **dict.fromkeys(_SPARSE_KINDS, _read_sparse),
}
