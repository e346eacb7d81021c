"""The snapshot table of a root: names and rows, and the rule that names must not shadow others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from casnap.errors import SnapshotExistsError, SnapshotNotFoundError, StateError
from casnap.format import MAX_METADATA_BYTES, Row
from casnap.manifest import Tree

_METADATA_DEPTH = 64

Table = Tree[Row]
Change = Callable[[Table, int], dict[str, "Row | None"]]


def check_free(table: Table, name: str, *, overwrite: bool, uri: str) -> None:
    """Check that a snapshot may be made under this name.

    Raises:
        SnapshotExistsError: The name is taken, or is a folder of, or inside of, another name.
    """
    if table.get(name) is not None and not overwrite:
        raise SnapshotExistsError(
            f"{uri} holds a snapshot {name!r} already; choose another name, delete it, or pass "
            "overwrite=True"
        )
    parts = name.split("/")
    for n in range(1, len(parts)):
        outer = "/".join(parts[:n])
        if table.get(outer) is not None:
            raise SnapshotExistsError(
                f"{uri}: {outer!r} is a snapshot, so nothing can be taken below it as {name!r}"
            )
    inner = next(table.below(f"{name}/"), None)
    if inner is not None:
        raise SnapshotExistsError(
            f"{uri}: {name!r} is the folder of the snapshot {inner[0]!r}; choose another name"
        )


def setting(name: str, row: Callable[[int], Row], *, overwrite: bool, uri: str) -> Change:
    """Return the change that adds a row, made for the number of the root it will stand in."""

    def change(table: Table, seq: int) -> dict[str, Row | None]:
        check_free(table, name, overwrite=overwrite, uri=uri)
        return {name: row(seq)}

    return change


def removing(name: str, commit: bytes, uri: str) -> Change:
    """Return the change that removes a row, if it is still that commit's."""

    def change(table: Table, _seq: int) -> dict[str, Row | None]:
        row = table.get(name)
        if row is None or row.commit != commit:
            raise SnapshotNotFoundError(
                f"{uri}: the snapshot {name!r} was deleted or replaced in the meantime"
            )
        return {name: None}

    return change


def checked_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a user's metadata, made of what every reader of the table understands.

    Raises:
        StateError: It holds what JSON cannot (but NaN and the infinities are let through), or more
            than 64 KiB.
    """
    if not isinstance(metadata, Mapping):
        raise StateError(f"metadata is a dict with keys of str; got {type(metadata).__qualname__}")
    plain = {
        _checked_key(k, "metadata"): _plain(v, f"metadata[{k!r}]") for k, v in metadata.items()
    }
    try:
        size = len(msgspec.json.encode(plain))
    except UnicodeEncodeError as e:
        raise StateError(f"metadata holds a string that is not Unicode: {e}") from e
    if size > MAX_METADATA_BYTES:
        raise StateError(
            f"metadata takes {size} bytes, more than {MAX_METADATA_BYTES}; put it into the app "
            "state, in a StateDict"
        )
    return plain


def _checked_key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise StateError(f"{where} has the key {key!r:.80}; JSON has keys of str alone")
    return str(key)


def _plain(value: Any, where: str, depth: int = 1) -> Any:
    if depth > _METADATA_DEPTH:
        raise StateError(f"metadata is nested deeper than {_METADATA_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return int(value)
    if isinstance(value, list | tuple):
        return [_plain(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            _checked_key(k, where): _plain(v, f"{where}[{k!r}]", depth + 1)
            for k, v in value.items()
        }
    raise StateError(
        f"{where} holds what JSON cannot: {value!r:.80} ({type(value).__qualname__}); convert it, "
        "or put it into the app state, in a StateDict"
    )
