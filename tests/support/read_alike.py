"""A store as ``tools/read_store.py`` reads it, which uses nothing of casnap, and as casnap does."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from casnap import Snapshot, Store
from casnap.errors import EntryNotFoundError, UnsupportedFormatError
from casnap.format.entries import (
    VALUE_KINDS,
    ContainerEntry,
    Entry,
    TensorEntry,
    ValueEntry,
)
from casnap.state.values import encode_value
from tools import read_store

_WITHOUT_BYTES_OF_THEIR_OWN = ("object", "pickle")


def assert_read_alike(path: Path) -> int:
    """Check that both readers read the same from a store; return how many entries they read."""
    store, other = Store(path, create=False), read_store.Store(path)
    snapshots = store.snapshots()
    assert {s.name: s.row.commit for s in snapshots} == {
        name: row["commit"] for name, row in other.snapshots.items()
    }
    return sum(_compare(snapshot, other) for snapshot in snapshots)


def _compare(snapshot: Snapshot, other: read_store.Store) -> int:
    count = 0
    if snapshot.row.features:
        with pytest.raises(read_store.UnsupportedError):
            other.entries(snapshot.name)
        return 0
    # One rank more than there were: it sees what is global.
    for rank in range(snapshot.world_size + 1):
        entries, others = dict(snapshot.contents.entries(rank)), other.entries(snapshot.name, rank)
        assert list(entries) == list(others)
        for path, entry in entries.items():
            _compare_entry(snapshot, f"{rank}/{path}", entry, other, others[path])
        count += len(entries)
    return count


def _compare_entry(
    snapshot: Snapshot, path: str, entry: Entry, other: read_store.Store, its_entry: list[Any]
) -> None:
    rank, _, bare = path.partition("/")
    path = path if int(rank) < snapshot.world_size else bare
    try:
        value = snapshot.read_object(path, allow_pickle=True)
    except EntryNotFoundError:
        # Ranks have their own values in it, and without a rank nobody says whose.
        assert path == bare
        assert isinstance(entry, ContainerEntry)
        return
    except UnsupportedFormatError:
        read = other.tensor if its_entry[0] == "t" else other.content
        # It gives the bytes of a value of whatever kind.
        is_readable = its_entry[0] == "v" and its_entry[2] not in VALUE_KINDS
        with nullcontext() if is_readable else pytest.raises(read_store.UnsupportedError):
            read(its_entry)
        return
    if isinstance(entry, TensorEntry):
        tensor = other.tensor(its_entry)
        assert tensor.shape == entry.shape
        assert tensor.tobytes() == _bytes_of(value)
        return
    content = other.content(its_entry)
    if isinstance(entry, ValueEntry) and entry.kind not in _WITHOUT_BYTES_OF_THEIR_OWN:
        assert encode_value(path, value, allow_pickle=False) == (entry.kind, content)


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, np.str_):
        return value.encode("utf-32-le", "surrogatepass")
    if isinstance(value, np.bytes_):
        return bytes(value)
    if isinstance(value, np.ndarray | np.generic):
        return bytes(value.tobytes())
    tensor = value.detach()
    plain = tensor.int_repr() if tensor.is_quantized else tensor
    return bytes(plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
