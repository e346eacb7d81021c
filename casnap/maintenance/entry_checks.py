"""Whether entries make sense: a tensor's length, what values and specs decode to, elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

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
from casnap.state.flatten import Reopened, decode
from casnap.state.tensors import Leaf, check_shape

_MOST_DECODED = 16 << 20
# Any bytes are one of these; what `torch.save` wrote is not loaded by a check.
_ANY_BYTES = frozenset({"bytes", "bytearray", "object", "pickle"})

Read = Callable[[str, KnownEntry], "bytes | None"]
"""Returns the bytes of an entry; None if they are not to be read."""


def check_entry(path: str, entry: KnownEntry, read: Read) -> None:
    """Check that an entry makes sense by itself.

    Raises:
        DamagedError: It does not.
        UnsupportedFormatError: A later version has to judge it.
    """
    payload = entry.payload
    if payload.nbytes <= INLINE_BYTES and len(payload.inline) != payload.nbytes:
        raise DamagedError(
            f"{path} says {payload.nbytes} bytes, and holds {len(payload.inline)}", (path,)
        )
    try:
        if isinstance(entry, TensorEntry):
            check_shape(entry)
        else:
            _decoded(path, entry, read)
    except (DamagedError, UnsupportedFormatError):
        raise
    except CasnapError:
        pass  # it needs a class, or a torch, that is not here


def _decoded(path: str, entry: ValueEntry | ContainerEntry, read: Read) -> object:
    """Return a value or container decoded; None if it is not to be."""
    if entry.kind in _ANY_BYTES or entry.payload.nbytes > _MOST_DECODED:
        return None
    content = read(path, entry)
    if content is None:
        return None
    return decode([Leaf(path, entry, content)], allow_pickle=False)[path]


@dataclass
class _Elements:
    """The elements of a container that were not seen yet.

    Attributes:
        names: The components of a dict's elements; None where they are numbers.
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
    """Yield the containers that lack elements, by path, and what they lack.

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
