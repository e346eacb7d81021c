"""Check that entries make sense: lengths of tensors, bytes of values and specs, elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from casnap.errors import CasnapError, DamagedError, UnsupportedFormatError
from casnap.format.entries import (
    INLINE_BYTES,
    ContainerEntry,
    Entry,
    KnownEntry,
    TensorEntry,
    ValueEntry,
    unknown_in,
)
from casnap.state.flatten import MAX_NESTING, Reopened, decode_one, too_deep
from casnap.state.tensors import Leaf, check_tensor

_MOST_DECODED = 16 << 20
# Kinds whose bytes are not decoded: any bytes are valid, or a check must not load what torch.save
# wrote.
_ANY_BYTES = frozenset({"int", "bytes", "bytearray", "object", "pickle"})

Read = Callable[[str, KnownEntry], "bytes | None"]
"""Returns the bytes of an entry; None if this check does not read them."""


def is_decoded(entry: Entry) -> bool:
    """Whether a check decodes the value or spec of an entry, to see that it is well formed."""
    is_plain = isinstance(entry, ValueEntry | ContainerEntry) and not unknown_in(entry)
    return is_plain and entry.kind not in _ANY_BYTES and entry.payload.nbytes <= _MOST_DECODED


def check_entry(path: str, entry: KnownEntry, read: Read) -> Iterable[str]:
    """Check an entry alone: its length, and that its value or spec can be decoded.

    Args:
        path: Its path, with its key.
        entry: The entry. This version knows it.
        read: Reads the bytes of a value or container.

    Returns:
        The components of the elements of a container, if they are known.

    Raises:
        DamagedError: The entry does not make sense.
        UnsupportedFormatError: A later version has to judge the entry.
    """
    payload = entry.payload
    if payload.nbytes <= INLINE_BYTES and len(payload.inline) != payload.nbytes:
        raise DamagedError(
            f"{path} says {payload.nbytes} bytes, and holds {len(payload.inline)}", (path,)
        )
    try:
        if isinstance(entry, TensorEntry):
            check_tensor(entry)
        elif isinstance(entry, ContainerEntry):
            if path.count("/") >= MAX_NESTING:
                raise too_deep(path)
            with suppress(CasnapError):  # raised again below, with its path
                return _components_of(entry)
            container = _decoded(path, entry, read)
            return container.components if isinstance(container, Reopened) else ()
        elif entry.kind not in _ANY_BYTES:
            _decoded(path, entry, read)
    except (DamagedError, UnsupportedFormatError):
        raise
    except CasnapError:
        pass  # it needs a class, or a torch, that is not here
    return ()


def _decoded(path: str, entry: ValueEntry | ContainerEntry, read: Read) -> object:
    """Return a value or container decoded; None if it is too large, or ``read`` returns None."""
    if entry.payload.nbytes > _MOST_DECODED:
        return None
    content = read(path, entry)
    if content is None:
        return None
    return decode_one(Leaf(path, entry, content))


@lru_cache(1 << 10)
def _components_of(entry: ContainerEntry) -> Iterable[str]:
    """Return the components of a container whose entry holds its spec.

    The result is cached, since most containers of a store are alike.

    Raises:
        CasnapError: The entry does not hold the spec, or the spec is damaged.
    """
    components: Iterable[str] = decode_one(Leaf("", entry, entry.payload.inline)).components
    return components


def balance(inner: str, entry: Entry, components: Iterable[str], most: int) -> int:
    """Return a number for an entry.

    The numbers of all entries of a key sum to 0 if no container lacks an element.

    An entry adds the hash of its path, except the key's own entry. A container subtracts the hash
    of each element's path. So each tree is summed up only once, and the sums of the trees that a
    rank sees are added.

    Args:
        inner: The path of the entry below its key.
        entry: The entry.
        components: The components of the elements of the entry.
        most: How many entries the tree has. A container that claims more elements gets a number
            that makes any sum differ from 0.
    """
    own = hash(inner) if inner else 0
    if not isinstance(entry, ContainerEntry):
        return own
    if entry.count > most:
        return own - hash((inner, entry.count))
    return own - sum(map(hash, map(f"{inner}/".__add__, components)))


@dataclass
class _Elements:
    """The elements of a container that have not been found yet.

    Attributes:
        names: The components of a dict's elements; None if they are indices.
        count: How many there are.
    """

    names: set[str] | None
    count: int

    def see(self, name: str) -> None:
        if self.names is None:
            is_one = name.isdecimal() and str(int(name[:20])) == name and int(name) < self.total
            self.count -= is_one
        elif name in self.names:
            self.names.remove(name)
            self.count -= 1

    def __post_init__(self) -> None:
        self.total = self.count


def lacking_elements(
    entries: Iterable[tuple[str, Entry]], read: Read
) -> Iterator[tuple[str, DamagedError]]:
    """Yield the path of each container that lacks elements, and an error with their number.

    Args:
        entries: All entries of a key that a rank sees, in order, by path.
        read: Reads the spec of a container.
    """
    pending: dict[str, _Elements] = {}
    for path, entry in entries:
        parent, slash, name = path.rpartition("/")
        if slash and parent in pending:
            pending[parent].see(name)
        if not isinstance(entry, ContainerEntry) or unknown_in(entry):
            continue
        try:
            container = _decoded(path, entry, read)
        except CasnapError:
            continue
        if isinstance(container, Reopened):
            components = container.components
            names = set(components) if isinstance(components, list) else None
            pending[path] = _Elements(names, entry.count if names is None else len(names))
    for path, elements in pending.items():
        if elements.count:
            which = f", such as {min(elements.names)!r:.80}" if elements.names else ""
            yield path, DamagedError(f"{path} lacks {elements.count:,} of its elements{which}")
