"""Notes in the table of a store with a mirror: which snapshots the mirror lacks.

A take into a store with a mirror commits its row with the note that the mirror lacks the snapshot.
The mirror removes the note once it holds the snapshot. Until then no process prunes the snapshot,
even one that does not know of the mirror, and even after a crash. A mirror that follows a tag needs
no such notes. To publish a tag is to move it to a snapshot, in a commit with a number. A setting of
the store has the number of the last publish that the mirror has followed
(``docs/decisions/0093-mirrors-of-a-tag.md``). Other notes say which life of its run a snapshot
belongs to (``docs/decisions/0058-lives-of-a-run.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from casnap.errors import MirrorError, StoreError, shell_word
from casnap.format.names import folder_of
from casnap.format.records import ORIGIN, Root, Row
from casnap.storage import Changes, Repository, Table, TagMove, Tags

SETTING = "mirror"
UNMIRRORED = "unmirrored"
"""The note of a snapshot that the mirror is still to get. It keeps the snapshot in the store."""
_SUCCEEDED = "succeeded"
"""The note of a snapshot that the mirror never gets: another store continues its run there."""
_FOLLOWS, _LIFE = "follows", "life"


# By the id of a mirror and the folder of a run there: the mirror's newest root at the time when
# this process restored a copy of that run.
_restored: dict[tuple[str, str], int] = {}


class MirrorPlace(NamedTuple):
    """The place of a mirror: its store, as the settings of the mirrored store name it.

    Attributes:
        store: The id of the mirror.
        prefix: The folder at the mirror that all snapshots go into; empty for none.
        uri: The last known URI of the mirror.
        tag: The published tag that it follows; empty if it gets all snapshots.
        moved: The number of the last publish of that tag that the mirror has followed.
    """

    store: str
    prefix: str
    uri: str
    tag: str = ""
    moved: int = 0

    @property
    def setting(self) -> dict[str, Any]:
        """The value of the mirrored store's setting that says which store is its mirror."""
        fields = self._asdict()
        return fields if self.tag else {key: fields[key] for key in ("store", "prefix", "uri")}


class Lag(NamedTuple):
    """The snapshots that a mirror lacks.

    Attributes:
        rows: The snapshots, by full name, in the order in which the mirror is to get them.
        published: The name of the snapshot with the followed tag, if the mirror has not followed
            the last publish of the tag; else empty.
        number: The number of that publish; 0 if ``published`` is empty.
        moved: The number of the last publish that the mirror has followed.
    """

    rows: dict[str, Row]
    published: str = ""
    number: int = 0
    moved: int = 0


class Life(NamedTuple):
    """A life of a run at a mirror: the part that one store writes before another one goes on.

    Attributes:
        began: The number of the mirror's root that has the first copy of this life.
        follows: The number of the mirror's root that this life continues; 0 for none.
    """

    began: int
    follows: int


def is_unmirrored(row: Row) -> bool:
    """Whether the mirror lacks a snapshot so far, and is to get it."""
    return row.has_note(UNMIRRORED)


def is_succeeded(row: Row) -> bool:
    """Whether the mirror never gets a snapshot: another store has taken over its run there."""
    return row.has_note(_SUCCEEDED)


def taken_notes(mirror_id: str, follows: int, tag: str) -> dict[str, Any]:
    """Return the notes of a snapshot that is taken into a store with a mirror.

    Args:
        mirror_id: The id of the mirror.
        follows: The number of the mirror's root that the snapshot's run continues; 0 for none.
        tag: The tag that the mirror follows; empty if it gets all snapshots.
    """
    followed = {_FOLLOWS: [mirror_id, follows]} if follows else {}
    return followed if tag else {**followed, UNMIRRORED: True}


def follows_of(row: Row, mirror_id: str) -> int:
    """Return the number of the mirror's root that a snapshot's run continues; 0 for none."""
    store_id, number = row.noted_root(_FOLLOWS)
    return max(0, number) if store_id == mirror_id else 0


