"""The options of a mirror, and its status: for users, and for other processes of its host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from casnap.backends import Backend
from casnap.format.decoding import json_decoder
from casnap.format.digest import digest_of
from casnap.mirror.notes import MirrorPlace
from casnap.runtime.environment import cache_folder, given_path, is_running
from casnap.storage import Repository, Retention, Runs, Tags
from casnap.transfer.copy_jobs import CopyOptions


class Destination(NamedTuple):
    """The mirror, opened to copy to it.

    Attributes:
        store: The mirror as a repository.
        place: Which store it is, as the mirrored store's settings say.
        options: The options of copies to it.
    """

    store: Repository
    place: MirrorPlace
    options: CopyOptions


@dataclass(frozen=True)
class MirrorOptions:
    """An option of :class:`casnap.Store`: the store that gets copies, and of which snapshots.

    Args:
        uri: The path or URI of the other store.
        tag: The mirror gets only the snapshots on which this tag is published, by
            :meth:`casnap.Store.publish`, and the tag with them. If publishes follow each other
            fast, it may get only the last one. By default it gets all snapshots.
        retention: Which snapshots to keep at the mirror; by default all.
        storage_options: How to reach the mirror, as :class:`casnap.Store` takes them. casnap
            neither stores nor shows them.

    Raises:
        TypeError: ``retention`` is no :class:`casnap.Retention`, or ``storage_options`` no dict.
        ValueError: The values of ``retention`` contradict each other.
        InvalidNameError: ``tag`` is not valid.
    """

    uri: str | os.PathLike[str] | Backend
    _: KW_ONLY
    tag: str | None = None
    retention: Retention | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.uri, Backend):
            object.__setattr__(self, "uri", given_path(self.uri))
        if self.retention is not None:
            Runs.check_retention(self.retention)
        if self.tag is not None:
            Tags.checked(self.tag)
        if not isinstance(self.storage_options, Mapping | None):
            raise TypeError("storage_options is a dict, such as {'endpoint_url': ...}")


@dataclass(frozen=True)
class MirrorStatus:
    """How far the mirror of a store lags, and why.

    Attributes:
        uri: The mirror.
        snapshots: How many snapshots the mirror is still to get.
        nbytes: About how many stored bytes these snapshots have added to the mirrored store.
        active: Whether this process is copying just now.
        error: Why the last try failed, or that another store has taken over a run at the mirror;
            else None.
        since: When the tries began to fail, in seconds since the epoch; None if they do not.
        refused: Each snapshot that waits for the user to act, by name → why it cannot be mirrored.
    """

    uri: str
    snapshots: int
    nbytes: int
    active: bool
    error: str | None
    since: float | None
    refused: dict[str, str]


class HostStatus(msgspec.Struct):
    """The status of a mirror that the copying process writes for other processes of its host.

    Attributes:
        pid: The process that copies.
        error: Why its last try failed; empty if it did not.
        since: When its tries began to fail, in seconds since the epoch.
        refused: Each snapshot that waits for the user to act, by name → why it cannot be mirrored.
    """

    pid: int = 0
    error: str = ""
    since: float = 0.0
    refused: dict[str, str] = {}


class HostFiles:
    """Two files of this host for a mirror: a lock, and the status of the process that copies.

    The lock only spares double work: without it every process would copy.

    Args:
        source: The mirrored store.
        uri: The mirror.
    """

    def __init__(self, source: Repository, uri: str) -> None:
        pair = f"{source.config.store_id} {source.backend.identity} {uri}"
        self._name = f"mirror-{digest_of(pair.encode()).hex()[:32]}"

    def _path(self, suffix: str) -> Path | None:
        folder = cache_folder()
        return None if folder is None else folder / f"{self._name}{suffix}"

    @property
    def lock(self) -> Path | None:
        """The file that the copying process locks; None if this host has no cache folder."""
        return self._path(".lock")

    def write(self, status: HostStatus) -> None:
        """Write the status, for the other processes of this host."""
        path = self._path(".json")
        if path is not None:
            with suppress(OSError):
                path.write_bytes(msgspec.json.encode(status))

    def read(self) -> HostStatus | None:
        """Return the status; None if there is none, or the process that wrote it has ended."""
        path = self._path(".json")
        if path is None:
            return None
        try:
            status = json_decoder(HostStatus).decode(path.read_bytes())
        except (OSError, msgspec.DecodeError, ValueError):
            return None
        return status if is_running(status.pid) else None
