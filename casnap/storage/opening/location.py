"""Find the store that a path means, and the name in the store.

A local path is a store plus a name. The store is the nearest folder above that holds
``casnap-store/``, as ``git`` finds its repository. A store that was made only because a snapshot
was taken to a path serves only the names right in its folder. ``backends/uris.py`` says what a URI
means.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from casnap.backends import Backend, LocalBackend, backend_at
from casnap.backends.local_files import (
    Owners,
    as_written,
    exists,
    is_folder,
    is_link,
    is_of_the_place,
    is_taken,
    resolved,
    status,
)
from casnap.backends.uris import Uri, joined, store_uri
from casnap.errors import (
    PLACE_ERRORS,
    BackendError,
    CasnapError,
    InvalidNameError,
    NotAStoreError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StoreError,
    nearest,
    shell_word,
)
from casnap.format.decoding import json_decoder
from casnap.format.names import MARKER, STORE_FOLDER, check_name
from casnap.format.records import CONFIG_KEY, Row, root_key, serves_below
from casnap.runtime.environment import given_path, local_path
from casnap.storage.commit_log.config import no_config_error
from casnap.storage.commit_log.roots import newest_root
from casnap.storage.reading.repository import Repository
from casnap.storage.reading.table import Table

_log = logging.getLogger("casnap")
# The most links that the system follows on one path.
_MOST_LINKS = 40


class Location(NamedTuple):
    """A store, or a place in it.

    Attributes:
        backend: The backend of the store, whether or not the store exists.
        name: A name or prefix in the store; "" for the store itself.
        exists: Whether the store exists. None if this is not known: a local place could not be
            looked at, or the place is remote, where a look would cost a request.
    """

    backend: Backend
    name: str
    exists: bool | None = None

    @property
    def uri(self) -> str:
        """The path or URI of the store, or of a view of the store if there is a prefix."""
        return joined(self.backend.uri, self.name, is_view=True)

    @classmethod
    def of_snapshot(
        cls,
        path: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        may_take: bool = True,
        is_typed: bool = False,
    ) -> Location:
        """Return the store and the name that the path of a snapshot means.

        Args:
            path: A path or URI.
            storage_options: How a remote place is reached.
            may_take: Whether the caller may put snapshots into the store that is found.
            is_typed: Whether a person has typed the path, and is shown which store was found.

        Raises:
            InvalidNameError: The path is a store itself, has no name at its end, or a name that is
                too long or reserved.
            StoreError: The path holds a checkpoint of TorchSnapshot, or cannot be looked at.
            DamagedError: The path lies in a store that has lost its ``casnap.json``.
            ValueError: A local path has storage options.
        """
        uri = store_uri(path)
        if uri is not None:
            return _locate_uri(uri.as_snapshot(), storage_options)
        text, local = _local(path, storage_options)
        if not local.strip("/") or Path(local).name in ("", ".", ".."):
            raise InvalidNameError(f"{text!r} does not end in a snapshot's name")
        parent, name = Path(local).parent, check_name(Path(local).name)
        folder = _resolved(parent) / name
        if exists(folder / STORE_FOLDER):
            raise InvalidNameError(
                f"{folder} is a store itself; a snapshot in it needs a name, like {folder}/step_100"
            )
        if exists(folder / ".snapshot_metadata"):
            raise StoreError(
                f"{folder} holds a snapshot of TorchSnapshot, which casnap does not touch; take to "
                "another path; `casnap import` imports it as a snapshot"
            )
        use = _Use(may_take, is_typed)
        match = _find_store(parent, use)
        if match is None:
            return cls(_led_to(folder.parent, parent), name, exists=False)
        store, inner = match
        backend = _guarded(store, parent, use, is_parent=not inner)
        return cls(backend, check_name(f"{inner}/{name}".lstrip("/")), exists=True)

    @classmethod
    def of_store(
        cls,
        uri: str | os.PathLike[str] | Backend,
        storage_options: Mapping[str, Any] | None = None,
        *,
        may_take: bool = True,
        is_typed: bool = False,
    ) -> Location:
        """Return the store that a URI or a backend means, and the prefix if there is one.

        Args:
            uri: A path, URI or backend.
            storage_options: How a remote place is reached.
            may_take: Whether the caller may put snapshots into the store that is found.
            is_typed: Whether a person has typed the path, and is shown which store was found.

        Raises:
            StoreError: The path is a file, or cannot be looked at.
            DamagedError: The store has lost its ``casnap.json``.
            ValueError: A local path, or a backend, has storage options.
        """
        if isinstance(uri, Backend):
            if storage_options:
                raise ValueError(
                    "a backend knows how it is reached; give storage_options to its maker"
                )
            return _named(uri, "")
        place = store_uri(uri)
        if place is not None:
            return _locate_uri(place, storage_options)
        _, local = _local(uri, storage_options)
        folder = _resolved(Path(local))
        if exists(folder) and not is_folder(folder):
            raise NotAStoreError(f"{folder} is a file; a store is a folder")
        use = _Use(may_take, is_typed)
        match = _find_store(Path(local), use)
        if match is None:
            return cls(_led_to(folder, Path(local)), "", exists=False)
        store, inner = match
        if not inner:
            return cls(_led_to(store, Path(local)), "", exists=True)
        backend = _guarded(store, Path(local), use, is_parent=False)
        return cls(backend, check_name(inner), exists=True)

    def link_advice(self) -> str:
        """Return advice for an error if the name leads over a link in the store; else ""."""
        backend, name = self.backend, self.name
        if backend.folder is None or not name:
            return ""
        parts = name.split("/")
        try:
            ways = (backend.folder.joinpath(*parts[: n + 1]) for n in range(len(parts)))
            link = next(filter(is_link, ways), None)
            target = None if link is None else link.resolve()
        except (OSError, RuntimeError, *PLACE_ERRORS):
            # The link only serves for advice.
            return ""
        if link is None:
            return ""
        return (
            f". {link} is a link, and links in a store are not followed: name {target}, which it "
            "leads to. For a name that moves on, tag a snapshot: "
            f"`casnap tag {shell_word(f'{backend.uri}/NAME')} {shell_word(link.name)} --move`, and "
            f"ask for Store.tagged({link.name!r})"
        )

    def only_marker_error(self) -> NotAStoreError | None:
        """Return the error to raise for a folder that has a marker, but lies in no store.

        Returns:
            The error; None if the folder has no marker.
        """
        backend, name = self.backend, self.name
        if backend.folder is None:
            # The error of a remote place says how to name a store further up.
            return None
        try:
            marker = json_decoder(_MarkerFields).decode(
                backend.read_marker(f"{name}/{MARKER}" if name else MARKER)
            )
        except (FileNotFoundError, CasnapError, ValueError, RecursionError):
            return None
        place = f"{backend.uri}/{name}" if name else backend.uri
        return NotAStoreError(
            f"{place!r:.500} is only a marker of the snapshot {marker.name!r:.200}; its bytes are "
            f"in the store that was at {marker.store!r:.500}. Copy that whole store, or the "
            "snapshot by `casnap cp`"
        )

    def row_in(self, table: Table) -> Row:
        """Return the row of the snapshot from a table.

        Raises:
            SnapshotNotFoundError: The table has no such snapshot. The message says which one the
                caller may have meant.
        """
        backend, name = self.backend, self.name
        row = table.get(name)
        if row is None:
            from casnap.storage.opening.foreign_checkpoints import ForeignCheckpoints

            advice = self.link_advice()
            if not advice and backend.folder is not None:
                advice = ForeignCheckpoints(backend.folder / name).advice()
            advice = advice or nearest(name, (full_name for full_name, _ in table.items_in()))
            raise SnapshotNotFoundError(f"{backend.uri} holds no snapshot {name!r}{advice}")
        return row

    def check_path_is_free(self) -> None:
        """Check that no file or other store is at the path of the snapshot or above it.

        Raises:
            SnapshotExistsError: There is a file or a store.
        """
        backend, name = self.backend, self.name
        place = backend.folder
        for part in name.split("/") if place is not None else ():
            assert place is not None
            place /= part
            if exists(place) and not is_folder(place):
                raise SnapshotExistsError(
                    f"{place} is a file, which casnap leaves alone, so {name!r} cannot be a "
                    f"snapshot of {backend.uri}; choose another name, or move the file away"
                )
            if is_link(place):
                # The target of a link is not in this store.
                return
            if is_taken(place / STORE_FOLDER):
                raise SnapshotExistsError(
                    f"{place} is a store itself, so {name!r} cannot be a snapshot of "
                    f"{backend.uri}; take it into that store, or choose another name"
                )


class _MarkerFields(msgspec.Struct):
    """The fields of a marker that an error message shows."""

    commit: str
    name: str = ""
    store: str = ""


class _Use(NamedTuple):
    """How the caller wants to use the store that is found.

    To read from a store, the caller need not trust it. But a store that another user has put above
    the path must not receive the caller's snapshots.

    Attributes:
        may_take: Whether the caller may put snapshots into the store.
        is_typed: Whether a person has typed the path, and is shown which store was found.
    """

    may_take: bool
    is_typed: bool


def _locate_uri(uri: Uri, storage_options: Mapping[str, Any] | None) -> Location:
    if uri.store.startswith("memory://"):
        _check_no_options(uri.store, storage_options)
    return _named(backend_at(uri.store, storage_options), uri.name)


def _named(backend: Backend, name: str) -> Location:
    """Return the location of a store that was given by its backend or URI.

    Raises:
        DamagedError: The store has lost its ``casnap.json``.
    """
    if backend.costly_requests:
        return Location(backend, name, None)
    try:
        # A new store has its record before a root, so look for the record again after a root.
        exists = has_object(backend, CONFIG_KEY)
        if not exists and has_object(backend, root_key(0)):
            exists = has_object(backend, CONFIG_KEY)
            if not exists:
                raise no_config_error(backend.uri)
    except PLACE_ERRORS:
        # Opening the store will report the error; the place may come back before that.
        return Location(backend, name, None)
    return Location(backend, name, exists)


def _local(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> tuple[str, str]:
    """Return a local path in two forms: as the user gave it, and as the system needs it.

    Raises:
        InvalidNameError: The path lies in a store's folder ``casnap-store/``.
        ValueError: The path has storage options.
    """
    text = given_path(path)
    _check_no_options(text, storage_options)
    local = local_path(text)
    parts = Path(local).parts
    if STORE_FOLDER in parts:
        folder = str(Path(*parts[: parts.index(STORE_FOLDER)]))
        raise InvalidNameError(
            f"{text!r:.500} lies in {STORE_FOLDER}, where a store keeps its files; name the folder "
            f"above it, {folder!r:.500}"
        )
    return text, local


def _check_no_options(path: str, storage_options: Mapping[str, Any] | None) -> None:
    if storage_options:
        raise ValueError(
            f"storage_options say how to reach a remote store, but {path} is on this machine; "
            "leave them out"
        )


def _resolved(folder: Path) -> Path:
    try:
        return resolved(folder)
    except (OSError, RuntimeError, ValueError) as e:
        # A loop of links, a NUL, or a character that the file system lacks.
        raise NotAStoreError(f"{str(folder)!r} is not a folder: {e}") from e


def has_object(backend: Backend, key: str) -> bool:
    """Whether an object exists.

    Listing its folder would be slow if the store has many snapshots.
    """
    return backend.size_if_there(key) is not None


def _find_store(folder: Path, use: _Use) -> tuple[Path, str] | None:
    """Return the nearest store at or above a folder, and the folder's path relative to the store.

    The search first goes up from the folder as the user wrote it, links included, since below a
    store a link counts as a name. Then it goes up from the real path of the folder. It does not
    leave the mount of the folder.

    Args:
        folder: The folder.
        use: How the caller wants to use the store.

    Raises:
        DamagedError: A store of this user lacks its ``casnap.json``.
        PlaceError: A place cannot be looked at.
    """
    found = _find_seen_store(folder, use)
    if found is None:
        # Another host may have made a store that this host does not see yet.
        backend = LocalBackend(_resolved(folder))
        if backend.name_lag and has_object(backend, CONFIG_KEY):
            found = _find_seen_store(folder, use)
    return found


def _find_seen_store(folder: Path, use: _Use) -> tuple[Path, str] | None:
    for way in dict.fromkeys((as_written(folder), _resolved(folder))):
        nearest: Path | None = None
        for place in _mounted_above(way):
            is_named = place == way
            if nearest is not None:
                # Links lead from this store to the nearer one. The path means this store only if it
                # has snapshots below such a link: a user may have replaced their folder by it.
                links = [p for p in _between(nearest, place) if is_link(p)]
                if not any(_has_below(place, str(link.relative_to(place))) for link in links):
                    continue
            if _holds_store(place, is_explicit=True) if is_named else _is_usable(place, way, use):
                nearest = place
        if nearest is not None:
            return nearest.resolve(), "" if nearest == way else str(way.relative_to(nearest))
    return None


def _mounted_above(way: Path) -> Iterator[Path]:
    """Yield a folder and the folders above it, as far as they are on the same mount."""
    device: int | None = None
    for place in (way, *way.parents):
        info = status(place)
        if info is None:
            continue
        if device not in (None, info.st_dev):
            return
        # The target of a link may be on another mount than the link.
        device = None if is_link(place) else info.st_dev
        yield place


def _between(place: Path, ancestor: Path) -> Iterator[Path]:
    """Yield a path and the folders above it, up to but without an ancestor."""
    while place != ancestor:
        yield place
        place = place.parent


def _has_below(place: Path, folder: str) -> bool:
    """Whether a store has a snapshot named ``folder``, or one below it.

    False if the store is damaged.

    Raises:
        PlaceError: The store cannot be looked at.
    """

    def look(table: Table) -> bool:
        return table.get(folder) is not None or any(True for _ in table.items_below(f"{folder}/"))

    try:
        store = Repository(LocalBackend(place))
        return store.read_at_newest(lambda root: look(store.table(root)))
    except CasnapError as e:
        if is_of_the_place(e) and not _is_passed_over(place):
            raise
        return False


def _holds_store(place: Path, *, is_explicit: bool) -> bool:
    """Whether a folder holds a store.

    Args:
        place: The folder.
        is_explicit: Whether the user named this folder, as a store or as the folder of a snapshot.

    Raises:
        DamagedError: The store belongs to this user, and lacks its ``casnap.json``.
    """
    inner = place / STORE_FOLDER
    # Look for roots before the record: a new store has its record before a root.
    has_roots = _has_roots(inner, is_explicit=is_explicit)
    if exists(inner / CONFIG_KEY) and not is_folder(inner / CONFIG_KEY):
        return True
    # If every user may write to a folder, any of them can put roots there.
    if has_roots and (is_explicit or not _is_open_to_all(place)):
        if LocalBackend(place).appears(CONFIG_KEY, lambda: True):
            return True
        raise no_config_error(str(place))
    return False


def _is_open_to_all(place: Path) -> bool:
    info = status(place)
    return info is not None and bool(info.st_mode & stat.S_IWOTH)


def _is_usable(place: Path, way: Path, use: _Use) -> bool:
    """Whether a folder above a path holds a store that the path may mean.

    If every user may write to the folder, a stranger may have put the store there. Such a store
    gets no snapshots, and if it cannot be read, it is skipped without an error.

    Args:
        place: The folder.
        way: The path.
        use: How the caller wants to use the store.

    Raises:
        DamagedError: The store belongs to this user, and lacks its ``casnap.json``.
        PlaceError: The folder cannot be looked at.
    """
    inner = str(way.relative_to(place))
    try:
        if not (_holds_store(place, is_explicit=False) and _serves(place.resolve(), inner)):
            return False
        refusal = _why_distrusted(place.resolve(), is_parent=False)
    except CasnapError as e:
        if not _is_passed_over(place):
            raise
        refusal = f"{place} has a store that cannot be used ({e})"
    else:
        if refusal is None or not _is_open_to_all(place):
            return True
        refusal = _why_not_ours(place.resolve(), is_parent=False)
        if refusal is None:
            return True
        # A path below a folder of this user does not mean a store that a stranger put above it.
        is_sought = use.is_typed or not any(map(_is_own, _between(way, place)))
        if is_sought and not use.may_take:
            _warn(f"{refusal}, where every user may write; it is read, since the path leads to it")
            return True
    _warn(f"{refusal}, where every user may write, so casnap skips it. {_advice(place)}")
    return False


def _is_passed_over(place: Path) -> bool:
    """Whether to ignore a store that cannot be used.

    It is ignored if every user may write to its folder, and the store does not belong to this user.
    """
    if not _is_open_to_all(place):
        return False
    try:
        return _why_distrusted(place.resolve(), is_parent=False) is not None
    except CasnapError:
        return True


def _serves(store: Path, inner: str) -> bool:
    """Whether a store may hold snapshots at a path below its folder.

    A store that was made only because a snapshot was taken to a path serves just the names right in
    its folder, and paths below its own snapshots.

    Args:
        store: The folder of the store.
        inner: The path, relative to the store.
    """
    backend = LocalBackend(store)
    try:
        root = newest_root(backend)
        if serves_below(root):
            return True
        table, parts = Repository(backend).table(root), inner.split("/")
        # No snapshot can lie below a snapshot, which the take will report.
        return any(table.get("/".join(parts[: n + 1])) is not None for n in range(len(parts)))
    except NotAStoreError:
        # The store is being made, or its making was cut off. The process that finishes it decides.
        return True


def not_served_text(folder: Path) -> str:
    """Return a hint for a message if a store above a folder takes no snapshots there; else ""."""
    try:
        store = next((p for p in folder.parents if exists(p / STORE_FOLDER / CONFIG_KEY)), None)
        if store is None or serves_below(newest_root(LocalBackend(store))):
            return ""
    except CasnapError:
        return ""
    return (
        f". The store {store} serves only names right in its folder, since a path alone has made "
        f"it; `casnap init {shell_word(store)}` has it serve all paths below"
    )


def _has_roots(inner: Path, *, is_explicit: bool) -> bool:
    """Whether a folder ``casnap-store/`` has a first root.

    Args:
        inner: The folder.
        is_explicit: Whether the user named the store's folder. If not, the root counts only if it
            belongs to this user.
    """
    info = status(inner / root_key(0), follow=False)
    if info is None or not stat.S_ISREG(info.st_mode):
        return False
    return is_explicit or is_ours(inner.parent, info.st_uid)


@cache
def _warn(text: str) -> None:
    _log.warning("%s", text)


def _advice(store: Path) -> str:
    return (
        f"To write to it, name it: store={str(store)!r}, or Store({str(store)!r}). If it is yours "
        f"alone, `chown -R` its {STORE_FOLDER} to you, and `chmod -R go-w` it"
    )


# --- whose it is --------------------------------------------------------------------------------


def is_ours(store: Path, uid: int) -> bool:
    """Whether files in a store's folder that have a user id count as files of this user.

    Some volumes give all files to one user id: an access point of EFS, an export with
    ``all_squash`` or, for root, ``root_squash``, CIFS. There a new file of this process gets that
    id too, so files with the id count as this user's.

    Args:
        store: The folder of the store.
        uid: The user id.
    """
    if uid == os.geteuid():
        return True
    new_file = LocalBackend(store).new_file()
    return new_file is not None and new_file.st_uid == uid


def _is_own(path: Path) -> bool:
    info = status(path, follow=False)
    return info is not None and info.st_uid == os.geteuid()


def _led_to(folder: Path, way: Path, check: Callable[[], None] | None = None) -> LocalBackend:
    """Return the backend of the place to which a path leads.

    If the path has a link that a stranger has made, the backend refuses changes.

    Args:
        folder: The real path of the place.
        way: The path as the user wrote it.
        check: Another check to make before the first change to the place.
    """
    backend = LocalBackend(folder)
    link = _link_of_a_stranger(way)
    check = check if link is None else partial(_refuse_link, str(link), str(folder))
    if check is not None:
        backend.guard(check)
    return backend


def _refuse_link(link: str, folder: str) -> None:
    raise StoreError(
        f"{link} is a link of another user, in a folder where every user may write: its target is "
        f"read, but nothing is made or changed there. If you mean the target, name {folder}"
    )


def _link_of_a_stranger(way: Path) -> Path | None:
    """Return a link on a path that a stranger has made; None if there is none.

    A stranger is neither this user, nor root, nor the owner of the folder with the link. The link
    counts only if every user may write to that folder. (Linux itself does not follow such a link in
    a sticky folder if ``fs.protected_symlinks`` is set.)
    """
    folder, rest = Path("/"), [*(Path.cwd() / way).parts[1:]]
    links_left = _MOST_LINKS
    while rest and links_left:
        part = rest.pop(0)
        place = folder.parent if part == ".." else folder / part
        info = status(place, follow=False)
        if info is None or not stat.S_ISLNK(info.st_mode):
            folder = place
            continue
        around = folder.stat()
        if around.st_mode & stat.S_IWOTH and info.st_uid not in (os.geteuid(), around.st_uid, 0):
            return place
        # The target of the link may lead through links again.
        links_left -= 1
        rest = [*(folder / place.readlink()).parts[1:], *rest]
        folder = Path("/")
    return None


def _guarded(store: Path, way: Path, use: _Use, *, is_parent: bool) -> LocalBackend:
    """Return the backend of a store to which a path leads.

    The backend refuses to write if the store is not to be trusted, as :func:`_why_distrusted` says,
    unless a person has typed the path.

    Args:
        store: The folder of the store.
        way: The path as the user wrote it.
        use: How the caller wants to use the store.
        is_parent: Whether the snapshot lies right in this folder.
    """
    is_ours = use.is_typed or _why_distrusted(store, is_parent=is_parent) is None
    check = None if is_ours else partial(_check_ours, store, is_parent=is_parent)
    return _led_to(store, way, check)


def _check_ours(store: Path, *, is_parent: bool) -> None:
    refusal = _why_not_ours(store, is_parent=is_parent)
    if refusal is not None:
        raise StoreError(
            f"{refusal}, found by the path given: it can be read, and is not written to. "
            f"{_advice(store)}"
        )


def _why_not_ours(store: Path, *, is_parent: bool) -> str | None:
    """Return why no snapshots may be put into a store to which a path leads; None if they may.

    Unlike :func:`_why_distrusted`, this is also right on volumes where a new file does not get the
    owner or mode of its maker. To find out, it creates a file in the store's folder, and deletes
    it.
    """
    new_file = LocalBackend(store).new_file()
    refusal = _why_distrusted(store, is_parent=is_parent)
    if refusal is None or new_file is None:
        return refusal
    return _why_distrusted(store, is_parent=is_parent, owners=Owners.by(new_file))


def _why_distrusted(store: Path, *, is_parent: bool, owners: Owners | None = None) -> str | None:
    """Return why no snapshots may be put into a store to which a path leads; None if they may.

    The store must belong to this user or to root, and other users must not be able to write to it.
    Otherwise a stranger could put a store above a path, and would get the snapshots of all users
    who take to paths below.

    Args:
        store: The folder of the store.
        is_parent: Whether the snapshot lies right in this folder, so that the path names the store.
            Other users may then write to it.
        owners: Whose files count as this user's; by default this user's and root's.

    Raises:
        BackendError: The store was just moved or removed.
    """
    owners = owners or Owners.by()
    inner = store / STORE_FOLDER
    # Links are not followed: a link to a file of this user proves nothing.
    folder, record = status(inner, follow=False), status(inner / CONFIG_KEY, follow=False)
    if folder is None or record is None:
        raise BackendError(f"{store} was moved, or removed, just now; try again")
    if not (owners.own(folder) and owners.own(record)):
        return f"{store} is a store of another user (uid {record.st_uid})"
    is_shared = not is_parent and owners.others_may_write(folder)
    if is_shared or not stat.S_ISDIR(folder.st_mode):
        return f"{store} is a store that other users may write to"
    return None