def copy_notes(row: Row, store_id: str, life: Life) -> dict[str, Any]:
    """Return the notes for a snapshot's copy at a mirror: where it is from, and its life.

    The notes of the snapshot itself that each copy keeps (``Row.copied_notes``) are included.

    Args:
        row: The row of the snapshot.
        store_id: The id of the mirrored store.
        life: The life of the run at the mirror.
    """
    return {ORIGIN: [store_id, row.seq], _LIFE: list(life), **row.copied_notes}


def life_of(row: Row) -> Life | None:
    """Return the life that a copy at a mirror belongs to; None if no mirror put it there."""
    match row.notes.get(_LIFE):
        case [int(began), int(follows)] if began >= 0 and follows >= 0:
            return Life(began, follows)
    return None


def note_restored(store: Repository, name: str, row: Row) -> None:
    """Note that this process restored a snapshot, if the snapshot is a copy at a mirror.

    Args:
        store: The store that holds the snapshot.
        name: Its full name.
        row: Its row.
    """
    if life_of(row) is not None:
        run, seq = (store.config.store_id, folder_of(name)), row.seq
        with suppress(StoreError):
            seq = max(store.recent().seq, seq)
        _restored[run] = max(seq, _restored.get(run, 0))


def restored_from(place: MirrorPlace, run: str) -> int:
    """Return the number of the mirror's root from which this process restored a run; 0 for none.

    Args:
        place: The mirror.
        run: The folder of the run in the mirrored store.
    """
    return _restored.get((place.store, "/".join(p for p in (place.prefix, run) if p)), 0)


def copies_in(table: Table, folder: str) -> dict[str, Row]:
    """Return the copies that mirrors have put into the run of a folder, by full name."""
    rows = table.rows_of_run(folder).items()
    return {name: row for name, row in rows if life_of(row) is not None}


def is_newer_here(
    store: Repository, mirror_id: str, newest: tuple[str, Row], newest_there: tuple[str, Row]
) -> bool:
    """Whether the newest snapshot of a store is newer than that of its mirror.

    The mirror lacks the store's newest snapshot, so their order has to be found out.

    Args:
        store: The store.
        mirror_id: The id of the mirror.
        newest: The newest snapshot of the store: its name, and its row.
        newest_there: The newest snapshot of the mirror.
    """
    (name, row), (other_name, row_there) = newest, newest_there
    same_run = folder_of(name) == folder_of(other_name)
    if store.has_taken_origin_of(row_there):
        return row.seq > row_there.origin[1]
    life = life_of(row_there)
    if life is not None and same_run:
        return follows_of(row, mirror_id) >= life.began
    return row.time >= row_there.time


def _noted(row: Row, note: str | None) -> Row:
    """Return a row with the given note about the mirror: unmirrored, succeeded, or none."""
    return row.with_notes(_changes(note))


def _changes(note: str | None) -> dict[str, Any]:
    return {n: True if n == note else None for n in (UNMIRRORED, _SUCCEEDED)}


def notes_of_renamed(root: Root, uri: str) -> dict[str, Any]:
    """Return the changes to the notes of a snapshot that gets another name.

    If the store has a mirror, the mirror has the snapshot only under its old name, and lacks the
    new one.

    Args:
        root: The newest root.
        uri: The store, for an error.

    Raises:
        MirrorError: The setting for the mirror cannot be understood.
    """
    return {} if mirror_place(root, uri) is None else _changes(UNMIRRORED)


