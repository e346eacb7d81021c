"""A store: many snapshots at one URI, which share their chunks.

This module imports ``snapshot.py``, ``latest.py``, ``view.py`` and lower layers.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from casnap.backends import Backend
from casnap.errors import MirrorError, SnapshotNotFoundError
from casnap.format.names import check_name, name_text
from casnap.format.records import DEFAULT_CHUNK_SIZE
from casnap.runtime.environment import given_path, local_path
from casnap.runtime.fork import cached_property
from casnap.runtime.lazy_imports import ModuleLater
from casnap.runtime.nesting import refuse_nested_take
from casnap.runtime.progress import ProgressOption, callback_of
from casnap.runtime.units import (
    Duration,
    Size,
    bytes_if_given,
    count_if_given,
    seconds_if_given,
    seconds_of,
)
from casnap.snapshot import (
    Snapshot,
    TakePlace,
    begin_snapshot,
    take_from,
    take_snapshot,
    try_snapshot,
    try_to_begin,
    witness_state,
)
from casnap.state.stateful import AppState
from casnap.take.options import TakeOptions, check_order
from casnap.view import View

if TYPE_CHECKING:
    import casnap
    from casnap import serving
    from casnap.serving.pull import Source
    from casnap.storage import Contents
else:
    casnap, serving = ModuleLater("casnap"), ModuleLater("casnap.serving")

_log = logging.getLogger("casnap")


@dataclass(frozen=True, kw_only=True)
class NewStore:
    """The properties of a store that :class:`Store` makes if there is none.

    Args:
        chunk_size: A power of two from 64 KiB to 64 MiB, such as ``"4MiB"``. It cannot be changed.
        codec: How chunks are stored. With "auto", the default, takes store them uncompressed; on a
            disk, :meth:`Store.gc` turns older chunks into deltas; mirrors, and copies into a
            bucket, get deltas. With "zstd", takes compress, and :meth:`Store.gc` and copies make
            deltas in any store. With "raw", nothing is compressed. :meth:`Store.configure` changes
            the codec.

    Raises:
        ValueError: There is no such codec, or the chunk size is not allowed.
    """

    chunk_size: Size = DEFAULT_CHUNK_SIZE
    codec: str | None = None

    def __post_init__(self) -> None:
        from casnap.storage import chunk_size_of, new_settings

        object.__setattr__(self, "chunk_size", chunk_size_of(self.chunk_size))
        new_settings(self.codec)


class Store:
    """Many snapshots at one place. Each chunk is stored once.

    Args:
        uri: A folder, ``s3://bucket/run1``, ``gs://bucket/run1``, another URI of fsspec's,
            ``memory://name``, or a :class:`casnap.backends.Backend`. A folder below an existing
            store opens a view of that store, and so does ``s3://bucket/ckpts//run1``. The full
            names of all snapshots in the view begin with the rest of the path.
        create: If there is no store, make one with the first take, import or copy to it, or with
            :meth:`make`; a :class:`NewStore` gives its properties. Reading makes no store: if there
            is none, there are no snapshots. With ``mirror``, the store is made at once.
            ``Snapshot.take`` of a path below finds the store only once it is made: first call
            :meth:`make`, or pass ``store=``.
        storage_options: How to reach a remote store: the arguments of s3fs, gcsfs or another file
            system of fsspec, such as ``{"endpoint_url": ...}``. casnap neither stores nor shows
            them.
        exclusive: You promise that no other process writes to this store. casnap asks for this only
            if the server cannot keep two writers apart (no put-if-absent).
        markers: Put ``<name>/casnap-snapshot.json`` for each snapshot, so that ``ls``,
            ``os.path.exists`` and ``fsspec`` see the snapshot; remove it with the snapshot. In a
            remote store, each marker is one request.
        mirror: The path or URI of another store that gets each snapshot, in the background. It is
            made if there is none. A mirror that fails neither fails a take nor makes it wait. A
            :class:`MirrorOptions` also chooses the snapshots that it gets and keeps, and how to
            reach it. See ``docs/object-stores.md``.
        cache_bytes: For a remote store: keep chunks that were read on a disk of this host, so that
            they are fetched once. This is the most bytes for all stores together, such as
            ``"50GB"``; 0: no cache. The default is ``CASNAP_CACHE_BYTES`` of the environment;
            without it there is no cache.
        threads: How many threads of each step of a take may run, unless the take has its own
            ``threads=``; see :meth:`take`. The default is ``CASNAP_THREADS`` of the environment.
        environment: Whether takes note what they were made with: versions, settings of torch, the
            git commit of the script; see :attr:`Snapshot.environment`.
        health: True, or a :class:`HealthOptions`: takes measure the floating-point tensors. They
            count NaN and infinite elements, compute norms, and note both: see
            :meth:`Snapshot.health`. If a tensor is unhealthy, a warning names it. The default is
            ``CASNAP_HEALTH`` of the environment: "warn", "raise", or "off", as without it.

    Raises:
        NotAStoreError: There is no store, and ``create`` is False.
        UnsupportedFormatError: A newer casnap made the store.
        StoreError: A store cannot be made or reached at this place; or the folder of the cache
            belongs to another user, or is on a network file system.
        ValueError: ``storage_options`` or ``cache_bytes`` were given for a store on this machine.
        MirrorError: The mirror is the wrong store, or the store has another mirror.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | Backend,
        *,
        create: bool | NewStore = True,
        storage_options: Mapping[str, Any] | None = None,
        exclusive: bool = False,
        markers: bool = True,
        mirror: str | os.PathLike[str] | Backend | casnap.MirrorOptions | None = None,
        cache_bytes: Size | None = None,
        threads: int | None = None,
        environment: bool = True,
        health: bool | casnap.HealthOptions | None = None,
    ) -> None:
        from casnap.storage import new_settings

        if not isinstance(create, bool | NewStore):
            raise TypeError(f"create is a bool or a NewStore; got {create!r:.80}")
        new = create if isinstance(create, NewStore) else NewStore()
        self._view = View.at(
            uri,
            create=bool(create),
            storage_options=storage_options,
            threads=count_if_given("threads", threads),
            environment=bool(environment),
            health=health,
            mirror_options=_mirror_options(mirror),
            chunk_size=new.chunk_size,
            settings=new_settings(new.codec),
            exclusive=exclusive,
            cache_bytes=bytes_if_given("cache_bytes", cache_bytes, least=0),
            markers=markers,
        )

    @classmethod
    def _of(cls, view: View) -> Store:
        """Return the store of a view, for casnap's own modules."""
        store = cls.__new__(cls)
        store._view = view
        return store

    def make(self) -> Store:
        """Make the store now, if there is none; return this object.

        A take makes the store by itself. A run that calls this at its start learns at once if no
        store can be made at its place.

        Raises:
            StoreError: A store cannot be made at this place, or the path leads to a store of
                another user.
        """
        self._view.make()
        return self

    def whole(self) -> Store:
        """Return the whole store that this is a view of."""
        return Store._of(self._view.whole()) if self.prefix else self

    # --- properties ---

    @property
    def uri(self) -> str:
        """The URI of the store, and the prefix of this view."""
        return self._view.uri

    @property
    def prefix(self) -> str:
        """The prefix of the full names of all snapshots in this view; empty for a whole store."""
        return self._view.prefix

    @property
    def id(self) -> str:
        """The id of the store: 32 hex digits. No two stores have the same id."""
        return self._view.repository.config.store_id

    @property
    def chunk_size(self) -> int:
        """The size of the largest chunks, in bytes."""
        return self._view.repository.config.chunk_size

    @property
    def requests(self) -> dict[str, int]:
        """How many requests this object has made, by kind; empty for a store on this machine."""
        return dict(self._view.place.backend.requests)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def path_of(self, name: str) -> str:
        """Return the path or URI of a snapshot."""
        return self._view.path_of(name)

    # --- snapshots ---

    def take(
        self,
        app_state: AppState,
        name: str,
        *,
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        progress: ProgressOption = None,
        retention: casnap.Retention | None = None,
        per_rank: Sequence[str] | None = None,
        threads: int | None = None,
        timeout: float | None = None,
    ) -> Snapshot:
        """Take a snapshot; return when it is durable.

        With ``torch.distributed``, all ranks call this together and take one snapshot. Each byte is
        stored once, however many ranks hold it. A value is *global* if it is sharded, declared as
        replicated, or equal on all ranks: it can be restored on any number of ranks. Every other
        value belongs to its rank.

        Args:
            app_state: Key → module, optimizer, :class:`StateDict`, generator, … ; the same keys on
                all ranks.
            name: The snapshot's name in this store.
            pg: The process group whose ranks take the snapshot together. By default this is the
                whole world, or this process alone.
            replicated: Globs (``*`` matches ``/`` too) of paths, such as ``model/**``, whose values
                are equal on all ranks, so that each rank hashes and writes only a part. Samples are
                compared first; values that differ are refused. The parameters of DDP modules need
                no glob.
            metadata: Anything that JSON can hold, up to 64 KiB, kept with the snapshot. NumPy's
                scalars, and tensors without a dimension, become plain numbers. Only the metadata of
                rank 0 count.
            overwrite: Replace a snapshot of this name, unless it has a tag.
            allow_pickle: Store values that have no safe encoding by pickle. To restore them,
                ``allow_pickle=True`` is needed again.
            progress: True shows bars, on a terminal or in a notebook. Or a function, called as
                ``progress(phase, done, total)``, in bytes, from any thread.
            retention: In the same commit, delete the snapshots of the same folder that these rules
                do not keep, but never this one. If the rules cannot be applied, a warning is
                logged.
            per_rank: Globs of paths whose values belong to their rank even if they are equal on all
                ranks: the state of a data loader, for example. :class:`RNGState` needs no glob.
            threads: The most threads of this process for each of three tasks: to hash, to copy, and
                to write to a disk. By default, one per core (up to eight) hashes, and up to three
                write.
            timeout: Seconds that a rank waits for another before all ranks raise; 600 by default.

        Raises:
            StateError: A value of the state cannot be taken, or the ranks contradict each other.
            SnapshotError: The name cannot be used.
            UnclearCommitError: It is not known whether the snapshot is stored, or whether it lasts.
                If you repeat the take, it replaces this snapshot.
            StoreError: Any other StoreError: the store cannot be used; nothing was committed.
            DeviceError: A device has computed a wrong digest; nothing was committed.
            RankError: Another rank failed, died or did not answer in time.
        """
        refuse_nested_take()
        options = TakeOptions(
            metadata=metadata,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            progress=callback_of(progress),
            retention=retention,
            replicated=replicated,
            per_rank=per_rank,
            threads=threads,
            timeout=timeout,
        )
        return take_snapshot(self._place_of("take", app_state, name), app_state, options, pg)

    def async_take(
        self,
        app_state: AppState,
        name: str,
        *,
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        progress: ProgressOption = None,
        retention: casnap.Retention | None = None,
        per_rank: Sequence[str] | None = None,
        threads: int | None = None,
        timeout: float | None = None,
        max_staging_bytes: Size | None = None,
        max_pending: int = 1,
    ) -> casnap.PendingSnapshot:
        """Take a snapshot of the state as it is now; return once you may change the state.

        The take goes on in the background. :meth:`PendingSnapshot.wait` waits for its end, and
        raises its error. An error is also logged at once. If no ``wait()`` has raised the error,
        the next take of the store raises it on all ranks, and takes nothing. The arguments are
        those of :meth:`take`, and two more.

        ``max_staging_bytes``, such as ``"20GB"``, bounds the memory for the copies of all pending
        takes together. casnap keeps this memory for later takes, and uses at least four blocks of
        64 MiB. If the states are larger, this call blocks until enough of them is stored.

        ``max_pending``, the same on all ranks, is how many takes may be pending, including this
        one. If more would be, this call blocks. Pending takes are stored and committed one after
        the other; if one fails, the others go on. If a pending take has the same name, this call
        does not refuse it, but :meth:`PendingSnapshot.wait` does.
        """
        refuse_nested_take()
        options = TakeOptions(
            metadata=metadata,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            progress=callback_of(progress),
            retention=retention,
            replicated=replicated,
            per_rank=per_rank,
            threads=threads,
            timeout=timeout,
            max_staging_bytes=max_staging_bytes,
            max_pending=max_pending,
        )
        return begin_snapshot(self._place_of("async_take", app_state, name), app_state, options, pg)

    def try_take(
        self,
        app_state: AppState,
        name: str,
        *,
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        progress: ProgressOption = None,
        retention: casnap.Retention | None = None,
        per_rank: Sequence[str] | None = None,
        threads: int | None = None,
        timeout: float | None = None,
    ) -> Snapshot | None:
        """Take a snapshot as :meth:`take` does; if the storage fails, warn, and return None.

        So a run goes on if the disk is full, the storage does not respond, stored bytes are
        damaged, a collector deleted chunks that the take needed, or a device computed a wrong
        digest. All ranks log the warning, and return None. Once a take of the run succeeds again,
        another warning says how many takes failed, and since when. Any other error is raised: a
        wrong state, name or store, a rank that died or hangs, Ctrl-C.

        This call does not raise the error of an earlier :meth:`async_take`. Either all ranks call
        this, or all call :meth:`take`. The arguments are those of :meth:`take`.
        """
        refuse_nested_take()
        options = TakeOptions(
            metadata=metadata,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            progress=callback_of(progress),
            retention=retention,
            replicated=replicated,
            per_rank=per_rank,
            threads=threads,
            timeout=timeout,
        )
        return try_snapshot(self._place_of("try_take", app_state, name), app_state, options, pg)

    def try_async_take(
        self,
        app_state: AppState,
        name: str,
        *,
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        progress: ProgressOption = None,
        retention: casnap.Retention | None = None,
        per_rank: Sequence[str] | None = None,
        threads: int | None = None,
        timeout: float | None = None,
        max_staging_bytes: Size | None = None,
        max_pending: int = 1,
    ) -> casnap.PendingTry:
        """Take a snapshot as :meth:`async_take` does, and tolerate faults as :meth:`try_take` does.

        If the storage fails, neither :meth:`PendingTry.wait` nor a later take raises that:
        ``wait()`` returns None, and :attr:`PendingTry.error` says why. The arguments are those of
        :meth:`async_take`.
        """
        refuse_nested_take()
        options = TakeOptions(
            metadata=metadata,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            progress=callback_of(progress),
            retention=retention,
            replicated=replicated,
            per_rank=per_rank,
            threads=threads,
            timeout=timeout,
            max_staging_bytes=max_staging_bytes,
            max_pending=max_pending,
        )
        return try_to_begin(
            self._place_of("try_async_take", app_state, name), app_state, options, pg
        )

    def witness(
        self,
        app_state: AppState,
        name: str,
        *,
        on_mismatch: Literal["raise", "warn"] = "raise",
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        per_rank: Sequence[str] | None = None,
        allow_pickle: bool = False,
        threads: int | None = None,
        timeout: float | None = None,
    ) -> casnap.WitnessReport:
        """Store the digests of a state; if they are stored already, compare the state with them.

        This proves that a resumed run computes the same as before. Call it at each step that
        follows a snapshot: a run that resumes from that snapshot comes to the same step, and
        compares. A replay of some steps also finds hardware that computes wrong without an error::

            store.witness(app_state, f"run1/step_{step}")

        A witness holds 16 bytes for each path of the state, and none of its chunks. It is not a
        snapshot: nothing lists it, counts it or resumes from it. It stays as long as the snapshot
        that was the last of its run when the witness was stored. A mirror gets it too. If this
        store lacks a witness, the mirror's is compared.

        All ranks call this together, as they call :meth:`take`; it costs about as much as a take
        that finds nothing new. It first waits for pending takes. The state of a different number of
        ranks is not compared, since its sums were added up in a different order.

        Args:
            app_state: As for :meth:`take`; the same keys each time.
            name: The name, such as that of a snapshot of this step.
            on_mismatch: "raise" raises an error if the state differs; "warn" logs it.
            pg: As for :meth:`take`.
            replicated: As for :meth:`take`.
            per_rank: As for :meth:`take`.
            allow_pickle: As for :meth:`take`.
            threads: As for :meth:`take`.
            timeout: As for :meth:`take`.

        Returns:
            Whether this call stored the witness; if it compared, which paths differ.

        Raises:
            WitnessError: The state differs, on any rank. All ranks raise it.
            StateError: A value of the state cannot be taken, or the ranks contradict each other.
            SnapshotError: The name cannot be used.
            StoreError: The store cannot be used.
            DamagedError: The witness is damaged.
            DeviceError: A device has computed a wrong digest.
            RankError: Another rank failed, died or did not answer in time.
            ValueError: ``on_mismatch`` has no such value.
        """
        refuse_nested_take()
        options = TakeOptions(
            allow_pickle=allow_pickle,
            replicated=replicated,
            per_rank=per_rank,
            threads=threads,
            timeout=timeout,
        )
        from casnap.latest import find_witness

        place = self._place_of("witness", app_state, name)
        return witness_state(place, app_state, options, pg, on_mismatch, find_witness)

    def _place_of(self, call: str, app_state: object, name: str) -> TakePlace:
        """Check two arguments of a take; return the :class:`TakePlace` of its snapshot.

        Args:
            call: The name of the call, for errors.
            app_state: The user's argument for the app state, of any type.
            name: The user's argument for the name.
        """
        check_order(f"store.{call}(app_state, name)", app_state, name)
        return TakePlace.of(self._view, self._view.local_name(name), self)

    def __getitem__(self, name: str) -> Snapshot:
        """Return a snapshot by name, from this store or else from its mirror.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
        """
        from casnap.latest import find_row

        return Snapshot.of(*find_row(self._view, name), store=self)

    def _ipython_key_completions_(self) -> list[str]:
        return [name for name, _ in self._view.rows(None)]

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str | os.PathLike):
            return False
        try:
            self._view.find(name_text(name))
        except SnapshotNotFoundError:
            return False
        return True

    def snapshots(self, prefix: str | None = None) -> list[Snapshot]:
        """Return all snapshots, or those below a prefix, in the order of their commits."""
        view = self._view
        return [Snapshot.of(view, *row, store=self) for row in view.rows(prefix)]

    def latest(
        self, prefix: str | None = None, *, thinned: bool = False, healthy: bool = False
    ) -> Snapshot | None:
        """Return the snapshot that was committed last, or None if there is no snapshot.

        This skips thinned snapshots, since no run can resume from them, and snapshots from which
        their run went back (:meth:`rewind`). If only such snapshots are left, that is an error.

        If there is no snapshot, but the folder has a checkpoint of another form, a warning says so.

        With a mirror, this compares the last snapshots of both sides. It returns the mirror's if
        another store has continued the run there. It returns this store's if this store has the
        mirror's too, or has itself continued the run. If the two belong to different runs, the
        later take wins, by the times that the takes noted. If the mirror cannot be reached, this
        store's last snapshot is returned, with a warning.

        Args:
            prefix: Look only below this folder.
            thinned: Return a thinned snapshot too, for its weights.
            healthy: Pass over snapshots in which the take has found NaN or infinite elements, with
                a warning that names them; see :attr:`Snapshot.unhealthy`. A snapshot whose take did
                not measure counts as healthy. If the run is to go on from the returned snapshot,
                and to use the names of the later ones again, :meth:`rewind` to it.

        Raises:
            StoreError: This store has no snapshot, and its mirror cannot be reached.
            SnapshotError: All snapshots were thinned, or their runs went back from them; or, with
                ``healthy``, all others are unhealthy.
        """
        from casnap.latest import newest_row

        found = newest_row(self._view, prefix, thinned=thinned, healthy=healthy)
        return None if found is None else Snapshot.of(*found, store=self)

    def rewind(self, name: str) -> Snapshot:
        """Make a run go back to an earlier snapshot; return that snapshot, to restore it and go on.

        One commit moves aside the snapshots of the same folder that were committed after it:
        ``step_200`` is called ``rewound-57/step_200`` from then on, where 57 is the number of that
        commit. So :meth:`latest` returns the snapshot of this name, and the names are free for new
        takes. A snapshot that was moved aside keeps its bytes, commit id and tags. A retention
        deletes it as the oldest of its run. To go on from it after all, call this with its new
        name. A mirror goes back too.

        This waits for pending takes of this process, and moves their snapshots aside too. First end
        other processes that write this run: snapshots that they commit later would belong to the
        run. With many ranks, either rank 0 alone or all ranks call this.

        Args:
            name: The snapshot's name.

        Raises:
            SnapshotNotFoundError: This store has no snapshot of this name. To go back at its
                mirror, open the mirror as a store.
            SnapshotExistsError: A new name is taken.
            SnapshotError: The snapshot is thinned, so no run can resume from it. The error names
                the newest whole snapshot before it.
        """
        from casnap.mirror.notes import notes_of_renamed
        from casnap.storage import Runs
        from casnap.take.pending import wait_for_last

        wait_for_last()
        view = self._view
        full, _ = view.find(name)
        notes = partial(notes_of_renamed, uri=view.repository.backend.uri)
        rewound = Runs(view.repository).rewind(full, notes)
        if rewound.moved:
            view.hooks.on_commit()
            _log.info(
                "%s: %d snapshots that are later than %s are moved aside: %.500s",
                self.uri,
                len(rewound.moved),
                rewound.name,
                ", ".join(rewound.moved.values()),
            )
        return Snapshot.of(view, view.local_of(rewound.name), rewound.row, store=self)

    @property
    def mirror(self) -> casnap.Mirror | None:
        """The mirror, with its ``status()`` and ``stop()``; None if there is none."""
        return self._view.mirror

    def wait_mirrored(self, timeout: float | None = None) -> None:
        """Wait until the mirror holds all snapshots that were committed, or are being stored.

        If the mirror follows a tag, wait until the tag is published at the mirror on the same
        snapshot as here, or on a later one.

        Any process that has the store open can wait, not only the one that copies.

        Args:
            timeout: How many seconds to wait at most; None: as long as it takes.

        Raises:
            MirrorError: The time is over, or some snapshots cannot be mirrored. The error names
                them and the cause.
        """
        from casnap.take.pending import wait_for_last

        timeout = seconds_if_given("timeout", timeout)
        mirror = self.mirror
        if mirror is None:
            raise MirrorError(f"{self.uri} was opened without mirror=")
        until = None if timeout is None else time.monotonic() + timeout
        if not wait_for_last(timeout):
            raise MirrorError(f"{self.uri}: a take is still pending after {timeout:g} s")
        seconds = None if until is None else max(0.0, until - time.monotonic())
        mirror.wait(seconds, timeout)

    def delete(self, name: str, *, commit_id: str | None = None) -> None:
        """Delete a snapshot, tagged or not.

        A collection in the background frees its bytes: on a disk soon, in a bucket after the grace.

        Args:
            name: The snapshot's name.
            commit_id: Delete the snapshot only if it has this commit id.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name and commit id.
        """
        from casnap.storage import Runs

        view = self._view
        full, row = view.find(name)
        commit = row.commit.hex() if commit_id is None else commit_id
        Runs(view.repository).forget(full, commit)
        view.free_later([row])

    def tag(self, name: str, *tags: str) -> None:
        """Give a snapshot tags. A snapshot with a tag is neither pruned nor overwritten.

        Args:
            name: The snapshot's name.
            tags: The tags: 1 to 100 characters each, without white space, and not beginning with
                ``-`` or ``#``.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
            InvalidNameError: A tag is not valid.
            SnapshotError: The snapshot would have more than 100 tags; or a tag is published on
                another snapshot.
        """
        from casnap.storage import Tags

        full, row = self._view.find(name)
        Tags(self._view.repository).add(full, row.commit.hex(), tags)

    def untag(self, name: str, *tags: str) -> None:
        """Remove tags from a snapshot. A tag that it does not have is ignored.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
        """
        from casnap.storage import Tags

        full, row = self._view.find(name)
        Tags(self._view.repository).remove(full, row.commit.hex(), tags)

    def publish(self, tag: str, snapshot: str | Snapshot) -> casnap.TagMove:
        """Move a tag to a snapshot, from any other snapshot that has it, in one commit.

        From then on the tag is *published*: only one snapshot of the whole store has it, and
        :meth:`tag` gives it to no other. A follower of the tag sees either the old snapshot or the
        new one. To have such a tag for each run, use names like ``run1/stable``. The tag no longer
        protects the old snapshot: if you may want to move back, give the old snapshot a second tag.

        Args:
            tag: As for :meth:`tag`.
            snapshot: The snapshot, or its name.

        Returns:
            The move. Its ``root`` is the number of this publish, for which :meth:`wait_served`
            waits. If the snapshot has the tag already, the number stays, and a mirror that follows
            the tag publishes it once more at the mirror.

        Raises:
            SnapshotNotFoundError: There is no such snapshot.
            InvalidNameError: The tag is not valid.
            SnapshotError: The snapshot has 100 tags, or the store has 100 published tags.
        """
        from casnap.comparing.standstill import look_at_neighbors
        from casnap.mirror.notes import lacking_again
        from casnap.storage import Tags

        view = self._view
        if isinstance(snapshot, Snapshot):
            full, commit_id = view.full_of(snapshot.name), snapshot.commit_id
        else:
            full, row = view.find(snapshot)
            commit_id = row.commit.hex()
        again = partial(lacking_again, tag=tag)
        move = Tags(view.repository).publish(tag, full, commit_id, again=again)
        view.hooks.on_commit()
        look_at_neighbors(view.repository, full, commit_id)
        return move

    def tagged(self, tag: str) -> Snapshot:
        """Return the snapshot that has a tag. A published tag is found by one look-up.

        Raises:
            SnapshotNotFoundError: No snapshot of this store or view has the tag.
            SnapshotError: Several snapshots have the tag, which was never published.
        """
        view = self._view
        name, row = view.tagged(tag)
        return Snapshot.of(view, view.local_of(name), row, store=self)

    def tag_moves(self, tag: str, limit: int | None = None) -> list[casnap.TagMove]:
        """Return the moves of a published tag, the newest first.

        Args:
            tag: The tag.
            limit: How many moves to return at most. Each is read from a root of its own.
        """
        from casnap.storage import Tags

        return list(islice(Tags(self._view.repository).moves(tag), limit))

    @cached_property
    def _watch(self) -> serving.handshake.FollowerWatch:
        from casnap.serving.handshake import FollowerWatch

        return FollowerWatch(self._view.repository)

    def followers(self, tag: str | None = None) -> list[serving.handshake.FollowerState]:
        """Return the followers of this store, with the version that each has staged and serves.

        The versions are those of their last notes in the whole store. A call makes one request, and
        one more for each note that has changed since this object's last call.

        Args:
            tag: Return only followers of this tag; by default all.
        """
        return [f for f in self._watch.look() if tag is None or f.tag == tag]

    def wait_served(
        self,
        tag: str,
        number: int | None = None,
        *,
        quorum: int | None = None,
        timeout: Duration | None = None,
    ) -> list[serving.handshake.FollowerState]:
        """Wait until followers serve the snapshot that a tag was published on, or a later one.

        Followers that may not write to the store are unknown here. A follower that died counts
        until its note has not changed for 90 seconds.

        Args:
            tag: The tag.
            number: The number of the publish, which is the ``root`` of the move that
                :meth:`publish` returns; by default the last one.
            quorum: How many followers must serve the snapshot; by default all that follow the tag,
                and at least one.
            timeout: How long to wait at most: seconds, or a text such as ``"5m"``; by default for
                ever.

        Returns:
            The followers that serve the snapshot.

        Raises:
            NotServedError: The time is over, and some followers do not serve the snapshot. The
                message names them, and what they serve.
            SnapshotNotFoundError: The tag was never published with this number; or its snapshot was
                deleted, or has lost the tag.
            StoreError: The store cannot be read.
        """
        from casnap.serving.handshake import wait_served

        return wait_served(
            self._view.repository,
            self._watch,
            tag,
            count_if_given("number", number),
            count_if_given("quorum", quorum),
            seconds_if_given("timeout", timeout),
        )

    def copy(
        self,
        name: str | None = None,
        *,
        to: Store | str | os.PathLike[str] | Backend,
        rename: str | None = None,
        dry_run: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        exclusive: bool = False,
        progress: ProgressOption = None,
    ) -> casnap.CopyReport:
        """Copy snapshots into another store. Only chunks that it lacks are sent.

        Snapshots keep their metadata, tags, times and commit ids. A snapshot that the other store
        has already, with the same name and commit id, is not copied again. After an interruption,
        repeat the call to resume the copy. Both stores may be used, and collected, meanwhile.

        Args:
            name: A snapshot, or a folder of them; None for all snapshots of this store or view.
            to: The other store. If there is none at a path or URI, it is made, with chunks of the
                same size as here.
            rename: The new name of the snapshot or the folder in the other store; for all
                snapshots, a folder that they go into.
            dry_run: Only report what would be sent.
            storage_options: How to reach ``to``, if that is the URI of a remote store.
            exclusive: You promise that no other process writes to that store.
            progress: True shows bars. Or a function, called as ``progress(phase, done, total)``, in
                bytes.

        Returns:
            The snapshots that were copied, how many bytes were sent, and how many were there
            already.

        Raises:
            SnapshotNotFoundError: There is no such snapshot; or it was deleted meanwhile.
            SnapshotExistsError: Another snapshot has a name in the other store. Nothing was sent.
            StoreError: ``to`` is the same store, or has chunks of another size; or one of the
                stores cannot be used.
            DamagedError: A chunk or node of this store cannot be read.
        """
        from casnap.storage import CommitHooks
        from casnap.transfer.copy import copy_snapshots
        from casnap.transfer.copy_jobs import CopyOptions
        from casnap.transfer.copy_selection import check_pair, choose

        inner = None if name is None else self._view.local_name(name)
        if isinstance(to, Store):
            if storage_options:
                raise ValueError(f"{to.uri} is open already; give storage_options to Store(...)")
        else:
            size = self.chunk_size
            new = NewStore(chunk_size=size)
            to = Store(to, create=new, storage_options=storage_options, exclusive=exclusive)
        new_name = None if rename is None else to._view.local_name(rename)
        # The read decides which root is the newest whole one.
        self._view.read(lambda _: None)
        source = self._view.readable
        selection = choose(source, self.prefix, inner, new_name)
        repository = to._view.look() if dry_run else to._view.make()
        if repository is not None:
            check_pair(source, repository)
            full_of = to._view.full_of
            selection = [c._replace(new_name=check_name(full_of(c.new_name))) for c in selection]
        is_folder = len(selection) > 1
        hooks = CommitHooks() if repository is None else to._view.hooks
        options = CopyOptions(dry_run=dry_run, skip_gone=is_folder, hooks=hooks)
        return copy_snapshots(source, repository, selection, options, callback_of(progress))

    # --- folders for inference ---

    def pull(
        self,
        folder: str | os.PathLike[str],
        name: str | None = None,
        *,
        options: serving.options.PullOptions | None = None,
        progress: ProgressOption = None,
    ) -> casnap.PullReport:
        """Bring a folder of safetensors to the newest snapshot, for engines.

        The folder is a link to one whole version, beside it in ``<folder>.versions``. Files that
        have not changed become hard links to the files of the previous version. Other files are
        written from the previous version's bytes and from new chunks. Every written byte is
        verified; then a rename replaces the link. See ``docs/guides/serving.md``.

        With ``in_place`` in the options, it is a real folder, and changes are written into its
        files. A process that reads these files meanwhile, or has mapped them, sees a mix. If such a
        pull is cut short, the folder is no whole version until the next pull.

        Args:
            folder: The folder. It must not exist yet, unless an earlier pull of the same kind made
                it.
            name: A snapshot, or a folder of them; None for all snapshots of this store or view.
            options: Which snapshot to pull, and how the folder looks:
                a :class:`casnap.serving.PullOptions`.
            progress: True shows bars. Or a function, called as ``progress(phase, done, total)``, in
                bytes.

        Returns:
            The version that is current now, and figures of the pull.

        Raises:
            SnapshotNotFoundError: There is no such snapshot; or it was deleted meanwhile.
            FileFormatError: Something else lies at the folder, it belongs to another user, or the
                snapshot holds no tensors.
            StorageFullError: The disk is full. The folder stays at the previous version; or the
                error says that a pull in place has left it mixed.
            BackendError: The folder cannot be written or looked at for another reason; it is left
                as after a full disk.
            UnavailableError: This process has no open files or no memory left. The folder stays at
                the previous version.
            FileNotFoundError: The parent of the folder does not exist.
            CasnapError: Another process pulls into this folder.
            DamagedError: Stored bytes are missing or damaged.
        """
        from casnap import serving
        from casnap.serving.pull import pull

        out = Path(local_path(folder))
        return pull(
            self._pull_source(name),
            out,
            options or serving.options.PullOptions(),
            callback_of(progress),
        )

    def follow(
        self,
        folder: str | os.PathLike[str],
        name: str | None = None,
        *,
        options: serving.options.PullOptions | None = None,
        interval: Duration = 5.0,
        on_version: Callable[[Path, list[str]], object] | None = None,
        progress: ProgressOption = None,
        notes: bool = True,
    ) -> Iterator[casnap.FollowEvent]:
        """Pull each new version soon after its commit, for ever; yield what happens.

        If several versions were missed, one pull brings the newest. After a failure, which is
        logged, the pull is tried again.

        Args:
            folder: As for :meth:`pull`.
            name: As for :meth:`pull`.
            options: As for :meth:`pull`.
            interval: How long to wait between two looks: seconds, or a text such as ``"30s"``.
            on_version: Called after each switch with the real path of the version's folder, and the
                names of the tensors that have changed since the last call. If it raises an error,
                it is called again later, for the version that is current then.
            progress: As for :meth:`pull`.
            notes: Whether to note in the store, for :meth:`wait_served`, which version is in the
                folder, and which one serves: the one for which ``on_version`` has returned.

        Raises:
            CasnapError: Following cannot begin, or another process follows into this folder.
            FileNotFoundError: The parent of the folder does not exist.
        """
        from casnap import serving
        from casnap.serving.following import Following

        out = Path(local_path(folder))
        following = Following(
            lambda: self._pull_source(name),
            out,
            options or serving.options.PullOptions(),
            seconds_of("interval", interval),
            on_version,
            callback_of(progress),
            notes=notes,
        )
        return following.events()

    def _pull_source(self, name: str | None) -> Source:
        from casnap.serving.pull import Source

        view = self._view
        full = view.folder(None) if name is None else view.full_name(name)
        return Source(view.repository, full)

    # --- maintenance ---

    def import_file(
        self,
        source: str | os.PathLike[str],
        name: str,
        *,
        key: str | None = None,
        rank: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        dry_run: bool = False,
        progress: ProgressOption = None,
    ) -> casnap.ImportReport:
        """Import files of another format as a snapshot, in one commit. It runs no code of a file.

        Chunks that the store has, from a take or an import, are not stored again. The files are
        mapped, not read into memory; do not truncate them meanwhile. With ``torch.distributed``,
        one rank alone calls this.

        Args:
            source: A file of safetensors or ``torch.save``; the folder, the index or any one of the
                shards of a model; or a folder of ``torch.distributed.checkpoint``, TorchSnapshot or
                torch_checkpointing. A folder of weights brings its small files along, below the
                key ``files``.
            name: The snapshot's name.
            key: The key of the snapshot under which the state is imported. By default it is
                ``model``; but folders of checkpoints, and a dict of ``torch.save`` that holds more
                than tensors, keep their own keys.
            rank: The rank whose state to import from a folder of TorchSnapshot or
                torch_checkpointing that many ranks wrote.
            metadata: Metadata of the snapshot, besides the ``__metadata__`` of safetensors.
            overwrite: Replace a snapshot of this name, unless it has a tag.
            dry_run: Only report what would be imported.
            progress: True shows bars. Or a function, called as ``progress(phase, done, total)``, in
                bytes.

        Returns:
            The contents of the files, and how many bytes of them were new to the store.

        Raises:
            FileFormatError: The files are malformed, need pickle, or are in no known format.
            SnapshotExistsError: The name is taken.
            StoreError: The store cannot be used; nothing was committed.
        """
        refuse_nested_take()
        name = self._view.local_name(name)
        full = check_name(self._view.full_of(name))
        find = None if dry_run else lambda: (self.make()._view, name)
        options = {"overwrite": overwrite, "progress": callback_of(progress)}
        return import_snapshot(
            source, full, find, options, key=key, rank=rank, metadata=dict(metadata or {})
        )

    def who(
        self,
        source: Any,
        *,
        key: str | None = None,
        prefix: str | None = None,
    ) -> casnap.WhoReport:
        """Find the snapshots that hold given tensors, by digests: whose weights does a file have?

        A tensor is found under any path. A tensor that was cast to more bits is found too, if the
        cast lost nothing: the report names the dtype. The tensors of a file are streamed and
        hashed; values of a state dict that are no tensors do not count. From the store, only the
        trees of its snapshots are read.

        If no snapshot holds all tensors, this also looks for what was cast to fewer bits: it reads
        tensors of the same shape and the same path below the key, in the 16 newest snapshots, and
        casts them. It reads a tensor up to its first chunk that differs. It gives up on a snapshot
        after eight tensors that differ, if none was equal.

        Args:
            source: The path of a file or folder, as :meth:`import_file` takes it; an object with
                ``state_dict``, such as a module; a state dict; or a snapshot, of any store.
            key: As for :meth:`import_file`.
            prefix: Only look at snapshots below this folder.

        Returns:
            The snapshots, those that hold most first, and what the first one lacks.

        Raises:
            FileFormatError: The files are malformed, or in no known format.
            StateError: There is no tensor with elements; or a snapshot is of a store with chunks of
                another size.
            UnsupportedTypeError: The source is none of the things that ``source`` may be, or has a
                tensor that no snapshot can hold, such as one on the meta device.
            DamagedError: A node or a chunk of a snapshot is missing or damaged.
        """
        from casnap.history.who import Asked, tensors_of, who

        snapshots = self._contents(prefix)
        if isinstance(source, Snapshot):
            contents = source.contents
            with contents.reading():
                listed = list(contents.listed())
            entries = {each.name: each.entry for each in listed}
            of_ranks = {each.name for each in listed if each.owner is not None}
            asked = Asked(entries, contents.store.config.chunk_size, of_ranks=of_ranks)
        else:
            asked = tensors_of(source, key, self.chunk_size)
        return who(snapshots, asked, self.chunk_size)

    def equal_weights(self, prefix: str | None = None) -> list[list[str]]:
        """Return groups of snapshots; the snapshots of one group have equal weights.

        If they are steps of one run, the training has changed no weight between them.

        Args:
            prefix: Only look at snapshots below this folder.

        Returns:
            The names of at least two snapshots in each group, in the order of their commits.

        Raises:
            DamagedError: A node of a snapshot is missing or damaged.
        """
        from casnap.history.who import equal_weights

        return equal_weights(self._contents(prefix))

    def _contents(self, prefix: str | None) -> dict[str, Contents]:
        """Return the contents of the snapshots that this version can read, by their names."""
        from casnap.storage import Contents

        view = self._view
        known = [(name, row) for name, row in view.rows(prefix) if not row.unknown_features]
        contents = {name: Contents(view.readable, view.full_of(name), row) for name, row in known}
        Contents.read_ahead([*contents.values()])
        return contents

    def _local_name(self, snapshot: Snapshot) -> str:
        """Return the name, in this view, of a snapshot that may be of another view of the store.

        Raises:
            SnapshotNotFoundError: The snapshot is of another store, or was deleted or replaced.
        """
        view, full = self._view, snapshot.contents.name
        local = view.local_of(full)
        is_below = view.full_of(local) == full
        if is_below and local in self and view.row_of(local).commit == snapshot.row.commit:
            return local
        raise SnapshotNotFoundError(
            f"{snapshot.path} is not in {self.uri}: it was deleted or replaced, or is of another "
            "store, from which `casnap cp` copies it"
        )

    def average(
        self,
        names: Sequence[str | Snapshot],
        into: str,
        *,
        weights: Sequence[float] | None = None,
        decay: float | None = None,
        exact: bool = False,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        progress: ProgressOption = None,
    ) -> casnap.AverageReport:
        """Write the mean of snapshots as a new snapshot, in one commit.

        The mean is taken of the weights: floating-point tensors, except moments and buffers, that
        have one shape and dtype in all snapshots. All else comes from the last snapshot in
        ``names``, and takes up no more room in the store; nor do tensors that are equal in all
        snapshots. The chunks that differ are read once of each snapshot, and verified; memory stays
        below 400 MiB for any size. With ``torch.distributed``, one rank alone calls this.

        Elements are summed in float32 (those of float64 in float64) in the order of ``names``:
        ``(x0 + x1 + …) / n``, or ``x0 * w0 + x1 * w1 + …``, and cast to the dtype of the tensor. If
        the weights sum to one, an element that has the same bits in all snapshots stays as it is.
        The weights need not sum to one, nor lie between 0 and 1: ``[1 - w, w]`` with ``w`` above 1
        goes beyond the second snapshot.

        The mean is measured if a snapshot was, or if this store was opened with ``health=``: see
        :attr:`Snapshot.unhealthy`. A warning names its tensors with NaN or infinite elements. A
        tensor that is no mean has the numbers of an equal one in any snapshot, or is read once.

        Args:
            names: The snapshots, or their names.
            into: The name of the new snapshot.
            weights: A number for each snapshot; by default, all have the same.
            decay: In place of ``weights``: compute a moving average that begins with the first
                snapshot. At each further snapshot, the average keeps this share of itself, from 0
                to 1.
            exact: Sum in float64.
            metadata: Metadata of the new snapshot. It also gets ``average_of``, the names, and
                ``average_weights``; of more than 400 snapshots, the first and the last name, and in
                a text how many there are between.
            overwrite: Replace a snapshot of this name, unless it has a tag.
            progress: True shows bars. Or a function, called as ``progress(phase, done, total)``, in
                bytes.

        Returns:
            How many tensors are means; and which tensors are not, and why.

        Raises:
            ValueError: The weights do not fit the snapshots.
            SnapshotNotFoundError: There is no such snapshot, or it was deleted meanwhile.
            SnapshotExistsError: The name is taken.
            StateError: No tensor of weights has one shape and dtype in all snapshots.
            DamagedError: A chunk is missing or damaged; nothing was committed.
            UnhealthyError: A tensor of the mean has NaN or infinite elements, and the options of
                this store ask for this error; nothing was committed.
        """
        from casnap.history.average import average, checked_weights, moving_weights, notes_of
        from casnap.storage import Contents

        refuse_nested_take()
        if isinstance(names, str):
            raise TypeError(f"names= is a list of snapshots; got the one name {names!r:.80}")
        view = self._view
        asked = [self._local_name(each) if isinstance(each, Snapshot) else each for each in names]
        sources = [Contents(view.repository, *view.find(name)) for name in asked]
        if decay is not None:
            if weights is not None:
                raise ValueError(
                    "weights= and decay= both say how snapshots are weighted: give one"
                )
            weights = moving_weights(len(asked), decay)
        weights = checked_weights(len(asked), weights)
        options = TakeOptions(
            metadata={**(metadata or {}), **notes_of(asked, weights)},
            overwrite=overwrite,
            progress=callback_of(progress),
            threads=view.threads,
            hooks=view.hooks,
            health=view.health,
        )
        name = view.local_name(into)
        full = check_name(view.full_of(name))
        report = average(view.repository, sources, weights, full, options, exact=exact)
        return replace(report, name=name, of=asked)

    def prune(
        self, retention: casnap.Retention, *, prefix: str | None = None, dry_run: bool = False
    ) -> casnap.PruneReport:
        """Delete the snapshots that no rule keeps, all in one commit.

        The rules apply to each run, that is each folder of snapshots, on its own. They apply to the
        very table that the commit changes, so they see tags, takes and overwrites that other
        processes have committed so far. A collection in the background frees the bytes, as after
        :meth:`delete`.

        Args:
            retention: The rules.
            prefix: Prune only the runs in and below this folder.
            dry_run: Only report what would be deleted.

        Returns:
            For each snapshot, whether it is kept, and by which rules.

        Raises:
            EntryNotFoundError: No snapshot has, or had, a key that a pattern of ``thin`` matches.
        """
        from casnap.storage import Runs

        view = self._view
        folder = view.folder(prefix)
        return self._view.named_here(
            Runs(view.repository, folder).prune(retention, view.free_later, dry_run=dry_run)
        )

    def thin(
        self, rules: Mapping[str, int], *, prefix: str | None = None, dry_run: bool = False
    ) -> dict[str, tuple[str, ...]]:
        """Remove from older snapshots what only a resume needs, all in one commit.

        A thinned snapshot keeps its name, commit id, metadata and tags, and all other keys. It can
        be read, exported and copied, and lists the keys that it lost. A collection in the
        background frees the bytes, as after :meth:`delete`. Snapshots that have a tag, or that a
        mirror still lacks, stay whole.

        Args:
            rules: A pattern of whole keys of the app state → how many of the newest snapshots of
                each run keep these keys: ``{"optim/**": 2}``. ``*`` matches any characters.
            prefix: Thin only runs in and below this folder.
            dry_run: Only report which keys would be removed.

        Returns:
            By name of a snapshot, the keys that were removed.

        Raises:
            ValueError: There are no rules, or one is malformed.
            EntryNotFoundError: No snapshot has, or had, a key that a pattern matches.
        """
        from casnap.storage import Runs

        view = self._view
        folder = view.folder(prefix)
        runs = Runs(view.repository, folder)
        lost = runs.thin(rules, view.free_later, dry_run=dry_run)
        return {view.local_of(name): keys for name, keys in lost.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the whole store, as :meth:`configure` changes them."""
        from casnap.storage import Tags

        repository = self._view.repository
        settings = repository.settings(repository.newest()).values
        settings.pop(Tags.SETTING, None)
        return settings

    def configure(
        self,
        *,
        codec: str | None = None,
        mirror: str | None = None,
        gc: Duration | None = None,
    ) -> bool:
        """Change settings of the whole store; return whether anything changed.

        Later takes, in all processes, use the new settings. Stored chunks stay as they are.

        Args:
            codec: How chunks are stored: "auto", "raw" or "zstd"; see :class:`NewStore`.
            mirror: "none" forgets which store is the mirror, and which snapshots it lacks. Then the
                next ``Store(..., mirror=)`` may name another mirror; otherwise it must name the
                same one.
            gc: "auto", the default: each process that deletes snapshots also collects their garbage
                in the background. "off": only :meth:`gc` collects. A time, such as "12h": as
                "auto", and this is the grace of all collections that are given none.

        Raises:
            ValueError: There is no such codec, or ``mirror`` or ``gc`` has no such value.
        """
        from casnap.mirror.notes import detach_mirror
        from casnap.storage import Changes, new_settings

        if mirror not in (None, "none"):
            raise ValueError(f"mirror can only be 'none', which forgets it; got {mirror!r:.80}")
        changes = new_settings(codec, gc)
        self.make()
        changed = False
        if changes:
            changed = Changes(self._view.repository).edit_settings(
                lambda settings: {**settings, **changes}
            )
        if mirror is not None:
            changed |= detach_mirror(self._view.repository)
        return changed

    def gc(
        self,
        *,
        grace: Duration | None = None,
        repack: float = 0.5,
        recode_after: int | None = 3,
        dry_run: bool = False,
        exclusive: bool = False,
        progress: ProgressOption = None,
    ) -> casnap.GcReport:
        """Collect garbage: delete the data that no snapshot needs.

        Takes, deletes and other collectors may run at the same time, even with wrong clocks. The
        collector always works on the whole store, not only on this view.

        Args:
            grace: How long to keep unreferenced data: a text such as ``"12h"``, a ``timedelta``, or
                seconds (0: delete it now). During the grace, a deleted snapshot can still be read,
                and a running take can still rely on the data. After the grace, the reader gets an
                error, and the take begins again. The default is the grace that the store is set to
                (see :meth:`configure`), else 24 hours.
            repack: If less than this share of a pack is needed, copy what is needed into a new pack
                (0: never).
            recode_after: How many of the newest snapshots of each folder keep their chunks as they
                are. Chunks that only older ones need are stored as deltas, or compressed, where
                that is smaller. 0: recode all; None: recode nothing now. Without effect with the
                codec "raw". The command writes 0 for None.
            dry_run: Only report what would be done.
            exclusive: You promise that no other process writes to this store. casnap asks for this
                only if the store's backend cannot keep two writers apart.
            progress: True shows bars. Or a function, called as ``progress(phase, done, total)``.

        Raises:
            StoreError: The store cannot be written to, or not safely.
            DamagedError: An object could not be read; nothing was deleted.
            ValueError: An argument is out of range.
        """
        from casnap.storage import GcOptions, collect

        options = GcOptions(
            grace=seconds_if_given("grace", grace),
            repack=repack,
            dry_run=dry_run,
            exclusive=exclusive,
            recode_after=recode_after,
        )
        return collect(self._view.repository, options, callback_of(progress))

    def diff(self, a: str, b: str, *, elements: bool = False) -> casnap.Diff:
        """Return the differences between two snapshots. This reads only subtrees that differ.

        Args:
            a: The name of the first snapshot.
            b: The name of the second one.
            elements: Read the chunks that differ, too, and report how many elements differ, and by
                how much at most.
        """
        from casnap.comparing.diff import diff

        return diff(self[a].contents, self[b].contents, elements=elements)

    def statistics(self, a: str, b: str) -> list[casnap.GroupStatistics]:
        """Say how far a training has moved each group of tensors from one snapshot to another.

        A group has the tensors whose paths differ only in numbers, such as one weight in all layers
        of a model. This reads the chunks of the tensors that differ.

        Args:
            a: The name of the first snapshot.
            b: The name of the second one.

        Returns:
            For each group the share of elements that differ, the largest and the mean difference,
            and the cosine.

        Raises:
            SnapshotNotFoundError: There is no such snapshot.
            DamagedError: Chunks are missing or damaged.
        """
        from casnap.comparing.statistics import statistics

        return statistics(self[a].contents, self[b].contents)

    def usage(self, prefix: str | None = None) -> list[casnap.Usage]:
        """Return the logical, stored and unique bytes of each snapshot, in the order of commits."""
        from casnap.maintenance.usage import usage

        return usage([s.contents for s in self.snapshots(prefix)], self._view.readable)

    def check(
        self,
        *,
        data: bool = False,
        sample: float | None = None,
        seed: int | None = None,
        name: str | None = None,
        progress: ProgressOption = None,
    ) -> casnap.CheckReport:
        """Check that nothing in the store is missing or damaged; change nothing.

        This checks the whole store, not only this view; with ``name``, only what that snapshot
        needs.

        Args:
            data: Read and verify every chunk, at each of its places.
            sample: Read and verify a random share of the chunks, from 0 to 1.
            seed: Chooses the share. By default, each call chooses a different share.
            name: The only snapshot to check.
            progress: True shows bars. Or a function, called as ``progress(phase, done, total)``.

        Returns:
            All damages, and the parts of snapshots that each one hurts.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
        """
        full = None if name is None else self._view.find(name)[0]
        from casnap.maintenance.check import check

        return check(
            self._view.repository,
            data=data,
            sample=sample,
            seed=seed,
            name=full,
            progress=callback_of(progress),
        )

    def repair(
        self,
        *,
        sources: Sequence[str | os.PathLike[str] | Store] = (),
        progress: ProgressOption = None,
        dry_run: bool = False,
    ) -> casnap.RepairReport:
        """Repair a damaged store as far as possible.

        Lost parts of the index are built again from the packs. Undamaged chunks are copied out of
        damaged packs. A chunk without an undamaged copy is looked for in the sources. If no source
        has it, it is recorded as lost, and the next take of the same bytes stores it again. This
        repairs the whole store, not only this view.

        Args:
            sources: Other casnap stores: open, or a path or URI.
            progress: True shows bars. Or a function, called as ``progress(phase, done, total)``.
            dry_run: Change nothing; only report what would be done.

        Raises:
            DamagedError: The newest root cannot be read.
        """
        if isinstance(sources, str | os.PathLike):
            raise TypeError(f"sources is a list, such as [{str(sources)!r}]; got one alone")
        places = [
            s._view.repository.backend if isinstance(s, Store) else given_path(s) for s in sources
        ]
        from casnap.maintenance.repair import repair

        return repair(
            self._view.repository, sources=places, progress=callback_of(progress), dry_run=dry_run
        )


def _mirror_options(
    mirror: str | os.PathLike[str] | Backend | casnap.MirrorOptions | None,
) -> casnap.MirrorOptions | None:
    """Return the user's options for the mirror; None without a mirror."""
    if mirror is None:
        return None
    from casnap.mirror.status import MirrorOptions

    return mirror if isinstance(mirror, MirrorOptions) else MirrorOptions(mirror)


def import_snapshot(
    source: str | os.PathLike[str],
    name: str,
    find: Callable[[], tuple[View, str]] | None,
    options: Mapping[str, Any],
    *,
    key: str | None = None,
    rank: int | None = None,
    metadata: dict[str, Any],
) -> casnap.ImportReport:
    """Import files as a snapshot, as :meth:`Store.import_file` describes.

    Args:
        source: The files.
        name: The snapshot's name, for the report.
        find: Opens the store, and returns it and the snapshot's name in it. It is called once the
            files are known to be importable. None for a dry run.
        options: Further options of the take.
        key: As for :meth:`Store.import_file`.
        rank: As for :meth:`Store.import_file`.
        metadata: As for :meth:`Store.import_file`.
    """
    from casnap.files.importing import import_files
    from casnap.ranks.comm import SingleProcess

    def take(leaves: Any, all_metadata: dict[str, Any]) -> int:
        assert find is not None
        view, inner = find()
        options_of_take = TakeOptions(metadata=all_metadata, environment=False, **options)
        snapshot = take_from(view, SingleProcess(), lambda: leaves, inner, options_of_take)
        return snapshot.stats.new_bytes

    return import_files(
        Path(local_path(source)),
        name,
        take if find else None,
        key=key,
        rank=rank,
        metadata=metadata,
    )
