"""The options of a take; and whether a training run goes on after the take failed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from casnap.errors import (
    PLACE_ERRORS,
    BackendError,
    CasnapError,
    DamagedError,
    DeviceError,
    FencedError,
    StorageFullError,
    UnclearCommitError,
    UnsupportedTypeError,
)
from casnap.format.records import Row
from casnap.runtime.environment import OnUnhealthy, health_asked, obeys_health
from casnap.runtime.lazy_imports import ModuleLater
from casnap.runtime.progress import Progress
from casnap.runtime.units import Size, bytes_if_given, count_if_given, count_of

if TYPE_CHECKING:
    from casnap import storage
else:
    storage = ModuleLater("casnap.storage")

_log = logging.getLogger("casnap")
T = TypeVar("T")
U = TypeVar("U")

# Faults that may be gone at the next take. A wrong state or name is not among them, nor a rank that
# died. An error of one rank has the same type on all ranks, so all ranks go on, or none. After a
# device has computed a wrong digest, the next take hashes on the host.
OF_STORAGE = (*PLACE_ERRORS, DamagedError, FencedError, DeviceError)


@dataclass
class _Series:
    """The failed takes of a run since its last take that was stored.

    Attributes:
        since: When the first of these takes failed, in seconds since the epoch.
        count: How many takes failed.
        last_error: The error of the last failed take, as text.
    """

    since: float
    count: int = 0
    last_error: str = ""


# The takes that have failed since one was stored, by the path of their run.
_series: dict[str, _Series] = {}
# Commits of this process that are stored, or may be, although the call raised an error. A take of
# the same name replaces them.
unclear_commits: set[bytes] = set()


def what_failed(snapshot: str, error: BaseException) -> str:
    """Return the message that says which take failed, and why.

    Args:
        snapshot: The name of the snapshot, or its path.
        error: The error of the take.
    """
    if isinstance(error, UnclearCommitError):
        return f"it is not known whether the snapshot {snapshot} is stored"
    return f"the snapshot {snapshot} was NOT stored"


class Attempt:
    """One take of a training loop. It decides whether an error of the take is raised or logged.

    Args:
        path: The path of the snapshot, or its URI.
        goes_on: Whether the run goes on after an error of the storage, which is then logged.

    Attributes:
        goes_on: Whether the run goes on after an error of the storage.
    """

    def __init__(self, path: str = "", *, goes_on: bool = False) -> None:
        self.goes_on = goes_on
        self._path = path
        self._run = path.rpartition("/")[0]
        self._is_noted = False

    def run(self, take: Callable[[], T], if_failed: Callable[[CasnapError], U]) -> T | U:
        """Call ``take``. If it fails and the run goes on, return a replacement for its result.

        Args:
            take: Takes the snapshot, or begins to.
            if_failed: Returns the replacement, given the error.
        """
        try:
            return take()
        except OF_STORAGE as e:
            if not self.tolerates(e):
                raise
            return if_failed(e)

    def tolerates(self, error: BaseException) -> bool:
        """Return whether the run goes on after an error of the take; if so, log the error."""
        if not self.goes_on or not isinstance(error, OF_STORAGE):
            return False
        # A call and its part in the background may both fail, but only one is counted.
        if not self._is_noted:
            self._is_noted = True
            series = _series.setdefault(self._run, _Series(time.time()))
            series.count += 1
            series.last_error = f"{type(error).__name__}: {error}"
            _log.warning(
                "%s; the run goes on: %s",
                what_failed(self._path, error),
                series.last_error,
            )
        return True

    @contextmanager
    def finding_store(self) -> Iterator[None]:
        """In a ``with`` block that finds or makes the store, raise errors of the storage.

        They are raised even if the run is to go on after errors: without a store, no later take can
        succeed either. The error of a full disk is the exception: the run goes on after it.
        """
        try:
            yield
        except BackendError as e:
            self.goes_on &= isinstance(e, StorageFullError)
            raise

    def note_stored(self, row: Row) -> None:
        """Note that the snapshot is stored; log how many takes of its run failed before it."""
        unclear_commits.discard(row.commit)
        series = _series.pop(self._run, None)
        if series is not None:
            _log.warning(
                "the snapshot %s is stored; %d before it failed since %s, the last with %s",
                self._path,
                series.count,
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(series.since)),
                series.last_error,
            )


def _no_hooks() -> storage.CommitHooks:
    return storage.CommitHooks()


@dataclass(frozen=True, kw_only=True)
class HealthOptions:
    """Which floating-point tensors a take checks, and what it does if some are unhealthy.

    A tensor is unhealthy if it has NaN or infinite elements. A tensor of a single element may be
    infinite: trainers begin with such a "best loss so far".

    Args:
        on_unhealthy: "warn": the snapshot is stored, with a warning that names the tensors.
            "raise": the take raises an :class:`casnap.errors.UnhealthyError`, and stores nothing.
        ignore: Globs (``*`` matches ``/`` too) of the paths of tensors that always count as
            healthy, such as ``model/*.mask`` for a mask with infinite elements.

    Raises:
        ValueError: ``on_unhealthy`` has no such value.
        TypeError: ``ignore`` is no list of globs.
    """

    on_unhealthy: OnUnhealthy = "warn"
    ignore: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.on_unhealthy not in get_args(OnUnhealthy):
            raise ValueError(f"on_unhealthy is 'warn' or 'raise'; got {self.on_unhealthy!r:.80}")
        _check_globs("ignore", self.ignore)
        # Ranks compare the texts of options, so each has one form.
        object.__setattr__(self, "ignore", tuple(self.ignore or ()))

    @staticmethod
    def are_obeyed() -> bool:
        """Whether a trainer that resumes skips snapshots with unhealthy tensors.

        It does, unless the environment variable ``CASNAP_HEALTH`` is "off".
        """
        return obeys_health()

    @classmethod
    def of(cls, asked: HealthOptions | bool | None) -> HealthOptions | None:
        """Return the options for the value of the argument ``health=`` of a take.

        Args:
            asked: The value. With None, the environment variable ``CASNAP_HEALTH`` decides; True
                stands for the default options.

        Returns:
            The options; None if nothing is to be measured.

        Raises:
            StoreError: The variable has another value than "off", "warn" or "raise".
            TypeError: ``asked`` is something else.
        """
        if asked is None:
            word = health_asked()
            return None if word is None else cls(on_unhealthy=word)
        if isinstance(asked, bool):
            return cls() if asked else None
        if not isinstance(asked, cls):
            raise TypeError(f"health is a bool or a HealthOptions; got {asked!r:.80}")
        return asked


@dataclass(frozen=True, kw_only=True)
class TakeOptions:
    """The options of a take. :meth:`casnap.Store.take` says more about each.

    Attributes:
        metadata: Metadata to keep with the snapshot, as JSON types. Of many ranks, only rank 0's
            metadata are kept.
        overwrite: Whether a snapshot of this name is replaced.
        allow_pickle: Whether values without a safe encoding are pickled.
        max_staging_bytes: The most bytes that copies of pending takes may occupy.
        max_pending: How many takes may be pending.
        progress: Called with the phase, the bytes done, and the total.
        retention: The rules by which older snapshots of the run are deleted in the same commit.
        replicated: Globs of paths that are equal on all ranks.
        per_rank: Globs of paths whose values belong to their rank, even if they are equal.
        threads: How many threads of this process may work on the take.
        timeout: For how many seconds a rank waits for another.
        environment: Whether to note what the take was made with, such as the version of torch.
        health: How to measure tensors; None if they are not to be measured.
        hooks: Called before and after the commit, on the rank that commits.
        attempt: Decides whether the training goes on if the take fails.
    """

    metadata: Mapping[str, Any] | None = None
    overwrite: bool = False
    allow_pickle: bool = False
    max_staging_bytes: Size | None = None
    max_pending: int = 1
    progress: Progress | None = None
    retention: storage.Retention | None = None
    replicated: Sequence[str] | None = None
    per_rank: Sequence[str] | None = None
    threads: int | None = None
    timeout: float | None = None
    environment: bool = True
    health: HealthOptions | None = None
    hooks: storage.CommitHooks = field(default_factory=_no_hooks, repr=False)
    attempt: Attempt = field(default_factory=Attempt, repr=False)

    def __post_init__(self) -> None:
        if self.retention is not None:
            storage.Runs.check_retention(self.retention)
        # Ranks compare the texts of options, so each has one form.
        object.__setattr__(self, "threads", count_if_given("threads", self.threads))
        object.__setattr__(self, "max_pending", count_of("max_pending", self.max_pending))
        _ = self.staging_bytes
        for name in ("replicated", "per_rank"):
            _check_globs(name, getattr(self, name))

    @property
    def staging_bytes(self) -> int | None:
        """``max_staging_bytes`` in bytes; None for no limit.

        Raises:
            ValueError: ``max_staging_bytes`` is not a size.
        """
        return bytes_if_given("max_staging_bytes", self.max_staging_bytes, least=0)

    def for_path(self, path: str, *, goes_on: bool = False) -> TakeOptions:
        """Return the same options with a new :class:`Attempt`, for the take to a path.

        Args:
            path: The path, or the URI.
            goes_on: Whether the run goes on after an error of the storage.
        """
        return replace(self, attempt=Attempt(path, goes_on=goes_on))


def _check_globs(option: str, globs: object) -> None:
    """Check that the value of an option is None, or a list of globs.

    Raises:
        TypeError: It is something else. A single string would count as a glob for each character.
    """
    if isinstance(globs, str):
        raise TypeError(f"{option} is a list of globs, such as [{globs!r}]; got a str")
    if globs is None:
        return
    if not isinstance(globs, Collection) or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"{option} is a list of globs, such as ['model/*']; got {globs!r:.200}")


def check_order(call: str, app_state: object, name: object) -> None:
    """Check that the caller has not swapped the app state with the name or path.

    Args:
        call: The call with its arguments in the right order, for the message.
        app_state: The value that was given as the app state.
        name: The value that was given as the name or path.

    Raises:
        UnsupportedTypeError: They were swapped, or the name is not a string.
    """
    if isinstance(app_state, str | os.PathLike) or not isinstance(name, str | os.PathLike):
        argument = call.partition("(")[2].rstrip(")").replace("app_state", "").strip(", ")
        raise UnsupportedTypeError(
            f"the call is {call}: app_state is a dict of keys and Statefuls, {argument} a str; got "
            f"{type(app_state).__name__} as app_state, {type(name).__name__} as {argument}"
        )