def mark_mirrored(
    store: Repository,
    mirrored: Mapping[str, bytes],
    succeeded: Mapping[str, bytes],
    moved: int,
    check: Callable[[Root], None],
) -> None:
    """Note in one commit which snapshots the mirror holds, and which it never gets.

    Args:
        store: The mirrored store.
        mirrored: The full name of each snapshot that the mirror holds → its commit id. Other
            snapshots of these runs are no longer noted as succeeded.
        succeeded: The full name of each snapshot that the mirror never gets, since another store
            has taken over its run → its commit id.
        moved: The number of the last publish that the mirror has followed, or never will; 0: none.
        check: Raises if the root that the commit follows has another mirror.
    """
    runs = {folder_of(name) for name in mirrored}

    def change(table: Table, _seq: int) -> dict[str, Row | None]:
        changed: dict[str, Row | None] = {
            name: _noted(row, None)
            for name, row in table.items_in()
            if is_succeeded(row) and folder_of(name) in runs
        }
        for name, commit in {**mirrored, **succeeded}.items():
            row = table.get(name)
            # The snapshot may have been deleted or replaced meanwhile.
            if row is None or row.commit != commit:
                continue
            # A snapshot that a followed tag is published on has no note of its own.
            if is_unmirrored(row) or (moved and name in succeeded):
                changed[name] = _noted(row, _SUCCEEDED if name in succeeded else None)
        return changed

    def update_root(root: Root) -> Root:
        check(root)
        place = mirror_place(root, store.backend.uri) if moved else None
        # A user may have forgotten the mirror meanwhile, or another process was faster.
        if place is None or not place.tag or place.moved >= moved:
            return root
        settings = {**root.settings, SETTING: {**root.settings[SETTING], "moved": moved}}
        return msgspec.structs.replace(root, settings=settings)

    Changes(store).commit(change, update_root)


def lacking_again(root: Root, move: TagMove, tag: str) -> Root:
    """Return a root whose setting says that the mirror has not followed a publish of its tag.

    The mirror then repeats the publish. That is needed if the tag was moved at the mirror itself.

    Args:
        root: A root of the mirrored store.
        move: The last publish.
        tag: The tag.
    """
    match root.settings.get(SETTING):
        case {"tag": known, "moved": int(moved)} if known == tag and moved >= move.root:
            settings = {**root.settings, SETTING: {**root.settings[SETTING], "moved": 0}}
            return msgspec.structs.replace(root, settings=settings)
    return root


def succeeded_in(table: Table) -> dict[str, Row]:
    """Return the snapshots that the mirror never gets, by full name."""
    return {name: row for name, row in table.items_in() if is_succeeded(row)}


def lag_in(root: Root, table: Table, tag: str, uri: str) -> Lag:
    """Return which snapshots the mirror lacks.

    Args:
        root: The root of the mirrored store.
        table: Its table.
        tag: The tag that the mirror follows; empty if it gets all snapshots.
        uri: The mirrored store, for an error.

    Raises:
        MirrorError: The setting for the mirror cannot be understood.
    """
    noted = [(name, row) for name, row in table.with_witnesses() if is_unmirrored(row)]
    rows = dict(sorted(noted, key=lambda item: item[1].seq))
    if not tag:
        return Lag(rows)
    place = mirror_place(root, uri)
    # The number of another tag's publish says nothing about this tag.
    moved = 0 if place is None or place.tag != tag else place.moved
    move, published = Tags.move_in(root, tag), Tags.row_in(root, table, tag)
    if move is None or published is None or move.root <= moved:
        return Lag(rows, moved=moved)
    name, row = published
    return Lag({**rows, name: row}, name, move.root, moved)


def mirror_place(root: Root, uri: str) -> MirrorPlace | None:
    """Return which store is the mirror of a store; None if it has no mirror.

    Args:
        root: A root of the mirrored store.
        uri: The mirrored store, for an error.

    Raises:
        MirrorError: The setting for the mirror cannot be understood.
    """
    setting = root.settings.get(SETTING)
    if setting is None:
        return None
    match setting:
        case {"store": str(store), "prefix": str(prefix), "uri": str(place_uri)}:
            tag, moved = setting.get("tag", ""), setting.get("moved", 0)
            if isinstance(tag, str) and isinstance(moved, int):
                return MirrorPlace(store, prefix, place_uri, tag, moved)
    raise MirrorError(
        f"{uri} has a setting for its mirror that this casnap does not understand; update "
        f"casnap, or forget that mirror: `casnap config {shell_word(uri)} mirror=none`"
    )


