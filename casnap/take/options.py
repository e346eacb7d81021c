"""The options of a take, and the check that all ranks ask for the same."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import msgspec

from casnap.errors import DamagedError, SnapshotExistsError
from casnap.format.codec import Codec
from casnap.format.names import component_of
from casnap.format.records import Root
from casnap.ranks.comm import Comm
from casnap.runtime.progress import Progress
from casnap.runtime.units import count_if_given, count_of
from casnap.storage.log.settings import codec_of
from casnap.storage.places.other_formats import check_no_other_form
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.retention import Retention, check_retention
from casnap.storage.snapshots.table import Table, check_free, check_path_is_free
from casnap.storage.writing.hooks import CommitHooks
from casnap.take.attempts import Attempt, unclear_commits


class TakeArguments(TypedDict, total=False):
    """The keyword arguments of each take, for type checkers."""

    metadata: Mapping[str, Any] | None
    overwrite: bool
    allow_pickle: bool
    progress: Progress | None
    retention: Retention | None
    per_rank: Sequence[str] | None
    threads: int | None
    timeout: float | None


class AsyncTakeArguments(TakeArguments, total=False):
    """The keyword arguments of each take in the background, likewise."""

    max_staging_bytes: int | None
    max_pending: int


@dataclass(frozen=True, kw_only=True)
class TakeOptions:
    """How to take. :meth:`casnap.Snapshot.take` describes the options.

    Attributes:
        hooks: Called on the rank that commits.
        attempt: What becomes of an error.
    """

    metadata: Mapping[str, Any] | None = None
    overwrite: bool = False
    allow_pickle: bool = False
    max_staging_bytes: int | None = None
    max_pending: int = 1
    progress: Progress | None = None
    retention: Retention | None = None
    replicated: Sequence[str] | None = None
    per_rank: Sequence[str] | None = None
    threads: int | None = None
    hooks: CommitHooks = field(default_factory=CommitHooks)
    attempt: Attempt = field(default_factory=Attempt)

    def __post_init__(self) -> None:
        if self.retention is not None:
            check_retention(self.retention)
        # Ranks compare the texts of options, so each has one form.
        object.__setattr__(self, "threads", count_if_given("threads", self.threads))
        object.__setattr__(self, "max_pending", count_of("max_pending", self.max_pending))
        for name in ("replicated", "per_rank"):
            _check_globs(name, getattr(self, name))


def _check_globs(option: str, globs: object) -> None:
    """Check that the value of an option is None, or a list of globs.

    Raises:
        TypeError: It is something else: one glob would be taken for one of each character.
    """
    if isinstance(globs, str):
        raise TypeError(f"{option} is a list of globs, such as [{globs!r}]; got a str")
    if globs is None:
        return
    if not isinstance(globs, Collection) or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"{option} is a list of globs, such as ['model/*']; got {globs!r:.200}")


class Request(msgspec.Struct, array_like=True):
    """The arguments of a take on one rank.

    Attributes:
        store_id: The id of the store.
        name: The name of the snapshot.
        keys: The keys of the app state, as components: a key need not be Unicode.
        options: The options that must be the same on all ranks.
        codec: How chunks are stored; that of rank 0 counts, which looks what the store is set to.
        seed: A random number; that of rank 0 chooses which bytes of replicas are compared.
        root: The newest root, which rank 0 reads for all where each look is a request.
    """

    store_id: str
    name: str
    keys: list[str]
    options: dict[str, str]
    codec: Codec
    seed: int
    root: Root | None = None


def agree_on_request(
    store: Repository,
    name: str,
    keys: list[str],
    options: TakeOptions,
    comm: Comm,
) -> Request:
    """Return the request of rank 0, once every rank has checked that its own is the same.

    Its keys are in the order in which all ranks read their states: reading may be a collective of
    the trainer's.

    Args:
        store: The store.
        name: The name of the snapshot.
        keys: The keys of this rank.
        options: How to take.
        comm: The ranks.

    Raises:
        SnapshotExistsError: The name is taken.
        StateError: The ranks were called with different arguments.
    """
    root, codec = None, Codec.RAW
    if comm.rank == 0:
        root = _check_name_is_free(store, name, options)
        codec = codec_of(root, store.backend.uri)
    mine = Request(
        store.config.store_id,
        name,
        [component_of(key) for key in keys],
        {
            "overwrite": str(options.overwrite),
            "allow_pickle": str(options.allow_pickle),
            "max_pending": str(options.max_pending),
            "retention": repr(options.retention),
            "on_error": options.attempt.on_error,
        },
        codec,
        seed=int.from_bytes(os.urandom(7), "big"),
        root=root if store.backend.costs.one_asks else None,
    )
    agreed = comm.broadcast_message(mine, Request)
    if agreed.root is not None and comm.rank:
        store.observe_root(agreed.root)
    for subject, on_this_rank, on_rank_0 in (
        ("the store", mine.store_id, agreed.store_id),
        ("the name", mine.name, agreed.name),
        ("the keys of app_state", sorted(mine.keys), sorted(agreed.keys)),
        *((f"the option {key}=", text, agreed.options[key]) for key, text in mine.options.items()),
    ):
        comm.check_same(subject, on_this_rank, on_rank_0)
    return agreed


def check_take(table: Table, name: str, options: TakeOptions, uri: str) -> None:
    """Check that a take may make a snapshot of this name.

    Raises:
        SnapshotExistsError: The name is taken, and not by a take of this process that failed.
    """
    row = table.get(name)
    is_own = row is not None and row.commit in unclear_commits
    check_free(table, name, overwrite=options.overwrite or is_own, uri=uri)


def _check_name_is_free(store: Repository, name: str, options: TakeOptions) -> Root:
    """Check it in the newest root, and return that."""
    check_path_is_free(store.backend, name)
    if store.backend.folder is not None:
        check_no_other_form(store.backend.folder / name)

    def check(root: Root) -> Root:
        table = store.table(root)
        check_take(table, name, options, store.backend.uri)
        return root

    try:
        return check(store.recent())
    except (SnapshotExistsError, DamagedError):
        # That root may be a moment old.
        return store.read_at_newest(check)
