"""What the table of a store with a mirror says: which snapshots the mirror lacks.

These notes are tags that no user can give. A take into a store with a mirror commits its row with
one, and the mirror removes it once it holds the snapshot. Until then no process prunes the
snapshot, whether it knows of the mirror or not, and whoever was killed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from casnap.errors import MirrorError
from casnap.format.records import INTERNAL, Root, Row, id_from_name
from casnap.storage.objects import Objects
from casnap.storage.settings import change_settings
from casnap.storage.table import Table, change_table

SETTING = "mirror"
_LACKS = f"{INTERNAL}unmirrored"
_REPLACES = f"{INTERNAL}replaces:"
# A snapshot that is taken anew again and again, while the mirror cannot be reached, remembers so
# many of those that it has replaced: the first, which the mirror may have, and the last ones.
_MOST_REPLACED = 16
# Nodes of tables.
_MOST_KNOWN = 1 << 16
_FROM = f"{INTERNAL}from:"


class MirrorPlace(NamedTuple):
    """Which store is the mirror, as the settings of the mirrored store say.

    Attributes:
        store: The id of that store.
        prefix: The folder there that all snapshots go into; empty for none.
        uri: Where it was.
    """

    store: str
    prefix: str
    uri: str


def is_unmirrored(row: Row) -> bool:
    """Whether the mirror still lacks a snapshot."""
    return _LACKS in row.tags


def taken_tags(old: Row | None) -> tuple[str, ...]:
    """Return the tags of a snapshot that was just taken, and is to be mirrored.

    Args:
        old: The snapshot of the same name that it replaces.
    """
    return _lacking_tags([] if old is None else [*_replaced_tags(old), _replaces(old.commit)])


def _lacking_tags(replaced: list[str]) -> tuple[str, ...]:
    return (*replaced[:1], *replaced[1:][1 - _MOST_REPLACED :], _LACKS)


def _replaces(commit: bytes) -> str:
    return f"{_REPLACES}{commit.hex()}"


def replaced_by(row: Row) -> frozenset[bytes]:
    """Return the commit ids of the snapshots that a snapshot has replaced since it was mirrored."""
    found = (id_from_name(tag.removeprefix(_REPLACES)) for tag in _replaced_tags(row))
    return frozenset(commit for commit in found if commit is not None)


def _replaced_tags(row: Row) -> list[str]:
    return [tag for tag in row.tags if tag.startswith(_REPLACES)]


def origin_tags(row: Row, store_id: str) -> tuple[str, ...]:
    """Return the tags of the copy of a snapshot at a mirror: the user's, and where it is from."""
    return (f"{_FROM}{store_id}:{row.seq}", *row.user_tags)


def origin_of(row: Row) -> str:
    """Return the id of the store that a snapshot at a mirror was copied from; empty if unknown."""
    return _origin(row)[0]


def _origin(row: Row) -> tuple[str, int]:
    """Return the id of that store, and the number of the root there; -1 if unknown."""
    said = next((tag.removeprefix(_FROM) for tag in row.tags if tag.startswith(_FROM)), "")
    store_id, _, seq = said.partition(":")
    return store_id, int(seq) if seq.isascii() and seq.isdecimal() and len(seq) < 20 else -1


def in_order(rows: Iterable[tuple[str, Row]]) -> list[tuple[str, Row]]:
    """Return snapshots in the order of their commits.

    A mirror may get an old snapshot late, such as one that was damaged, or whose name was taken. So
    those of one mirrored store take the places of one another, in the order of their commits there.
    """
    ordered = sorted(rows, key=lambda item: (item[1].seq, item[0]))
    places: dict[str, list[int]] = {}
    for at, (_, row) in enumerate(ordered):
        store_id, seq = _origin(row)
        if seq >= 0:
            places.setdefault(store_id, []).append(at)
    for at_places in places.values():
        of_one = sorted((ordered[at] for at in at_places), key=lambda item: _origin(item[1])[1])
        for at, item in zip(at_places, of_one, strict=True):
            ordered[at] = item
    return ordered


def _settled(row: Row) -> Row:
    return msgspec.structs.replace(row, tags=row.user_tags)


