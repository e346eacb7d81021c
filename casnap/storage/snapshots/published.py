"""Published tags: such a tag is on only one snapshot of a store, and a commit moves it to another.

A setting of the store says, for each published tag, which snapshot has it, since when, and who
moved it. Roots are never removed, so all moves of a tag can be read: the root before a move still
names the previous move (``docs/decisions/0066-publish-and-thin.md``).
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
from msgspec import Struct

from casnap.errors import (
    DamagedError,
    InvalidNameError,
    SnapshotError,
    SnapshotNotFoundError,
    nearest,
    shell_word,
)
from casnap.format.records import Root, Row, decode, encode, root_key
from casnap.storage.commit_log.roots import read_root
from casnap.storage.opening.location import Location
from casnap.storage.reading.repository import Repository
from casnap.storage.reading.table import Table
from casnap.storage.snapshots.changes import Changes

_MOST, _MOST_CHARS = 100, 200
_MOST_TAGS = 100
_TAG_CHARS = 100


class TagMove(Struct, frozen=True, kw_only=True):
    """A move of a published tag to a snapshot.

    Attributes:
        name: The full name of the snapshot.
        commit: The commit id of the snapshot, in hex.
        root: The number of the root that moved the tag. It grows with each move, so it also numbers
            the published versions.
        time: When the tag was moved, in seconds since the epoch, by the clock of the process that
            moved it.
        by: The user and the host that moved the tag, as they call themselves.
        previous: The full name of the snapshot that had the tag before; "" if none had.
    """

    name: str
    commit: str
    root: int
    time: float
    by: str = ""
    previous: str = ""


class Tags:
    """The tags of a store's snapshots. A published tag is on only one snapshot; a commit moves it.

    Args:
        store: The store.
    """

    SETTING = "published"
    """The setting of a store that says where its published tags are."""

    def __init__(self, store: Repository) -> None:
        self._store = store

    @staticmethod
    def move_in(root: Root, tag: str) -> TagMove | None:
        """Return the last move of a tag, according to a root.

        Returns:
            The move; None if the tag was never published, or the setting is malformed.

        Raises:
            InvalidNameError: The tag is not a str.
        """
        tag = tag_text(tag)
        setting = root.settings.get(Tags.SETTING)
        if not isinstance(setting, dict) or tag not in setting:
            return None
        try:
            move = decode(encode(setting[tag]), TagMove, Tags.SETTING)
        except DamagedError:
            return None
        return move if 0 < move.root <= root.seq else None

    @staticmethod
    def row_in(root: Root, table: Table, tag: str) -> tuple[str, Row] | None:
        """Return the name and row of the snapshot that has a published tag; None if none has.

        Args:
            root: The root that says where the tag is.
            table: The table of this root.
            tag: The tag.
        """
        move = Tags.move_in(root, tag)
        if move is None:
            return None
        row = table.get(move.name)
        if row is not None and row.commit.hex() == move.commit and tag in row.tags:
            return move.name, row
        # A rewind may have renamed the snapshot. Or it was deleted or untagged, perhaps by a
        # version that does not know published tags.
        others = ((n, r) for n, r in table.items_in() if r.commit.hex() == move.commit)
        return next(((n, r) for n, r in others if tag in r.tags), None)

    @staticmethod
    def checked(tag: object) -> str:
        """Check a tag that a snapshot is to get, and return it.

        Raises:
            InvalidNameError: The text cannot be a tag.
        """
        tag = tag_text(tag)
        if not 1 <= len(tag) <= _TAG_CHARS:
            problem = f"has {len(tag)} characters, not 1 to {_TAG_CHARS}"
        elif not tag.isprintable() or " " in tag or any(map(str.isspace, tag)):
            problem = "holds white space or unprintable characters"
        elif tag[0] in "-#":
            problem = f"begins with {tag[0]!r}"
        else:
            return tag
        raise InvalidNameError(f"the tag {tag!r:.80} {problem}; choose another, like 'best'")

    def find_in(self, root: Root, table: Table, tag: str, folder: str) -> tuple[str, Row]:
        """Return the name and row of the one snapshot that has a tag, according to a root.

        Args:
            root: The root.
            table: The table of this root.
            tag: The tag. If it is not published, all snapshots are searched for it.
            folder: The folder that the snapshot must lie in; "" for the whole store.

        Raises:
            InvalidNameError: The tag is not a str.
            SnapshotNotFoundError: No snapshot in the folder has the tag.
            SnapshotError: Several snapshots have the tag, and it is not published.
        """
        uri = self._store.backend.uri
        published = Tags.row_in(root, table, tag)
        if published is not None:
            if folder and not published[0].startswith(f"{folder}/"):
                raise SnapshotNotFoundError(
                    f"{uri}: the tag {tag!r} is on {published[0]!r}, which is not below {folder!r}"
                )
            return published
        rows = list(table.items_in(folder))
        having = [(name, row) for name, row in rows if tag in row.tags]
        if len(having) > 1:
            names = ", ".join(repr(name) for name, _ in having[:4])
            more = f" and {len(having) - 4} more" if len(having) > 4 else ""
            raise SnapshotError(
                f"{uri}: {len(having)} snapshots have the tag {tag!r}: {names}{more}. Say which "
                f"one is meant: `casnap tag {shell_word(f'{uri}/NAME')} {shell_word(tag)} --move`, "
                "which removes it from all others"
            )
        if not having:
            move = Tags.move_in(root, tag)
            advice = nearest(tag, (t for _, row in rows for t in row.tags))
            # It was deleted or untagged, or its newer commits were lost with a damaged root.
            was = "" if move is None else f"; it was on {move.name!r}, which does not have it now"
            raise SnapshotNotFoundError(f"{uri}: no snapshot has the tag {tag!r}{was or advice}")
        return having[0]

    def add(self, name: str, commit_id: str, tags: tuple[str, ...]) -> None:
        """Give tags to a snapshot.

        Args:
            name: The full name of the snapshot.
            commit_id: The commit id that the snapshot must have.
            tags: The tags.

        Raises:
            SnapshotNotFoundError: There is no such snapshot any more.
            InvalidNameError: A text cannot be a tag.
            SnapshotError: There are too many tags, or one is published on another snapshot.
        """

        def check(root: Root) -> None:
            _check_movable(root, self._store.table(root), name, tags, self._store.backend.uri)

        self._store.read_at_newest(check)
        Changes(self._store).edit_row(name, commit_id, lambda row: with_tags(row, tags))

    def remove(self, name: str, commit_id: str, tags: tuple[str, ...]) -> None:
        """Remove tags from a snapshot. Tags that the snapshot does not have are ignored.

        Args:
            name: The full name of the snapshot.
            commit_id: The commit id that the snapshot must have.
            tags: The tags.

        Raises:
            SnapshotNotFoundError: There is no such snapshot any more.
            InvalidNameError: A tag is not a str.
        """
        Changes(self._store).edit_row(name, commit_id, lambda row: without_tags(row, tags))

    def publish(
        self,
        tag: str,
        name: str,
        commit_id: str,
        check: Callable[[Table, int], None] = lambda *_: None,
        again: Callable[[Root, TagMove], Root] = lambda root, _: root,
    ) -> TagMove:
        """Move a tag to a snapshot, in one commit. All other snapshots lose the tag.

        Args:
            tag: The tag.
            name: The full name of the snapshot.
            commit_id: The commit id that the snapshot must have.
            check: Called in each try to commit, with the table and the number of the next root. It
                raises an error if the tag must not be moved.
            again: Called if there is nothing to move, since this snapshot has the tag already, and
                no other has it. It gets the newest root and the last move of the tag, and returns
                the root to commit.

        Returns:
            The move.

        Raises:
            SnapshotNotFoundError: There is no such snapshot any more.
            SnapshotError: The store has 100 published tags already.
        """
        changes: dict[str, Row | None] = {}
        previous = ""
        move: TagMove | None = None

        def change(table: Table, seq: int) -> dict[str, Row | None]:
            nonlocal changes, previous
            check(table, seq)
            row = Location(self._store.backend, name).row_in(table)
            if row.commit.hex() != commit_id:
                raise SnapshotNotFoundError(
                    f"{self._store.backend.uri}: the snapshot {name!r} was replaced in the meantime"
                )
            others = {n: r for n, r in table.items_in() if n != name and tag in r.tags}
            previous = max(others, key=lambda name: others[name].seq, default="")
            changes = {name: without_tags(its_row, [tag]) for name, its_row in others.items()}
            if tag not in row.tags:
                changes[name] = with_tags(row, [tag])
            return changes

        def update_root(root: Root) -> Root:
            nonlocal move
            move = Tags.move_in(root, tag)
            if not changes and move and (move.name, move.commit) == (name, commit_id):
                return again(root, move)
            setting = root.settings.get(Tags.SETTING)
            moves = dict(setting) if isinstance(setting, dict) else {}
            if tag not in moves and len(moves) >= _MOST:
                raise SnapshotError(
                    f"{self._store.backend.uri} has {len(moves)} published tags, and takes no "
                    "more; move one of these, or give a tag that is not published"
                )
            move = TagMove(
                name=name,
                commit=commit_id,
                root=root.seq + 1,
                time=time.time(),
                by=_user_and_host(),
                previous=previous,
            )
            moves[tag] = msgspec.structs.asdict(move)
            return msgspec.structs.replace(root, settings={**root.settings, Tags.SETTING: moves})

        Changes(self._store).commit(change, update_root)
        assert move is not None
        return move

    def moves(self, tag: str) -> Iterator[TagMove]:
        """Yield the moves of a published tag, the newest first. One root is read for each move.

        Raises:
            InvalidNameError: The tag is not a str.
            DamagedError: A root is damaged or missing.
        """
        move = Tags.move_in(self._store.newest(), tag)
        while move is not None:
            yield move
            try:
                root = read_root(self._store.backend, move.root - 1)
            except FileNotFoundError as e:
                raise DamagedError(
                    f"{self._store.backend.where(root_key(move.root - 1))} is missing"
                ) from e
            move = Tags.move_in(root, tag)


def _check_movable(root: Root, table: Table, name: str, tags: tuple[str, ...], uri: str) -> None:
    """Check that a snapshot may get tags: none of them is published on another snapshot.

    Raises:
        SnapshotError: A tag is published on another snapshot.
    """
    for tag in tags:
        published = Tags.row_in(root, table, tag)
        if published is not None and published[0] != name:
            raise SnapshotError(
                f"{uri}: {tag!r} is published on {published[0]!r}, so no other snapshot can "
                f"have it; move it: `casnap tag {shell_word(f'{uri}/{name}')} {shell_word(tag)} "
                "--move`, or Store.publish"
            )


def _user_and_host() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # The user has no entry in the system's list.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:_MOST_CHARS]


# --- tags of a row ------------------------------------------------------------------------------


def with_tags(row: Row, tags: Iterable[str]) -> Row:
    """Return a row with some tags added.

    Raises:
        InvalidNameError: A text cannot be a tag.
        SnapshotError: The row would have too many tags.
    """
    every = {*row.tags, *map(Tags.checked, tags)}
    if len(every) > _MOST_TAGS:
        raise SnapshotError(
            f"a snapshot has at most {_MOST_TAGS} tags; with these it would have {len(every)}"
        )
    return msgspec.structs.replace(row, tags=tuple(sorted(every)))


def without_tags(row: Row, tags: Iterable[str]) -> Row:
    """Return a row without some tags.

    Raises:
        InvalidNameError: A tag is not a str.
    """
    kept_tags = {*row.tags}.difference(map(tag_text, tags))
    return msgspec.structs.replace(row, tags=tuple(sorted(kept_tags)))


def tag_text(tag: object) -> str:
    """Check that a tag to look for is a str, and return it.

    Any str is allowed: a store is untrusted, and may have any tag.

    Raises:
        InvalidNameError: The tag is not a str.
    """
    if not isinstance(tag, str):
        raise InvalidNameError(
            f"the tag {tag!r:.80} is of type {type(tag).__qualname__}; choose another, like 'best'"
        )
    return str(tag)
