"""Following a store in the process that serves: live tensors are patched between two forwards.

A version is staged in the background, read and verified, and then copied into the tensors while no
forward runs. Ranks that hold slices of one model agree on each version before they copy it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch

from casnap.backends import Backend
from casnap.errors import CasnapError, SnapshotNotFoundError
from casnap.ranks.comm import Comm, SingleProcess
from casnap.ranks.joining import join
from casnap.restore.patching import LiveWeights, Patch
from casnap.restore.renaming import Rename
from casnap.serving.options import PullOptions
from casnap.serving.pull import Source
from casnap.storage.catalog.contents import Contents
from casnap.storage.catalog.location import READS
from casnap.storage.catalog.opening import locate, open_at
from casnap.storage.catalog.table import snapshots_in
from casnap.transfer.follow import Backoff

_NONE = bytes(16)
_PATIENCE = 60.0


class AppliedVersion(NamedTuple):
    """A version that live tensors hold.

    Attributes:
        name: The full name of the snapshot.
        commit: Its commit id.
        copied_bytes: How many bytes were copied to come to it.
        copy_seconds: How long that took, in which no forward could begin.
    """

    name: str
    commit: str
    copied_bytes: int
    copy_seconds: float


class Follower:
    """Keeps the tensors of a module, or of a state dict, at the newest version, in place.

    The first version is read at once, whole, and then only chunks that change. Run each forward in
    ``with follower.applied():``. All of a forward then sees one version. What fails is logged and
    tried again; until then the tensors stay as they are.

    With ``torch.distributed``, all ranks of ``pg`` make a follower together, each with its slices
    (DTensors) of one model, and all enter :meth:`applied` equally often, from one thread. There
    they agree, so that all take a version before the same forward, or none does.

    Args:
        uri: The store; or a folder of it, whose snapshots alone count.
        target: The module or state dict. Its tensors must be there, of the right shapes.
        path: Where the weights are in a snapshot, as for :meth:`casnap.Snapshot.load_into`.
        tag: Only snapshots with this tag. :meth:`casnap.Store.publish` moves it.
        match: Only snapshots whose name, below the folder, this glob matches.
        rename: The names here for those of the snapshot: a mapping, or a function.
        strict: Whether it is an error if the snapshot or the target has a name that the other one
            has not.
        interval: How often to look for another version, in seconds.
        on_version: Called after each version but the first, before the next forward begins, with an
            :class:`AppliedVersion`: to drop caches that the old weights filled. What it raises is
            logged; of several ranks, :meth:`applied` raises it.
        storage_options: How to reach a remote store.
        cache_bytes: As for :class:`casnap.Store`.
        pg: The process group; by default the world, or this process alone.
        every: Ranks agree at every so-many-th forward.
        timeout: Seconds that a rank waits for another.
        start: Whether a thread looks for other versions. Without it, :meth:`update` does.

    Attributes:
        version: The version that the tensors hold.

    Raises:
        SnapshotNotFoundError: There is no such snapshot yet.
        MismatchError: The tensors and the snapshot differ; nothing was written.
        StoreError: The store cannot be used.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | Backend,
        target: torch.nn.Module | MutableMapping[str, Any],
        *,
        path: str = "model",
        tag: str | None = None,
        match: str | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        interval: float = 5.0,
        on_version: Callable[[AppliedVersion], object] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        cache_bytes: int | None = None,
        pg: Any = None,
        every: int = 1,
        timeout: float | None = None,
        start: bool = True,
    ) -> None:
        place = locate(uri, storage_options, READS)
        self._weights = LiveWeights(target, path, rename, strict=strict)
        self._options = PullOptions(tag=tag, match=match)
        self._interval, self._every = interval, every
        self._on_version = on_version
        self._join: Callable[[], Comm] = partial(
            join, pg, timeout, f"the update of {place.backend.uri}"
        )
        self._gate = _Gate()
        self._forwards = 0
        self._seen_root = b""
        # Only of several ranks: what rank 0 wants all to stage, and what is staged here.
        self._wanted, self._wanted_since = _NONE, 0.0
        self._staged: Patch | None = None
        self._looking = threading.Lock()
        self._broken: BaseException | None = None
        self._stopping = threading.Event()
        self._looks = Backoff(f"following {place.backend.uri}")
        with self._join() as comm:
            store, _ = open_at(place, create=False, cache_bytes=cache_bytes)
            self._source = Source(store, place.name)
            self._is_alone, self._leads = isinstance(comm, SingleProcess), comm.rank == 0
            newest = self._source.newest(self._options) if self._leads else None
            commit = bytes(comm.broadcast(newest.row.commit if newest is not None else b""))
            patch = self._stage(newest or self._contents_of(commit))
            comm.all_gather(b"")  # all have staged it
            self._apply(patch, is_first=True)
        self._thread = threading.Thread(target=self._follow, name="casnap-follower", daemon=True)
        if start:
            self._thread.start()

    # --- in the threads that serve ---

    @contextmanager
    def applied(self) -> Iterator[AppliedVersion]:
        """Run a forward with one version of all tensors; yield which.

        Many threads may do so at once, unless there are several ranks. A version is applied when
        all of them have left; those that come meanwhile wait for the copy.

        Raises:
            CasnapError: Copying a version has failed half way, so that the tensors hold a mix.
            RankError: Another rank failed, died or did not answer in time.
        """
        if not self._is_alone and not self._gate.is_inside:
            self._forwards += 1
            if self._forwards % self._every == 0:
                self._agree()
        with self._gate.shared():
            if self._broken is not None:
                raise CasnapError(
                    "the copy of a version has failed half way, so the tensors hold a mix of two; "
                    "load them anew, and make another Follower"
                ) from self._broken
            yield self.version

    def update(self) -> bool:
        """Look for another version now, and apply it; return whether there was one.

        Of several ranks, all call this together.

        Raises:
            CasnapError: It failed, and the tensors hold the version before; or this was called
                within :meth:`applied`.
        """
        if self._gate.is_inside:
            raise CasnapError("update() waits for all forwards, so call it outside of applied()")
        commit = self.version.commit
        if self._is_alone:
            self._look()
        else:
            with self._join() as comm:
                self._look(patience=0)
                self._hear(bytes(comm.broadcast(self._wanted)))
                self._stage_wanted()
            self._agree()
        return self.version.commit != commit

    def stop(self) -> None:
        """Stop to look for versions. The tensors stay as they are."""
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def error(self) -> BaseException | None:
        """Why the last look failed; None if it did not."""
        return self._looks.error

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()

    # --- looking, in the background ---

    def _follow(self) -> None:
        while not self._stopping.wait(max(self._interval, self._looks.delay)):
            if self._broken is not None:
                return
            try:
                self._look()
                if not self._is_alone:
                    self._stage_wanted()
            except Exception as e:  # noqa: BLE001 - whatever it is, it is tried again
                self._looks.note_failure(e)
            else:
                self._looks.note_success()

    def _look(self, patience: float = _PATIENCE) -> None:
        """Look for another version; apply it, or have all ranks stage it.

        Args:
            patience: For how many seconds all ranks may stage one version while another is newer.
        """
        with self._looking:
            root = self._source.store.newest().commit if self._leads else self._seen_root
            if root == self._seen_root:
                return
            contents = self._source.newest(self._options)
            commit = contents.row.commit
            if commit.hex() != self.version.commit:
                if not self._is_alone:
                    # If another one were wanted at once, they might never come to any.
                    waited = time.monotonic() - self._wanted_since
                    if waited >= patience or not self._is_there(self._wanted):
                        self._wanted, self._wanted_since = commit, time.monotonic()
                    return
                self._apply(self._stage(contents))
            self._seen_root = root

    def _stage(self, contents: Contents) -> Patch:
        with contents.reading():
            return self._weights.stage(contents)

    def _apply(self, patch: Patch, *, is_first: bool = False) -> None:
        """Copy what was staged into the tensors, once no forward runs."""
        with self._gate.alone():
            start = time.monotonic()
            try:
                self._weights.apply(patch)
            except BaseException as e:
                self._broken = e
                raise
            seconds = time.monotonic() - start
            commit = patch.contents.row.commit.hex()
            self.version = AppliedVersion(patch.contents.name, commit, patch.nbytes, seconds)
            if self._on_version is not None and not is_first:
                self._on_version(self.version)

    # --- several ranks ---

    def _is_there(self, commit: bytes) -> bool:
        try:
            if commit == _NONE:
                return False
            self._contents_of(commit)
        except SnapshotNotFoundError:
            return False
        return True

    def _contents_of(self, commit: bytes) -> Contents:
        """Return the snapshot of a commit that rank 0 has chosen."""
        store = self._source.store
        rows = store.read_at_newest(
            lambda root: list(snapshots_in(store.table(root), self._source.name))
        )
        for name, row in rows:
            if row.commit == commit:
                return Contents(store, name, row)
        raise SnapshotNotFoundError(
            f"{store.backend.uri}: the snapshot of commit {commit.hex()}, which rank 0 has chosen, "
            "was deleted, or is not there where this rank looks"
        )

    def _hear(self, wanted: bytes) -> None:
        """Note what rank 0 wants all ranks to stage."""
        if not self._leads:
            self._wanted = wanted

    def _stage_wanted(self) -> None:
        wanted, staged = self._wanted, self._staged
        if wanted == _NONE or wanted.hex() == self.version.commit:
            return
        is_staged = staged is not None and staged.contents.row.commit == wanted
        if staged is None or not is_staged or not self._weights.fits(staged):
            self._staged = self._stage(self._contents_of(wanted))

    def _agree(self) -> None:
        """Apply what is staged, if all ranks have staged the same; hear what rank 0 wants."""
        staged = self._staged
        is_mine = staged is not None and self._weights.fits(staged)
        mine = staged.contents.row.commit if staged is not None and is_mine else _NONE
        with self._join() as comm:
            parts = [bytes(part) for part in comm.all_gather(mine + self._wanted)]
        self._hear(parts[0][16:])
        if staged is not None and mine != _NONE and all(part[:16] == mine for part in parts):
            self._staged = None
            self._apply(staged)
            if self._wanted == mine:
                self._wanted = _NONE


class _Gate:
    """Lets many threads in at once, or one alone; who wants to be alone has the next turn."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = threading.local()
        self._count = 0
        self._is_taken = False

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in."""
        return getattr(self._inside, "depth", 0) > 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Be in, with others."""
        depth = getattr(self._inside, "depth", 0)
        if not depth:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_taken)
                self._count += 1
        self._inside.depth = depth + 1
        try:
            yield
        finally:
            self._inside.depth = depth
            if not depth:
                with self._changed:
                    self._count -= 1
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be in alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_taken)
            self._is_taken = True
            self._changed.wait_for(lambda: not self._count)
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()