def settle(objects: Objects, mirrored: Mapping[str, bytes]) -> None:
    """Note that the mirror holds some snapshots, in one commit.

    Args:
        objects: The mirrored store.
        mirrored: Full name and commit id of each.
    """

    def change(table: Table, _seq: int) -> dict[str, Row | None]:
        changed: dict[str, Row | None] = {}
        for name, commit in mirrored.items():
            row = table.get(name)
            if row is None or not is_unmirrored(row):
                continue
            replaced = _replaced_tags(row)
            if row.commit == commit:
                changed[name] = _settled(row)
            elif (held := _replaces(commit)) in replaced[1:] or len(replaced) == _MOST_REPLACED:
                # It was taken anew meanwhile, maybe so often that this commit was forgotten. The
                # first one of the list never is.
                tags = _lacking_tags(list(dict.fromkeys([held, *replaced])))
                changed[name] = msgspec.structs.replace(row, tags=(*tags, *row.user_tags))
        return changed

    change_table(objects, change)


class Lacking:
    """Looks for what the mirror lacks, in one table after the other.

    What stays the same from one table to the next is read once.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[tuple[str, Row], ...]] = {}

    def look(self, table: Table) -> dict[str, Row]:
        """Return the snapshots that the mirror lacks, by full name, in the order of commits."""
        if len(self._known) > _MOST_KNOWN:
            self._known = {}
        found = table.chosen(lambda _, row: is_unmirrored(row), self._known)
        return dict(sorted(found, key=lambda item: item[1].seq))


def place_of(root: Root, uri: str) -> MirrorPlace | None:
    """Return which store is the mirror; None if there is none yet.

    Raises:
        MirrorError: The setting cannot be understood.
    """
    said = root.settings.get(SETTING)
    if said is None:
        return None
    fields = [said.get(field) for field in MirrorPlace._fields] if isinstance(said, dict) else []
    texts = [field for field in fields if isinstance(field, str)]
    if len(texts) != len(MirrorPlace._fields):
        raise MirrorError(
            f"{uri} has a setting for its mirror that this casnap does not understand; update "
            f"casnap, or forget that mirror: `casnap config {uri} mirror=none`"
        )
    return MirrorPlace(*texts)


def attach(objects: Objects, place: MirrorPlace) -> None:
    """Note which store is the mirror; the first time, note that it lacks all snapshots.

    Raises:
        MirrorError: Another store is the mirror.
        StoreError: The store is of format 1, which has no settings.
    """
    uri = objects.backend.uri
    known = place_of(objects.newest(), uri)
    if known is None:
        change_settings(objects, lambda s: {SETTING: place._asdict(), **s}, _tag_all)
        known = place_of(objects.newest(), uri)
    if known is not None and (known.store, known.prefix) != (place.store, place.prefix):
        found = f"at {place.uri} there is the store {place.store}{_below(place)}"
        raise not_that_mirror(objects, known, found)


def not_that_mirror(objects: Objects, known: MirrorPlace, found: str) -> MirrorError:
    """Return the error for another store, or none, in place of the mirror."""
    uri = objects.backend.uri
    return MirrorError(
        f"the mirror of {uri} is the store {known.store}{_below(known)}, which was at {known.uri}; "
        f"{found}. Name that one; or if it is gone for good, or you want another one, forget it "
        f"first: `casnap config {uri} mirror=none`"
    )


def _below(place: MirrorPlace) -> str:
    return f" (below {place.prefix})" if place.prefix else ""


def _tag_all(rows: Iterable[tuple[str, Row]]) -> dict[str, Row | None]:
    return {
        name: msgspec.structs.replace(row, tags=(*row.user_tags, *taken_tags(None)))
        for name, row in rows
    }


def _tag_none(rows: Iterable[tuple[str, Row]]) -> dict[str, Row | None]:
    return {name: _settled(row) for name, row in rows if row.tags != row.user_tags}


def detach(objects: Objects) -> bool:
    """Forget the mirror, and which snapshots it lacks; return whether there was any of that."""

    def without(settings: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in settings.items() if key != SETTING}

    return change_settings(objects, without, _tag_none)
