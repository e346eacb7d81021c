"""The snapshot table of a root: the rules for names and rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from casnap.backends import Backend
from casnap.backends.places import exists, is_folder, is_link, is_taken
from casnap.errors import (
    InvalidNameError,
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StateError,
    nearest,
)
from casnap.format.names import STORE_FOLDER
from casnap.format.records import MAX_METADATA_BYTES, Row
from casnap.format.tree import Tree
from casnap.runtime.units import whole_number

_METADATA_DEPTH = 64
_MOST_TAGS = 100
_TAG_CHARS = 100

Table = Tree[Row]


def row_of(table: Table, name: str, backend: Backend) -> Row:
    """Return the row of a snapshot.

    Raises:
        SnapshotNotFoundError: There is none. The error says what may be meant.
    """
    row = table.get(name)
    if row is None:
        from casnap.storage.places.other_formats import hint_at

        hint = "" if backend.folder is None else hint_at(backend.folder / name)
        hint = hint or nearest(name, (full_name for full_name, _ in table.items_in()))
        raise SnapshotNotFoundError(f"{backend.uri} holds no snapshot {name!r}{hint}")
    return row


def check_free(table: Table, name: str, *, overwrite: bool, uri: str) -> None:
    """Check that a snapshot may be made under this name.

    Raises:
        SnapshotExistsError: The name is taken (and tagged, or not to be overwritten), or it is a
            folder of another name, or lies below one.
    """
    row = table.get(name)
    if row is not None and not overwrite:
        raise SnapshotExistsError(
            f"{uri} holds a snapshot {name!r} already; choose another name, or delete it; a "
            "take may also pass overwrite=True"
        )
    if row is not None and row.tags:
        raise SnapshotExistsError(
            f"{uri}: the snapshot {name!r} is tagged ({', '.join(row.tags):.200}), so it is "
            "not overwritten; choose another name, or untag it first (`casnap tag --remove`)"
        )
    parts = name.split("/")
    for n in range(1, len(parts)):
        outer = "/".join(parts[:n])
        if table.get(outer) is not None:
            raise SnapshotExistsError(
                f"{uri}: {outer!r} is a snapshot, so nothing can be taken below it as {name!r}"
            )
    inner = next(table.items_below(f"{name}/"), None)
    if inner is not None:
        raise SnapshotExistsError(
            f"{uri}: {name!r} is the folder of the snapshot {inner[0]!r}; choose another name"
        )


def check_path_is_free(backend: Backend, name: str) -> None:
    """Check that a snapshot can have its folder: no file and no other store is there, or above it.

    Raises:
        SnapshotExistsError: There is one, to which the path of the snapshot leads.
    """
    place = backend.folder
    for part in name.split("/") if place is not None else ():
        assert place is not None
        place /= part
        if exists(place) and not is_folder(place):
            raise SnapshotExistsError(
                f"{place} is a file, which casnap leaves alone, so {name!r} cannot be a snapshot "
                f"of {backend.uri}; choose another name, or move the file away"
            )
        if is_link(place):
            # What it leads to is not in this store.
            return
        if is_taken(place / STORE_FOLDER):
            raise SnapshotExistsError(
                f"{place} is a store itself, so {name!r} cannot be a snapshot of {backend.uri}; "
                "take it into that store, or choose another name"
            )


def with_tags(row: Row, tags: Iterable[str]) -> Row:
    """Return a row with some more tags.

    Raises:
        InvalidNameError: One of them cannot be a tag.
        SnapshotError: There are too many.
    """
    every = {*row.tags, *map(_checked_tag, tags)}
    if len(every) > _MOST_TAGS:
        raise SnapshotError(
            f"a snapshot has at most {_MOST_TAGS} tags; with these it would have {len(every)}"
        )
    return msgspec.structs.replace(row, tags=tuple(sorted(every)))


def without_tags(row: Row, tags: Iterable[str]) -> Row:
    """Return a row without some tags.

    Raises:
        InvalidNameError: One of them is no str.
    """
    kept_tags = {*row.tags}.difference(map(tag_text, tags))
    return msgspec.structs.replace(row, tags=tuple(sorted(kept_tags)))


def tag_text(tag: object) -> str:
    """Return a tag to look for. A store that somebody else wrote may have any.

    Raises:
        InvalidNameError: It is no str.
    """
    if not isinstance(tag, str):
        raise InvalidNameError(
            f"the tag {tag!r:.80} is of type {type(tag).__qualname__}; choose another, like 'best'"
        )
    return str(tag)


def _checked_tag(tag: object) -> str:
    """Return a tag for a snapshot.

    Raises:
        InvalidNameError: It cannot be one.
    """
    tag = tag_text(tag)
    if not 1 <= len(tag) <= _TAG_CHARS:
        problem = f"has {len(tag)} characters, not 1 to {_TAG_CHARS}"
    elif not tag.isprintable() or " " in tag or any(map(str.isspace, tag)):
        problem = "holds white space, or what does not print"
    elif tag[0] in "-#":
        problem = f"begins with {tag[0]!r}"
    else:
        return tag
    raise InvalidNameError(f"the tag {tag!r:.80} {problem}; choose another, like 'best'")


def checked_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a user's metadata, made of plain JSON types.

    Raises:
        StateError: It holds something that JSON cannot (NaN and the infinities are allowed), or
            takes more than 64 KiB.
    """
    if not isinstance(metadata, Mapping):
        raise StateError(f"metadata is a dict with keys of str; got {type(metadata).__qualname__}")
    content = {
        _checked_key(k, "metadata"): _plain_json(v, f"metadata[{k!r}]") for k, v in metadata.items()
    }
    try:
        size = len(msgspec.json.encode(content))
    except UnicodeEncodeError as e:
        raise StateError(f"metadata holds a string that is not Unicode: {e}") from e
    if size > MAX_METADATA_BYTES:
        raise StateError(
            f"metadata takes {size} bytes, more than {MAX_METADATA_BYTES}; put it into the app "
            "state, in a StateDict"
        )
    return content


def _checked_key(key: object, position: str) -> str:
    if not isinstance(key, str):
        raise StateError(f"{position} has the key {key!r:.80}; JSON has keys of str alone")
    return str(key)


def _plain_json(value: Any, position: str, depth: int = 1) -> Any:
    if depth > _METADATA_DEPTH:
        raise StateError(f"metadata is nested deeper than {_METADATA_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value)
    if (number := whole_number(value)) is not None and -(1 << 63) <= number < 1 << 64:
        return number
    if isinstance(value, list | tuple):
        return [_plain_json(v, f"{position}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            _checked_key(k, position): _plain_json(v, f"{position}[{k!r}]", depth + 1)
            for k, v in value.items()
        }
    raise StateError(
        f"{position} holds what JSON cannot: {value!r:.80} ({type(value).__qualname__}); convert "
        "it, or put it into the app state, in a StateDict"
    )