def attach_mirror(store: Repository, place: MirrorPlace) -> None:
    """Note which store is the mirror; the first time, note that it lacks all snapshots.

    A mirror that follows a tag lacks only the snapshot that the tag is published on.

    Args:
        store: The mirrored store.
        place: The mirror.

    Raises:
        MirrorError: Another store is the mirror, or the mirror follows another tag or none.
    """
    uri = store.backend.uri
    attached = mirror_place(store.newest(), uri)
    if attached is None:
        note = _note_none if place.tag else _note_all
        Changes(store).edit_settings(lambda s: {SETTING: place.setting, **s}, note)
        attached = mirror_place(store.newest(), uri)
    check_same_mirror(store, attached, place)


def check_same_mirror(store: Repository, attached: MirrorPlace | None, place: MirrorPlace) -> None:
    """Check that the mirror of a store is the one that this process copies to, with the same tag.

    Args:
        store: The mirrored store.
        attached: Its mirror, as the newest root has it.
        place: The mirror that this process copies to.

    Raises:
        MirrorError: Another store is the mirror, or the mirror follows another tag or none.
    """
    if attached is not None and (attached.store, attached.prefix) != (place.store, place.prefix):
        reality = f"at {place.uri} there is the store {place.store}{_folder_text(place)}"
        raise wrong_mirror_error(store, attached, reality)
    check_same_tag(attached, place.tag, store.backend.uri)


def check_same_tag(
    attached: MirrorPlace | None, tag: str, uri: str, *, attaches: bool = False
) -> None:
    """Check that the mirror of a store follows the given tag.

    Args:
        attached: The mirror, as the newest root has it.
        tag: The tag; empty if the mirror is to get all snapshots.
        uri: The mirrored store.
        attaches: Whether the store may have no mirror yet.

    Raises:
        MirrorError: The mirror follows another tag, or no tag; or the store has no mirror any more.
    """
    if attached is None and tag and not attaches:
        raise MirrorError(
            f"{uri} has forgotten its mirror, as a user has asked; a new Store with mirror= and "
            "MirrorOptions(tag=) has one again"
        )
    if attached is not None and attached.tag != tag:
        raise MirrorError(
            f"the mirror of {uri} gets {_what_it_gets(attached.tag)}, and this Store asks for one "
            f"that gets {_what_it_gets(tag)}. Give MirrorOptions(tag=) as before; or to have it "
            "get other snapshots from now on, forget it first: "
            f"`casnap config {shell_word(uri)} mirror=none`"
        )


def _what_it_gets(tag: str) -> str:
    return f"what the tag {tag!r} is published on" if tag else "all snapshots"


def wrong_mirror_error(store: Repository, attached: MirrorPlace, reason: str) -> MirrorError:
    """Return the error for a mirror's URI at which there is another store, or none.

    Args:
        store: The mirrored store.
        attached: Its mirror.
        reason: What is at the URI, for the message.
    """
    uri = store.backend.uri
    return MirrorError(
        f"the mirror of {uri} is the store {attached.store}{_folder_text(attached)}, which was at "
        f"{attached.uri}; {reason}. Name that one; or if it is gone for good, or you want another "
        f"one, forget it first: `casnap config {shell_word(uri)} mirror=none`"
    )


def _folder_text(place: MirrorPlace) -> str:
    return f" (below {place.prefix})" if place.prefix else ""


def _note_all(rows: Iterable[tuple[str, Row]]) -> dict[str, Row | None]:
    return {name: _noted(row, UNMIRRORED) for name, row in rows if not is_unmirrored(row)}


def _note_none(rows: Iterable[tuple[str, Row]]) -> dict[str, Row | None]:
    noted_rows = ((name, row) for name, row in rows if is_unmirrored(row) or is_succeeded(row))
    return {name: _noted(row, None) for name, row in noted_rows}


def detach_mirror(store: Repository) -> bool:
    """Forget the mirror, and which snapshots it lacks; return whether the store had a mirror."""

    def without(settings: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in settings.items() if key != SETTING}

    return Changes(store).edit_settings(without, _note_none)
