"""A snapshot: take, restore and read, under TorchSnapshot's names.

This module imports ``view.py``, ``pending.py`` and lower layers; ``store.py`` imports it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import msgspec

from casnap.backends.local_files import is_file
from casnap.backends.uris import joined, name_below, store_uri
from casnap.errors import (
    CasnapError,
    NotAStoreError,
    SnapshotNotFoundError,
    WitnessError,
    shell_word,
)
from casnap.format.entries import Entry
from casnap.format.names import check_name, component_of, key_of, name_text
from casnap.format.records import Row, Stats
from casnap.restore.indexing import Index
from casnap.restore.renaming import Rename
from casnap.restore.restore_report import NewRanks
from casnap.runtime.environment import given_path, local_path
from casnap.runtime.lazy_imports import ModuleLater
from casnap.runtime.nesting import refuse_nested_take
from casnap.runtime.progress import ProgressOption, callback_of
from casnap.runtime.threads import python_gc_paused
from casnap.runtime.units import Size, bytes_if_given
from casnap.state.stateful import AppState
from casnap.storage import Contents
from casnap.take.options import TakeOptions, check_order
from casnap.version import __version__
from casnap.view import View, find_view, find_view_together, view_of

if TYPE_CHECKING:
    import torch

    import casnap
    from casnap.ranks.comm import Comm
    from casnap.take.capture import StateSource
    from casnap.take.commit import TakeResult
else:
    casnap, torch = ModuleLater("casnap"), ModuleLater("torch")

_log = logging.getLogger("casnap")


def _check_no_file(path: str | os.PathLike[str], cause: CasnapError) -> None:
    """Check that no file is at a path where no snapshot was found.

    Raises:
        CasnapError: A file is there. The error has the type of ``cause``, and says how to import
            the file.
    """
    text = given_path(path)
    if store_uri(text) is None and is_file(local_path(text)):
        raise type(cause)(
            f"{text} is a file, not a snapshot in a store; `casnap import {shell_word(text)} "
            "STORE/NAME` makes one of a file of safetensors or torch.save"
        ) from cause


class EntriesByPath(dict[str, Entry]):
    """The entries of a snapshot by path, ``<rank>/<key>/<path>``.

    A global entry is listed under the prefix of each rank.

    Args:
        entries: The entries.
        own: The paths of the entries that belong to one rank.
    """

    def __init__(self, entries: Mapping[str, Entry], own: frozenset[str]) -> None:
        super().__init__(entries)
        self._own = own

    def is_global(self, path: str) -> bool:
        """Whether any rank can restore an entry, on any number of ranks.

        Otherwise the entry belongs to the rank that its path begins with, and only that rank
        restores it.

        Raises:
            KeyError: There is no entry of this path.
        """
        if path not in self:
            raise KeyError(path)
        return path not in self._own

    def __repr__(self) -> str:
        """Show a tree with sizes; only some lines of a large tree."""
        from casnap.state.outline import as_text, outline

        return as_text(outline(self)) or "{}"

    def _repr_html_(self) -> str:
        from casnap.state.outline import as_html, outline

        return as_html(outline(self))


class SnapshotMetadata:
    """A snapshot's manifest and metadata.

    Args:
        snapshot: The snapshot.
        version: The version of casnap that reads it.

    Attributes:
        version: The version of casnap that reads the snapshot.
        world_size: The number of ranks that took the snapshot.
        user: The ``metadata=`` of the take.
    """

    def __init__(self, snapshot: Snapshot, version: str) -> None:
        self._snapshot = snapshot
        self.version = version
        self.world_size = snapshot.world_size
        with snapshot.contents.reading():
            self.user: dict[str, Any] = dict(snapshot.contents.metadata)

    @property
    def manifest(self) -> EntriesByPath:
        """All entries by path, as :meth:`Snapshot.get_manifest` returns them."""
        return self._snapshot.get_manifest()

    def __repr__(self) -> str:
        return (
            f"SnapshotMetadata(version={self.version!r}, world_size={self.world_size}, "
            f"user={self.user!r})"
        )


class TakeStats(Stats, frozen=True, array_like=True):
    """Figures of a take.

    Attributes:
        requests: How many requests the take made, by kind, on all ranks. Only the snapshot that the
            take returned has them. Empty for a snapshot that was looked up, and for a store on this
            machine.
        freed_bytes: How many bytes of the store this process (with many ranks, rank 0) has freed
            since its previous take: by collections in the background, and to make room for this
            take. 0 for a snapshot that was looked up.
    """

    requests: dict[str, int] = msgspec.field(default_factory=dict)
    freed_bytes: int = 0


class Snapshot:
    """One immutable, named checkpoint in a store.

    The object stays with the snapshot that it opened. If another snapshot is taken under the same
    name later, this object does not change.

    Args:
        path: The path or URI of the store, then the name of the snapshot.
        pg: The process group whose ranks restore together. By default this is the whole world, or
            this process alone.
        storage_options: How to reach a remote store, as :class:`casnap.Store` takes them.
        store: A store or its URI. ``path`` is then the name in this store.
        cache_bytes: For a remote store: how many bytes of chunks this host keeps, as
            :class:`casnap.Store` takes it.

    Raises:
        SnapshotNotFoundError: There is no snapshot of this name.
        NotAStoreError: There is no store above the path.
    """

    @python_gc_paused()
    def __init__(
        self,
        path: str | os.PathLike[str],
        pg: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        *,
        store: casnap.Store | str | os.PathLike[str] | None = None,
        cache_bytes: Size | None = None,
    ) -> None:
        try:
            view, name = find_view(
                path, storage_options, store, create=False, cache_bytes=cache_bytes
            )
            row = view.row_of(name)
        except (NotAStoreError, SnapshotNotFoundError) as e:
            if store is None:
                _check_no_file(path, e)
            raise
        self._begin(view, name, row, pg, store)

    def _begin(
        self,
        view: View,
        name: str,
        row: Row,
        pg: Any,
        store: object,
        requests: Mapping[str, int] = {},
        freed_bytes: int = 0,
    ) -> None:
        self._store_view = view
        is_of_view = getattr(store, "_view", None) is view
        self._store: casnap.Store | None = cast("casnap.Store", store) if is_of_view else None
        self.name = name
        self.pg = pg
        self._requests = dict(requests)
        self._freed_bytes = freed_bytes
        self.contents = Contents(view.readable, view.full_of(name), row)

    @classmethod
    def of(
        cls,
        view: View,
        name: str,
        row: Row,
        pg: Any = None,
        store: object = None,
        requests: Mapping[str, int] = {},
        freed_bytes: int = 0,
    ) -> Snapshot:
        """Return the snapshot of a row of a store's table.

        Args:
            view: The store, which is open.
            name: The snapshot's name in that view.
            row: The row.
            pg: The process group whose ranks restore together.
            store: The :class:`casnap.Store` of the view, if there is one already.
            requests: How many requests the take made, by kind, if it was taken just now.
            freed_bytes: How many bytes were freed since the previous take, if it was taken just
                now.
        """
        snapshot = cls.__new__(cls)
        snapshot._begin(view, name, row, pg, store, requests, freed_bytes)
        return snapshot

    # --- taking ---

    @classmethod
    def take(
        cls,
        path: str | os.PathLike[str],
        app_state: AppState,
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        *,
        store: casnap.Store | str | os.PathLike[str] | None = None,
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

        ``path`` is the path of the store, followed by the name of the snapshot. The take uses the
        nearest store above ``path``. If there is none, the parent folder becomes a store. If
        ``path`` is a URI, such as ``s3://bucket/run1/step_100``, its parent is the store. All ranks
        use the absolute path of rank 0. With ``store``, an open store or its URI, ``path`` is the
        name in this store. ``storage_options`` are those of :class:`casnap.Store`; each rank uses
        its own.

        :meth:`casnap.Store.take` describes all other arguments, and the errors.
        """
        refuse_nested_take()
        check_order("Snapshot.take(path, app_state)", app_state, path)
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
        return take_snapshot(TakePlace.at(path, storage_options, store), app_state, options, pg)

    @classmethod
    def async_take(
        cls,
        path: str | os.PathLike[str],
        app_state: AppState,
        pg: Any = None,
        replicated: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        *,
        store: casnap.Store | str | os.PathLike[str] | None = None,
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

        The take goes on in the background. ``path``, ``store`` and ``storage_options`` are those of
        :meth:`take`. :meth:`casnap.Store.async_take` describes all other arguments.
        """
        refuse_nested_take()
        check_order("Snapshot.async_take(path, app_state)", app_state, path)
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
        return begin_snapshot(TakePlace.at(path, storage_options, store), app_state, options, pg)

    # --- restoring ---

    def restore(
        self,
        app_state: AppState,
        strict: bool = True,
        *,
        allow_pickle: bool = False,
        rename: Rename | None = None,
        progress: ProgressOption = None,
        read_once: bool | None = None,
        reuse: bool = False,
        new_ranks: NewRanks | None = None,
        timeout: float | None = None,
    ) -> casnap.RestoreReport:
        """Restore an app state, or some of its keys, in place where that is possible.

        A tensor of a module, optimizer or :class:`StateDict` is filled in place if the state has a
        tensor of the same path and shape (another dtype is cast). Then each value's
        ``load_state_dict`` gets the state that was taken. Values of other classes than torch's and
        casnap's get it in new tensors. With ``torch.distributed``, all ranks call this together;
        their number and their sharding may differ from those of the take. A value that belongs to
        one rank is restored only by that rank.

        Args:
            app_state: The values to restore, by key.
            strict: If modules, optimizers or dicts differ from the snapshot, raise before anything
                is written. Otherwise restore whatever fits.
            allow_pickle: Unpickle values that were taken with ``allow_pickle=True``. Use this only
                for a store that you trust as you trust code.
            rename: Maps keys of the snapshot to keys of ``app_state``: a mapping, or a function
                that returns None for keys to leave out. Keys that a mapping lacks stay the same.
                All ranks give the same. Messages have the keys of the snapshot.
            progress: True shows bars, on a terminal or in a notebook. Or a function, called as
                ``progress(phase, done, total)``, in bytes, from any thread.
            read_once: True: one rank reads each stored byte, and passes it on to the others. False:
                each rank reads for itself. The default depends on the ranks. If all ranks see the
                store through one page cache, they read once only if they can share memory, each
                byte is wanted by more than three of them on average, and that saves 96 MiB of
                reading or more. Otherwise, as on several hosts, they read once.
            reuse: Hash the tensors of the state, and read only the chunks that differ. This pays if
                much of the state is as in the snapshot, such as the frozen base of a fine-tune.
                Chunks of which a shard has only a part are always read, and so is everything on a
                device that cannot hash. Nobody else may write to the tensors during the call. Ranks
                may differ in this.
            new_ranks: What happens to keys that hold values for single ranks of the take, if this
                world has ranks that the take did not have. "keep": these new ranks keep their own
                values, and the report lists them. "error": raise before anything is written. By
                default, random generators are kept, so a new rank goes on from its own seed; for
                all other keys, ``strict`` decides.
            timeout: Seconds that a rank waits for another before all ranks raise; 600 by default.

        Returns:
            The paths that were not restored, or have no counterpart in the snapshot; with
            ``reuse``, also how many bytes were not read.

        Raises:
            MismatchError: State and snapshot differ. The error lists all differences. Or a
                ``load_state_dict`` raised an error; this error then names its key, and the keys
                that were restored before.
            UnsupportedTypeError: A value cannot be decoded here; nothing was written.
            DamagedError: Stored bytes are missing or damaged.
            DeviceError: A device does not hold what was copied to it, or computes wrong digests.
                Tensors may be filled in part.
            SnapshotNotFoundError: The snapshot was deleted, and its bytes were collected.
            RankError: Another rank failed, died or did not answer in time.
        """
        from casnap.mirror.notes import note_restored
        from casnap.ranks.joining import join
        from casnap.restore.restore import RestoreOptions, restore

        options = RestoreOptions(
            strict=strict,
            allow_pickle=allow_pickle,
            progress=callback_of(progress),
            read_once=read_once,
            reuse=reuse,
            rename=rename,
            new_ranks=new_ranks,
        )
        comm = join(self.pg, timeout, f"the restore of {self.name!r}")
        with comm, self.contents.reading():
            report = restore(self.contents, app_state, options, comm)
        note_restored(self.contents.store, self.contents.name, self.row)
        return report

    @python_gc_paused()
    def compare(self, app_state: AppState) -> casnap.Diff:
        """Return how the live state of this process differs from the snapshot; fill nothing.

        The state is read as a take reads it, and hashed where it lies, on its device if that can
        hash. Only the chunks of the snapshot that differ are read, to tell by how much. After a
        restore nothing differs::

            print(snapshot.compare(app_state))

        With ``torch.distributed``, each rank compares what it holds with what it would restore: its
        shards of a sharded tensor, and its own values. No rank learns what others find. If a
        ``state_dict()`` is a collective, as it may be for sharded modules, all ranks have to call
        this.

        Args:
            app_state: The values to compare, by key: all, or some of those that were taken.

        Returns:
            What differs, ``equal`` if nothing does. ``removed`` is what the live state lacks, such
            as the moments of a new optimizer; ``added`` is what the snapshot lacks. ``left_out``
            names the keys of the snapshot that ``app_state`` lacks.

        Raises:
            UnsupportedTypeError: A value cannot be stored, and so cannot be compared.
            DamagedError: Stored bytes are missing or damaged.
            DeviceError: A device computes wrong digests.
            SnapshotNotFoundError: The snapshot was deleted, and its bytes were collected.
        """
        from casnap.comparing.live import compare
        from casnap.ranks.joining import own_rank
        from casnap.take.capture import LiveState

        with self.contents.reading():
            return compare(self.contents, LiveState(app_state), own_rank(self.pg))

    def export(
        self,
        out: str | os.PathLike[str],
        *,
        path: str | None = None,
        format: str | None = None,
        max_shard_size: Size | None = None,
        tensors_only: bool = False,
        tied: Sequence[str] | torch.nn.Module = (),
        dry_run: bool = False,
        progress: ProgressOption = None,
    ) -> casnap.ExportReport:
        """Write the snapshot, or a part of it, to files of another format, verified and whole.

        Args:
            out: The file to make; with ``max_shard_size``, or for ``dcp``, the folder.
            path: The part to export, such as ``model``. Tensors are named by the keys below it,
                joined by dots. By default, everything that rank 0 sees is exported.
            format: ``safetensors``, ``torch`` (one file of ``torch.save``) or ``dcp``. By default,
                the suffix of ``out`` decides: ``.pt``, ``.pth``, ``.bin`` and ``.ckpt`` are for
                ``torch``, ``.dcp`` is for ``dcp``, all others are for ``safetensors``.
            max_shard_size: Bytes of tensors in each file, at most, such as ``"5GB"``; an index of
                safetensors lists the files.
            tensors_only: Leave out values that safetensors cannot hold, such as sparse tensors.
            tied: Names of tensors to leave out, since another tensor has the same bytes. Or the
                module whose state is at ``path``: then each of its parameters is stored once, under
                its first name.
            dry_run: Only report what would be written.
            progress: True shows bars. Or a function, called as ``progress(phase, done, total)``, in
                bytes.

        Raises:
            FileFormatError: ``out`` exists, or its suffix means another format. Or the format
                cannot hold some values; the error lists them.
            EntryNotFoundError: There is no such path, or several ranks have entries of their own
                there and ``path`` does not name the rank.
            DamagedError: Stored bytes are missing or damaged.
        """
        from casnap.comparing.standstill import look_at_neighbors
        from casnap.files.exporting import export
        from casnap.files.file_reports import ExportOptions, format_of, tied_names

        names = tied_names(tied)
        options = ExportOptions(
            path=path,
            format=format_of(out, format),
            max_shard_size=bytes_if_given("max_shard_size", max_shard_size),
            tensors_only=tensors_only,
            tied=names,
            dry_run=dry_run,
        )
        contents = self.contents
        with contents.reading():
            report = export(contents, Path(local_path(out)), options, callback_of(progress))
        if not dry_run:
            look_at_neighbors(contents.store, contents.name, self.commit_id)
        return report

    # --- reading: no method here talks to other ranks ---

    def __getitem__(self, path: str) -> casnap.Handle:
        """Return a handle on a tensor, value or container, without reading it.

        ``snapshot["model/weight"]`` has ``.shape``, ``.dtype`` and ``.nbytes``; its ``[index]``
        reads a part, ``.read()`` all of it.

        Args:
            path: As for :meth:`read_objects`, but no glob.

        Raises:
            EntryNotFoundError: There is no entry of this path, or several ranks have entries of
                their own there and the path does not name the rank.
        """
        from casnap.restore.entry_handle import handle_of

        with self.contents.reading():
            return handle_of(self.contents, path)

    def __contains__(self, path: object) -> bool:
        """Whether :meth:`__getitem__` finds an entry."""
        with self.contents.reading():
            return isinstance(path, str) and self.contents.has(path)

    # Not iterable: without this line, Python would iterate by __getitem__(0), (1), and so on.
    __iter__ = None

    def _ipython_key_completions_(self) -> list[str]:
        with self.contents.reading():
            return [each.name for each in self.contents.listed()]

    def handles(self, pattern: str = "*") -> dict[str, casnap.Handle]:
        """Return handles on the tensors and values that a glob matches, each once, by path.

        Args:
            pattern: As for :meth:`read_objects`; by default everything.
        """
        from casnap.restore.entry_handle import handles

        with self.contents.reading():
            return handles(self.contents, pattern)

    def read_objects(
        self,
        paths: str | Iterable[str],
        memory_budget_bytes: Size | None = None,
        *,
        allow_pickle: bool = False,
        progress: ProgressOption = None,
    ) -> dict[str, Any]:
        """Read many tensors and values in one pass.

        Chunks that lie side by side are read together, and each chunk once.

        Args:
            paths: Paths and globs (``*`` matches ``/`` too). ``3/model/w`` is the entry that rank 3
                sees, ``global/model/w`` a global entry. Without such a prefix, a path or glob means
                global entries and the entries of single ranks. A glob matches tensors and values; a
                path may also name a container.
            memory_budget_bytes: The most bytes of buffers besides the result.
            allow_pickle: As for :meth:`casnap.Snapshot.restore`.
            progress: True shows bars, on a terminal or in a notebook. Or a function, called as
                ``progress(phase, done, total)``, in bytes, from any thread.

        Returns:
            Each object by its path: a path as you gave it; a match of a glob by its own path, which
            begins with a rank if the entry belongs to one.

        Raises:
            EntryNotFoundError: A path or glob names nothing, or a path without a rank names entries
                of several ranks.
            DamagedError: Stored bytes are missing or damaged.
        """
        one_or_many: Any = paths
        patterns = (
            [one_or_many]
            if isinstance(one_or_many, str) or not isinstance(one_or_many, Iterable)
            else [*one_or_many]
        )
        if not all(isinstance(path, str) for path in patterns):
            raise TypeError(
                f"read_objects() takes a path or glob, or a list of them; got {paths!r:.200}"
            )
        with python_gc_paused(), self.contents.reading():
            from casnap.restore.read_object import read_objects

            return read_objects(
                self.contents,
                patterns,
                memory_budget_bytes,
                allow_pickle=allow_pickle,
                progress=callback_of(progress),
            )

    def read_object(
        self,
        path: str,
        obj_out: Any = None,
        memory_budget_bytes: Size | None = None,
        *,
        index: Index | None = None,
        allow_pickle: bool = False,
    ) -> Any:
        """Read one tensor or value, a part of a tensor, or everything below a container.

        Args:
            path: A path of :meth:`get_manifest`, with or without the rank.
            obj_out: A tensor of the same shape to read into; another dtype is cast.
            memory_budget_bytes: The most bytes of buffers besides the result. One chunk is always
                allowed.
            index: Ints, slices and ``...``, as in ``tensor[index]``. Only the chunks that hold
                selected elements are read.
            allow_pickle: As for :meth:`restore`.

        Raises:
            EntryNotFoundError: There is no entry of this path; the error names the nearest one. Or
                several ranks have entries of their own there, and the path does not name the rank.
            MismatchError: ``obj_out`` has another shape.
            DamagedError: Stored bytes are missing or damaged.
            DeviceError: The device of ``obj_out`` does not hold what was copied to it, or computes
                wrong digests.
        """
        # Paused: the import below would start Python's garbage collector, which visits all objects
        # of torch and takes several times as long as a small read.
        with python_gc_paused(), self.contents.reading():
            from casnap.restore.read_object import read_object

            return read_object(
                self.contents, path, obj_out, memory_budget_bytes, index, allow_pickle=allow_pickle
            )

    def get_manifest(self) -> EntriesByPath:
        """Return all entries by path, ``<rank>/<key>/<path>``.

        ``get_manifest().is_global(path)`` says whether any rank can restore an entry, or only the
        one that its path begins with.
        """
        contents = self.contents
        with contents.reading():
            ranks = list(contents.ranks())
            entries = {f"{r}/{path}": e for r in ranks for path, e in contents.entries(r)}
            own_paths = frozenset(f"{r}/{path}" for r in ranks for path in contents.own_paths(r))
            return EntriesByPath(entries, own_paths)

    def get_state_dict_for_key(self, key: str, *, allow_pickle: bool = False) -> dict[str, Any]:
        """Return the state that was taken under a key of the app state, in new memory.

        Raises:
            EntryNotFoundError: The app state had no such key, or ranks have values of their own in
                it: read the state of rank 3, for example, as ``3/<key>`` by :meth:`read_object`.
        """
        state: dict[str, Any] = self.read_object(component_of(key), allow_pickle=allow_pickle)
        return state

    def load_into(
        self,
        module: torch.nn.Module,
        prefix: str = "model",
        *,
        rename: Rename | None = None,
        device: torch.device | str | None = None,
        strict: bool = True,
        progress: ProgressOption = None,
        reuse: bool = False,
    ) -> casnap.RestoreReport:
        """Fill the parameters and persistent buffers of a module in place, and nothing else.

        Unlike :meth:`casnap.Snapshot.restore`, this runs no ``load_state_dict`` and no hook, and
        needs no app state. If the module is sharded (FSDP2, tensor parallelism), each rank fills
        its own parts. Shapes and dtypes are checked before anything is written; another dtype is
        cast.

        Args:
            module: The module.
            prefix: The path of the tensors in the snapshot: a key such as ``model``, or a submodule
                in it, as in ``model/encoder`` for ``model/encoder.weight``. It may begin with a
                rank.
            rename: Maps names below the prefix to names in the module: a mapping, or a function.
                None leaves an entry out; names that a mapping lacks stay the same.
            device: The device on which tensors of the meta device get their memory; ties are kept.
                Other tensors must have memory already.
            strict: Whether to raise if module and snapshot differ. Otherwise the tensors that fit
                are filled, and the others stay as they are.
            progress: True shows bars, on a terminal or in a notebook. Or a function, called as
                ``progress(phase, done, total)``, in bytes, from any thread.
            reuse: Hash the tensors of the module, and read only the chunks that differ, as
                :meth:`casnap.Snapshot.restore` does.

        Returns:
            The names that were not filled, or have no counterpart in the module; with ``reuse``,
            also how many bytes were not read.

        Raises:
            EntryNotFoundError: There is nothing below the prefix, or several ranks have tensors of
                their own there and ``prefix`` does not name the rank.
            MismatchError: With ``strict``, module and snapshot differ; the error lists all
                differences, and nothing was written. Or two names were renamed to one.
            DamagedError: Stored bytes are missing or damaged. Tensors may hold new values already.
            DeviceError: A device does not hold what was copied to it, or computes wrong digests.
                Tensors may be filled in part.
        """
        from casnap.restore.load_into import load_into

        with self.contents.reading():
            return load_into(
                self.contents,
                module,
                prefix,
                rename,
                device,
                strict=strict,
                progress=callback_of(progress),
                reuse=reuse,
            )

    # --- properties ---

    @property
    def row(self) -> Row:
        """The snapshot's row in the table of the store."""
        return self.contents.row

    @property
    def store(self) -> casnap.Store:
        """The store that holds the snapshot."""
        if self._store is None:
            self._store = casnap.Store._of(self._store_view)
        return self._store

    @property
    def path(self) -> str:
        """The URI of the store, then the name of the snapshot."""
        return self._store_view.path_of(self.name)

    @property
    def metadata(self) -> SnapshotMetadata:
        """The version, the world size, the manifest and the user's own metadata."""
        return SnapshotMetadata(self, __version__)

    @property
    def commit_id(self) -> str:
        """The id of the commit: 32 hex digits. No two snapshots of a store have the same id."""
        return self.row.commit.hex()

    @property
    def seq(self) -> int:
        """The number of the root that the take committed."""
        return self.row.seq

    @property
    def time(self) -> float:
        """The time of the commit: seconds since the epoch, by the writer's clock."""
        return self.row.time

    @property
    def world_size(self) -> int:
        """The number of ranks that took the snapshot."""
        return self.row.world_size

    @property
    def stats(self) -> TakeStats:
        """The logical bytes, new bytes, entries, seconds and requests of the take.

        A snapshot that was just taken also has the bytes that were freed since the previous take.
        """
        stats = msgspec.structs.asdict(self.row.stats)
        return TakeStats(**stats, requests=self.requests, freed_bytes=self._freed_bytes)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the take: versions, settings of torch, device, git commit, variables.

        With many ranks, it is that of rank 0; the number of ranks is :attr:`world_size`. The git
        commit is that of the folder of the script, with ``-dirty`` at the end if tracked files had
        changed. Only variables that are known to change results are noted, such as
        ``CUBLAS_WORKSPACE_CONFIG``. Empty for a snapshot that was imported, that an older version
        took, or that a store with ``environment=False`` took.
        """
        with self.contents.reading():
            return self.contents.environment

    def health(self) -> dict[str, casnap.TensorHealth]:
        """Return numbers about each floating-point tensor, as the take has measured it.

        A store with ``health=True`` has its takes measure: how many elements are NaN or infinite,
        the norm, and the largest absolute value. Of the snapshot, only the trees are read.

        Returns:
            The numbers by path; the path begins with a rank if the tensor belongs to one. Empty if
            nothing was measured (see :attr:`unhealthy`), or if there are too many tensors to note:
            more than about 200,000.

        Raises:
            DamagedError: A node is missing or damaged.
        """
        from casnap.restore.read_health import read_health

        with self.contents.reading():
            return read_health(self.contents)

    @property
    def unhealthy(self) -> int | None:
        """How many tensors had NaN or infinite elements; None if the take did not measure that.

        An infinite tensor of one element does not count, nor do tensors that the
        :class:`HealthOptions` of the take ignore.
        """
        return self.row.unhealthy

    @property
    def requests(self) -> dict[str, int]:
        """How many requests the take made, by kind, on all ranks.

        Empty for a store on this machine, and for a snapshot that was looked up.
        """
        return dict(self._requests)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that users gave the snapshot."""
        return self.row.tags

    @property
    def thinned(self) -> tuple[str, ...]:
        """The keys of the app state that it has lost; see :meth:`casnap.Store.thin`."""
        with self.contents.reading():
            return tuple(map(key_of, self.contents.manifest.thinned))

    def __repr__(self) -> str:
        return f"Snapshot({self.path!r})"

    def __dir__(self) -> list[str]:
        """Return the names for completion, without those that only casnap's own modules use."""
        return [name for name in super().__dir__() if name not in ("contents", "of", "row")]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the snapshot: another process opens its store again, and has no process group."""
        measured = self._requests, self._freed_bytes
        return Snapshot.of, (self._store_view, self.name, self.row, None, self._store, *measured)


# --- taking ---


class TakePlace(NamedTuple):
    """The place of a new snapshot: its path, and how to find its store.

    Attributes:
        label: The name of the snapshot in errors of ranks.
        path: Its path or URI.
        find: Finds or makes the store, on all ranks; returns it and the snapshot's name in it.
        store: The store, if the caller has given one.
    """

    label: str
    path: str
    find: Callable[[Comm], tuple[View, str]]
    store: object

    @classmethod
    def at(
        cls,
        path: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None,
        store: casnap.Store | str | os.PathLike[str] | None,
    ) -> TakePlace:
        """Return the place at a path; with ``store``, ``path`` is the name in that store."""
        if store is None:
            text = full_path = given_path(path)
        else:
            uri = str(store) if isinstance(store, str | os.PathLike) else view_of(store).uri
            text = name_text(path)
            full_path = joined(uri, name_below(text, uri))
        find = partial(find_view_together, path, storage_options, store)
        return cls(text, full_path, find, store)

    @classmethod
    def of(cls, view: View, name: str, store: object) -> TakePlace:
        """Return the place of a local name in the store of a view. The store may not exist yet."""

        def find(comm: Comm) -> tuple[View, str]:
            with comm.reporting_errors():
                view.make()
            return view, name

        return cls(check_name(view.full_of(name)), view.path_of(name), find, store)


def take_snapshot(place: TakePlace, app_state: AppState, options: TakeOptions, pg: Any) -> Snapshot:
    """Take a snapshot together with the other ranks, as :meth:`casnap.Store.take` describes."""
    return _take(place, app_state, options.for_path(place.path), pg)


def try_snapshot(
    place: TakePlace, app_state: AppState, options: TakeOptions, pg: Any
) -> Snapshot | None:
    """Take a snapshot with the other ranks, as :meth:`casnap.Store.try_take` describes."""
    options = options.for_path(place.path, goes_on=True)
    return options.attempt.run(lambda: _take(place, app_state, options, pg), lambda _: None)


def begin_snapshot(
    place: TakePlace, app_state: AppState, options: TakeOptions, pg: Any
) -> casnap.PendingSnapshot:
    """Begin a take together with the other ranks, as :meth:`casnap.Store.async_take` describes."""
    return _begin(place, app_state, options.for_path(place.path), pg)


def try_to_begin(
    place: TakePlace, app_state: AppState, options: TakeOptions, pg: Any
) -> casnap.PendingTry:
    """Begin a take with the other ranks, as :meth:`casnap.Store.try_async_take` describes."""
    from casnap.pending import PendingSnapshot, PendingTry

    options = options.for_path(place.path, goes_on=True)
    return PendingTry(
        options.attempt.run(
            lambda: _begin(place, app_state, options, pg),
            partial(PendingSnapshot.not_begun, place.path),
        )
    )


def _take(place: TakePlace, app_state: AppState, options: TakeOptions, pg: Any) -> Snapshot:
    from casnap.ranks.joining import join
    from casnap.take.capture import LiveState

    comm = join(pg, options.timeout, f"the take of {place.label!r}")
    with options.attempt.finding_store():
        view, name = place.find(comm)
    return take_from(view, comm, partial(LiveState, app_state), name, options, pg, place.store)


FindWitness: TypeAlias = Callable[[View, str, str | None], tuple[Contents | None, str | None]]
"""Looks for a witness: :func:`casnap.latest.find_witness`."""


def witness_state(
    place: TakePlace,
    app_state: AppState,
    options: TakeOptions,
    pg: Any,
    on_mismatch: str,
    find_in: FindWitness,
) -> casnap.WitnessReport:
    """Store or compare a witness, together with the other ranks: see :meth:`casnap.Store.witness`.

    Args:
        place: The place of a snapshot of the same name.
        app_state: As for :meth:`casnap.Store.witness`.
        options: As for a take.
        pg: As for :meth:`casnap.Store.witness`.
        on_mismatch: As for :meth:`casnap.Store.witness`.
        find_in: Looks for a witness in a store and its mirror.
    """
    from casnap.ranks.joining import join
    from casnap.take.capture import LiveState

    check_on_mismatch(on_mismatch)
    comm = join(pg, options.timeout, f"the witness {place.label!r}")
    view, name = place.find(comm)
    source = partial(LiveState, app_state)
    return witness_from(view, comm, source, name, options, on_mismatch, find_in)


def check_on_mismatch(on_mismatch: object) -> None:
    """Check the argument that says what to do if a witness differs.

    Raises:
        ValueError: It is neither "raise" nor "warn".
    """
    if on_mismatch not in ("raise", "warn"):
        raise ValueError(f"on_mismatch is 'raise' or 'warn'; got {on_mismatch!r:.80}")


def witness_from(
    view: View,
    comm: Comm,
    source: Callable[[], StateSource],
    name: str,
    options: TakeOptions,
    on_mismatch: str,
    find_in: FindWitness,
    after: str | None = None,
) -> casnap.WitnessReport:
    """Store or compare a witness, for :meth:`casnap.Store.witness` and integrations.

    Args:
        view: The store.
        comm: The ranks. This function leaves them at its end.
        source: Returns the state of this rank.
        name: The local name that the user gave the witness.
        options: As for a take.
        on_mismatch: As for :meth:`casnap.Store.witness`.
        find_in: Looks for a witness in a store and its mirror.
        after: The local name of the snapshot that it follows; None for the last of its run.

    Raises:
        WitnessError: The state differs.
    """
    from casnap.comparing.witness import witness

    with comm:
        full = check_name(view.full_of(name))
        find = partial(find_in, view, name, after)
        report = witness(view.repository, full, source(), _for_view(options, view), comm, find)
        is_first = comm.rank == 0
    if report.count and on_mismatch == "raise":
        raise WitnessError(_mismatch_text(report, view), report)
    if is_first and (report.count or report.not_compared):
        _log.warning("%s", _mismatch_text(report, view) if report.count else report)
    return report


def _mismatch_text(report: casnap.WitnessReport, view: View) -> str:
    """Return the message about a state that is not what it was when its witness was stored."""
    from casnap.storage import Table

    path = joined(view.repository.backend.uri, Table.witness_name(report.name))
    return (
        f"{report}. What comes first may have made the rest differ. If the run was meant to go "
        f"another way, delete the witness: `casnap rm {shell_word(path)}`, or Store.delete"
    )


def _begin(
    place: TakePlace, app_state: AppState, options: TakeOptions, pg: Any
) -> casnap.PendingSnapshot:
    from casnap.ranks.joining import join
    from casnap.take.capture import LiveState

    comm = join(pg, options.timeout, f"the async_take of {place.label!r}")
    with options.attempt.finding_store():
        view, name = place.find(comm)
    return begin_take(view, comm, LiveState(app_state), name, options, pg, place.store)


def take_from(
    view: View,
    comm: Comm,
    source: Callable[[], StateSource],
    name: str,
    options: TakeOptions,
    pg: Any = None,
    store: object = None,
) -> Snapshot:
    """Take a snapshot together with other ranks, for :meth:`Snapshot.take` and integrations.

    Args:
        view: The store.
        comm: The ranks. This function leaves them at its end.
        source: Returns the state of this rank.
        name: The snapshot's local name.
        options: The options of the take.
        pg: The process group of the snapshot that is returned.
        store: The :class:`casnap.Store` of that snapshot, if there is one already.
    """
    from casnap.take.take import take

    with comm:
        full = check_name(view.full_of(name))
        result = take(view.repository, full, source(), _for_view(options, view), comm)
    return _stored(view, name, pg, store, result)


def begin_take(
    view: View,
    comm: Comm,
    source: StateSource,
    name: str,
    options: TakeOptions,
    pg: Any = None,
    store: object = None,
    on_stored: Callable[[Snapshot], object] | None = None,
) -> casnap.PendingSnapshot:
    """Begin a take together with other ranks, for :meth:`Snapshot.async_take` and integrations.

    Args:
        view: The store.
        comm: The ranks. The take leaves them at its end.
        source: The state of this rank.
        name: The snapshot's local name.
        options: The options of the take.
        pg: The process group of the snapshot that :meth:`PendingSnapshot.wait` returns.
        store: The :class:`casnap.Store` of that snapshot, if there is one already.
        on_stored: Called with that snapshot before it is first returned.
    """
    from casnap.pending import PendingSnapshot
    from casnap.take.take import async_take

    options = _for_view(options, view)
    full = check_name(view.full_of(name))
    take = async_take(view.repository, full, source, options, comm)

    def stored(result: TakeResult) -> Snapshot:
        nonlocal on_stored
        snapshot = _stored(view, name, pg, store, result)
        call, on_stored = on_stored, None
        if call is not None:
            call(snapshot)
        return snapshot

    return PendingSnapshot(view.path_of(name), take, stored)


def _for_view(options: TakeOptions, view: View) -> TakeOptions:
    """Return the options of a take with the hooks and the settings of a store."""
    return replace(
        options,
        hooks=view.hooks,
        threads=options.threads or view.threads,
        environment=options.environment and view.environment,
        health=options.health or view.health,
    )


def _stored(view: View, name: str, pg: Any, store: object, result: TakeResult) -> Snapshot:
    """Return the snapshot that a take has stored."""
    measured = result.requests, result.freed_bytes
    return Snapshot.of(view, name, result.row, pg, store, *measured)
