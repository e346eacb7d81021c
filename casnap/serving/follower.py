"""Follow a store in the process that serves: live tensors are patched between two forwards.

A thread reads, verifies and stages a version in the background. The version is copied into the
tensors while no forward runs. Ranks that hold slices of one model agree on each version before they
copy it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from casnap.backends import Backend
from casnap.errors import CasnapError, SnapshotNotFoundError
from casnap.ranks.comm import Comm, SingleProcess
from casnap.ranks.joining import join
from casnap.restore.patching import LivePatch, LiveWeights
from casnap.runtime.backoff import Backoff
from casnap.runtime.fork import in_child, new_lock
from casnap.runtime.nesting import is_within_call
from casnap.runtime.units import Duration, Size, seconds_of
from casnap.serving.callback import call_plain, check_plain
from casnap.serving.gate import Gate, Stopped
from casnap.serving.handshake import Handshake
from casnap.serving.options import FollowerOptions, PullOptions
from casnap.serving.pull import Source, Wanted
from casnap.storage import Contents, Location, open_at

_NONE = bytes(16)
_PATIENCE = 60.0
# How many seconds the exit of the process waits for a thread.
_EXIT_PATIENCE = 10.0
# How many seconds the end of a follower waits for its note to be deleted.
_GOODBYE = 5.0
# The followers whose threads were started.
_followers: WeakSet[Follower] = WeakSet()


@atexit.register
def _stop_all() -> None:
    # The interpreter ends daemon threads wherever they are. Within torch that aborts the process.
    for follower in list(_followers):
        follower._stop(_EXIT_PATIENCE)


class AppliedVersion(NamedTuple):
    """The version that live tensors hold, and how much was copied and received for it.

    Attributes:
        name: The full name of the snapshot.
        commit: Its commit id.
        copied_bytes: How many bytes were copied into the tensors.
        copy_seconds: How long the copy took. No forward could begin meanwhile.
        received_bytes: How many bytes this rank received from the store, as stored: deltas are
            smaller than what they change.
    """

    name: str
    commit: str
    copied_bytes: int
    copy_seconds: float
    received_bytes: int = 0


class Follower:
    """Keeps the tensors of a module, or of a state dict, at the newest version, in place.

    The constructor reads the first version whole; later, only chunks that change are read. Run each
    forward in ``with follower.applied():``, in a coroutine ``async with
    follower.async_applied():``. A forward then sees one version from its beginning to its end. If
    looking for a version fails, this is logged and tried again; the tensors stay as they are until
    then.

    With ``torch.distributed``, all ranks of ``pg`` make a follower together, each with its slices
    (DTensors) of one model, and all enter :meth:`applied` equally often, each from one thread. They
    agree there, so that all ranks apply a version before the same forward, or none does.

    Args:
        uri: The store, or a folder in it: then only the snapshots below that folder count.
        target: The module or state dict. It has all tensors already, in the right shapes.
        options: Which snapshots are followed, and how: a :class:`FollowerOptions`.
        interval: How often a thread looks for another version: seconds, or such as ``"30s"``. With
            None there is no thread, and :meth:`update` looks.
        on_version: Called with an :class:`AppliedVersion` after each version but the first, before
            the next forward begins, so that it can drop caches that the old weights filled. It may
            run forwards itself; other threads' forwards wait until it has returned. If it fails,
            the error is logged, forwards go on, and it is called again, on all ranks. It is a plain
            function, no coroutine function.
        storage_options: How to reach a remote store.
        cache_bytes: As for :class:`casnap.Store`.
        pg: The process group; by default the world, or this process alone.

    Attributes:
        version: The version that the tensors hold.

    Raises:
        SnapshotNotFoundError: There is no such snapshot yet.
        MismatchError: The tensors and the snapshot differ; nothing was written.
        StoreError: The store cannot be used.
        TypeError: ``on_version`` is a coroutine function.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | Backend,
        target: torch.nn.Module | MutableMapping[str, Any],
        *,
        options: FollowerOptions | None = None,
        interval: Duration | None = 5.0,
        on_version: Callable[[AppliedVersion], object] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        cache_bytes: Size | None = None,
        pg: Any = None,
    ) -> None:
        options = FollowerOptions() if options is None else options
        if not isinstance(options, FollowerOptions):
            raise TypeError(f"options= is a FollowerOptions; got {options!r:.80}")
        timeout = options.timeout
        check_plain(on_version)
        place = Location.of_store(uri, storage_options, may_take=False)
        self._weights = LiveWeights(target, options.path, options.rename, strict=options.strict)
        self._options = PullOptions(tag=options.tag, match=options.match)
        self._interval = None if interval is None else seconds_of("interval", interval)
        self._every = options.every
        self._on_version = on_version
        self._join: Callable[[], Comm] = partial(
            join, pg, timeout, f"the update of {place.backend.uri}"
        )
        self._gate = Gate()
        self._timeout = _PATIENCE if timeout is None else timeout
        self._forwards = 0
        self._seen_root = b""
        # Only with several ranks: the commit that rank 0 wants all ranks to stage.
        self._wanted, self._wanted_since = _NONE, 0.0
        self._staged: LivePatch | None = None
        self._received = 0
        self._looking = new_lock()
        self._looker: int | None = None
        self._is_mixed = False
        self._looks = Backoff(f"following {place.backend.uri}")
        self._calls = Backoff(f"on_version, for {place.backend.uri},")
        with self._join() as comm:
            store, _ = open_at(place, create=False, cache_bytes=cache_bytes)
            self._source = Source(store, place.name)
            self._is_alone, self._leads = isinstance(comm, SingleProcess), comm.rank == 0
            self._handshake: Handshake | None = None
            if options.notes and self._leads:
                self._handshake = Handshake(store, options.tag, place.name)
            # The versions that may be applied, by commit; rank 0 alone knows them.
            self._numbered: dict[bytes, Wanted] = {}
            self._applied_commit = _NONE
            newest = self._newest() if self._leads else None
            commit = bytes(comm.broadcast(newest.row.commit if newest is not None else b""))
            patch = self._stage(newest or self._contents_of(commit))
            comm.all_gather(b"")  # returns once all ranks have staged the version
            self._copy(patch)
        # The last version for which on_version has succeeded.
        self._called: AppliedVersion | None = self.version
        self._starting = new_lock()
        self._thread = self._new_thread()
        if self._interval is not None:
            self._start_thread()
        in_child(self._begin_anew)

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._follow, name="casnap-follower", daemon=True)

    def _start_thread(self) -> None:
        with self._starting:
            if self._thread.ident is None and not self._gate.is_stopped:
                _followers.add(self)
                self._thread.start()
                if self._handshake is not None:
                    self._handshake.wake()

    def _begin_anew(self) -> None:
        """In a forked child, begin with a new gate and no thread. A forward starts the thread."""
        is_stopped = self._gate.is_stopped
        self._gate, self._looker = Gate(), None
        self._thread = self._new_thread()
        if is_stopped:
            self._gate.stop()

    # --- in the threads that serve ---

    @contextmanager
    def applied(self) -> Iterator[AppliedVersion]:
        """Run a forward with one version of all tensors; yield that version.

        Many threads may be inside at once, unless there are several ranks. A new version is copied
        once all forwards have left. A forward that begins meanwhile waits for the copy, unless its
        thread or its caller is inside already. A coroutine uses :meth:`async_applied`: here its
        wait would block the thread's other coroutines, which have to leave first.

        Raises:
            CasnapError: Copying a version has failed half way, so the tensors hold a mix of two.
            RankError: Another rank failed, died or did not answer in time.
        """
        self._begin_forward()
        with self._gate.shared():
            yield self._whole_version()

    @asynccontextmanager
    async def async_applied(self) -> AsyncIterator[AppliedVersion]:
        """Do as :meth:`applied`, but in a coroutine of asyncio: others run while this one waits.

        Raises:
            CasnapError: As for :meth:`applied`.
            RankError: As for :meth:`applied`.
        """
        self._begin_forward()
        async with self._gate.shared_async():
            yield self._whole_version()

    def _begin_forward(self) -> None:
        if self._interval is not None and self._thread.ident is None:
            self._start_thread()
        if not self._is_alone and not self._gate.is_inside:
            self._forwards += 1
            if self._forwards % self._every == 0:
                self._agree()

    def _whole_version(self) -> AppliedVersion:
        if self._is_mixed:
            raise CasnapError(
                "the copy of a version has failed half way, so the tensors hold a mix of two; "
                "load them anew, and make another Follower"
            ) from self._looks.error
        return self.version

    def update(self) -> bool:
        """Look for another version now, and apply it; return whether there was one.

        All ranks call this together.

        Raises:
            CasnapError: The update failed, and the tensors hold the version before. Or the caller
                is within :meth:`applied`, ``on_version`` or another call of this method.
        """
        if self._gate.is_inside or self._looker == threading.get_ident():
            raise CasnapError(
                "update() waits for all forwards, so call it outside of applied(), and neither in "
                "on_version nor in a signal handler that comes within update()"
            )
        commit, thread = self.version.commit, threading.get_ident()
        with self._looking:
            # Set first, before any other call: a signal handler that runs after such a call would
            # wait for its own thread.
            self._looker = thread
            try:
                if self._is_alone:
                    self._call_again()
                    self._look()
                else:
                    with self._join() as comm:
                        self._look(patience=0)
                        self._hear(bytes(comm.broadcast(self._wanted)))
                        self._stage_wanted()
                    self._agree()
            finally:
                self._looker = None
        return self.version.commit != commit

    def stop(self) -> None:
        """Stop looking for versions. The tensors stay as they are.

        A signal handler may call this at any time. If the signal has interrupted another call of
        casnap, this method asks the follower's thread to end, and does not wait for its end.
        """
        self._stop(None, waits=not is_within_call())

    def _stop(self, patience: float | None, *, waits: bool = True) -> None:
        self._gate.stop()
        thread = self._thread
        if waits and thread.is_alive() and thread is not threading.current_thread():
            thread.join(patience)
        if self._handshake is not None:
            self._handshake.close(_GOODBYE if waits else 0)

    @property
    def error(self) -> BaseException | None:
        """The error of the last look, or of the last ``on_version``; None if both worked."""
        return self._looks.error or self._calls.error

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
        while not self._gate.sleep(self._pause()):
            # A thread that serves is copying a version just now, or its copy has failed half way.
            if self._is_mixed:
                continue
            # If update() holds it, do not wait long: the signal handler that stops this thread may
            # have interrupted that update().
            if not self._looking.acquire(timeout=0.1):
                continue
            try:
                if self._is_alone and not self._calls.delay:
                    self._call_again()
                if not self._looks.delay:
                    self._look()
                    if not self._is_alone:
                        self._stage_wanted()
            except Stopped:
                return
            except BaseException as e:  # noqa: BLE001 - whatever it is, it is tried again
                self._looks.note_failure(e)
            else:
                self._looks.note_success()
            finally:
                self._looking.release()

    def _pause(self) -> float:
        seconds = max(self._interval or 0.0, self._looks.delay)
        calls_again = self._is_alone and self._calls.error is not None
        return min(seconds, self._calls.delay) if calls_again else seconds

    def _look(self, patience: float = _PATIENCE) -> None:
        """Look for another version. One process applies it at once; many ranks begin to stage it.

        Args:
            patience: For how many seconds the ranks may go on staging one version although a newer
                one is there.
        """
        root = self._source.store.newest().commit if self._leads else self._seen_root
        if root == self._seen_root:
            return
        contents = self._newest()
        commit = contents.row.commit
        if commit.hex() == self.version.commit:
            # A version that was wanted or staged since may have been withdrawn.
            self._wanted, self._staged = _NONE, None
            self._note(Handshake.serving, commit)
        elif not self._is_alone:
            if self._is_withdrawn(contents):
                # No rank may apply it any more. The other ranks hear so at their next forward.
                self._wanted, self._staged = _NONE, None
            # If each newer version were wanted at once, the ranks might never apply any.
            waited = time.monotonic() - self._wanted_since
            if waited >= patience or self._wanted == _NONE:
                self._wanted, self._wanted_since = commit, time.monotonic()
            return
        else:
            patch = self._stage(contents)
            if self._source.has_withdrawn(contents, self._options):
                return  # the next look finds the version that is meant now
            # Stage again if other code has written to the tensors between staging and applying.
            while not self._apply(patch):
                patch = self._stage(contents)
        self._seen_root = root

    def _newest(self) -> Contents:
        """Return the newest snapshot that the options select, and remember its root's number."""
        try:
            wanted = self._source.newest(self._options)
        except SnapshotNotFoundError:
            # The version that was wanted or staged was withdrawn.
            self._wanted, self._staged = _NONE, None
            raise
        kept = (self._wanted, self._applied_commit)
        self._numbered = {c: each for c, each in self._numbered.items() if c in kept}
        self._numbered[wanted.contents.row.commit] = wanted
        return wanted.contents

    def _note(self, phase: Callable[[Handshake, int], None], commit: bytes) -> None:
        """Note in the store that this follower has brought a version to a phase, such as staged.

        Args:
            phase: The method that notes the phase.
            commit: The commit id.
        """
        wanted = self._numbered.get(commit)
        if self._handshake is not None and wanted is not None:
            name = wanted.contents.name
            self._handshake.fetched(wanted.number, name, commit.hex(), wanted.published_time)
            phase(self._handshake, wanted.number)

    def _stage(self, contents: Contents) -> LivePatch:
        """Return the patch that brings the tensors to a snapshot, read and verified.

        If it is not staged yet, this stages it.
        """
        staged = self._staged
        is_staged = staged is not None and staged.contents.row.commit == contents.row.commit
        if staged is None or not is_staged or not self._weights.fits(staged):
            backend = self._source.store.backend
            received = backend.received_bytes
            with contents.reading():
                staged = self._weights.stage(contents)
            self._received = backend.received_bytes - received
            self._note(Handshake.staged, contents.row.commit)
        self._staged = staged
        return staged

    def _apply(self, patch: LivePatch) -> bool:
        """Copy a staged patch into the tensors once no forward runs, then call ``on_version``.

        Returns:
            Whether the patch fitted the tensors. If not, nothing was copied.
        """
        with self._between_forwards():
            if not self._weights.fits(patch):
                return False
            self._copy(patch)
            self._call()
        return True

    def _between_forwards(self) -> AbstractContextManager[None]:
        if not self._is_alone:
            return self._gate.alone()
        in_thread = threading.current_thread() is self._thread
        return self._gate.alone(self._timeout, unless_stopped=in_thread)

    def _copy(self, patch: LivePatch) -> None:
        start = time.monotonic()
        self._note(Handshake.paused, patch.contents.row.commit)
        # True until the copy is done: the copy may fail, or a signal handler may interrupt it.
        self._is_mixed = True
        self._weights.apply(patch)
        seconds = time.monotonic() - start
        commit = patch.contents.row.commit.hex()
        self.version = AppliedVersion(
            patch.contents.name, commit, patch.nbytes, seconds, self._received
        )
        self._staged, self._is_mixed = None, False
        self._applied_commit = patch.contents.row.commit
        self._note(Handshake.serving, self._applied_commit)

    def _call_again(self) -> None:
        if self._called is not self.version:
            try:
                with self._between_forwards():
                    self._call()
            except CasnapError as e:
                self._calls.note_failure(e)

    def _call(self) -> None:
        """Call ``on_version`` for the applied version, which stays applied if the call fails."""
        version = self.version
        try:
            if self._on_version is not None:
                call_plain(self._on_version, version)
        except BaseException as e:
            # on_version is called again, whatever the error is.
            self._calls.note_failure(e)
            if not isinstance(e, Exception) and threading.current_thread() is not self._thread:
                raise
        else:
            self._called = version
            self._calls.note_success()

    # --- several ranks ---

    def _is_withdrawn(self, newest: Contents) -> bool:
        """Whether the version that all ranks are to stage was deleted, or is newer than ``newest``.

        Args:
            newest: The newest snapshot that the options select.
        """
        wanted = self._numbered.get(self._wanted)
        if wanted is None or newest.row.seq < wanted.contents.row.seq:
            return True
        try:
            self._contents_of(self._wanted)
        except SnapshotNotFoundError:
            return True
        return False

    def _contents_of(self, commit: bytes) -> Contents:
        """Return the snapshot with a commit id that rank 0 has chosen.

        Raises:
            SnapshotNotFoundError: This rank does not find the snapshot in the store.
        """
        store = self._source.store
        rows = store.read_at_newest(
            lambda root: list(store.table(root).items_in(self._source.name))
        )
        for name, row in rows:
            if row.commit == commit:
                return Contents(store, name, row)
        raise SnapshotNotFoundError(
            f"{store.backend.uri}: the snapshot of commit {commit.hex()}, which rank 0 has chosen, "
            "was deleted, or is not there where this rank looks"
        )

    def _hear(self, wanted: bytes) -> None:
        """Remember the commit that rank 0 wants all ranks to stage. Rank 0 knows it already."""
        if not self._leads:
            self._wanted = wanted

    def _stage_wanted(self) -> None:
        wanted = self._wanted
        if wanted != _NONE and wanted.hex() != self.version.commit:
            self._stage(self._contents_of(wanted))

    def _agree(self) -> None:
        """Apply the staged version if all ranks have staged it; learn which one to stage next."""
        staged = self._staged
        is_mine = staged is not None and self._weights.fits(staged)
        mine = staged.contents.row.commit if staged is not None and is_mine else _NONE
        calls_again = self._called is not self.version and not self._calls.delay
        with self._join() as comm:
            told = mine + self._wanted + bytes([calls_again])
            parts = [bytes(part) for part in comm.all_gather(told)]
        self._hear(parts[0][16:32])
        if staged is not None and mine != _NONE and all(part[:16] == mine for part in parts):
            while not self._apply(staged):
                staged = self._stage(staged.contents)
            if self._wanted == mine:
                self._wanted = _NONE
        elif any(part[32] for part in parts):
            # Call it on all ranks: on_version may run collectives.
            self._called = None
            self._call_again()
