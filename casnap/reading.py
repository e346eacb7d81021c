"""Reading a snapshot without restoring it: entries, tensors, parts of tensors, a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from casnap.format.entries import Entry
from casnap.format.names import component_of
from casnap.runtime.progress import Progress
from casnap.runtime.threads import collector_paused
from casnap.storage.contents import Contents

if TYPE_CHECKING:
    import torch

    from casnap.restore.handle import Handle
    from casnap.restore.renaming import Rename
    from casnap.restore.report import RestoreReport
    from casnap.restore.selection import Index


class EntriesByPath(dict[str, Entry]):
    """The entries of a snapshot by path, ``<rank>/<key>/<path>``.

    A global entry stands under the prefix of each rank.

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


class Reading:
    """The half of :class:`casnap.Snapshot` that reads what a snapshot holds.

    No method here talks to other ranks: each process reads for itself.

    Attributes:
        contents: The tree of the snapshot.
    """

    contents: Contents

    def __getitem__(self, path: str) -> Handle:
        """Return a handle on a tensor, value or container, without reading it.

        ``snapshot["model/weight"]`` has ``.shape``, ``.dtype`` and ``.nbytes``; its ``[index]``
        reads a part, ``.read()`` all of it.

        Args:
            path: As for :meth:`read_objects`, but no glob.

        Raises:
            EntryNotFoundError: There is no entry of this path, or several ranks have one each.
        """
        from casnap.restore.handle import handle_of

        with self.contents.reading():
            return handle_of(self.contents, path)

    def __contains__(self, path: object) -> bool:
        """Whether :meth:`__getitem__` finds an entry."""
        with self.contents.reading():
            return isinstance(path, str) and self.contents.find(path) is not None

    # Without this, Python would try the numbers from 0 on as paths.
    __iter__ = None

    def handles(self, pattern: str = "*") -> dict[str, Handle]:
        """Return handles on the tensors and values that a glob matches, each once, by path.

        Args:
            pattern: As for :meth:`read_objects`; by default everything.
        """
        from casnap.restore.handle import handles

        with self.contents.reading():
            return handles(self.contents, pattern)

    def read_objects(
        self,
        paths: str | Iterable[str],
        memory_budget_bytes: int | None = None,
        *,
        allow_pickle: bool = False,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Read many tensors and values in one pass.

        Chunks that lie side by side are read together, and each chunk once.

        Args:
            paths: Paths and globs (``*`` crosses ``/``). ``3/model/w`` is what rank 3 sees,
                ``global/model/w`` a global entry. Without one of these, a path or glob means
                global entries, and what single ranks have of their own. A glob matches tensors and
                values; a path may name a container, too.
            memory_budget_bytes: The most bytes of buffers besides the result.
            allow_pickle: As for :meth:`casnap.Snapshot.restore`.
            progress: Called as ``progress(phase, done, total)``, in bytes, from any thread.

        Returns:
            Each object by its path: a path as you gave it; a match of a glob by its own path, which
            begins with a rank if the entry belongs to one.

        Raises:
            EntryNotFoundError: A path or glob names nothing, or a path without a rank names entries
                of several ranks.
            DamagedError: Stored bytes are missing or damaged.
        """
        given: Any = paths
        asked = [given] if isinstance(given, str) or not isinstance(given, Iterable) else [*given]
        if not all(isinstance(path, str) for path in asked):
            raise TypeError(
                f"read_objects() takes a path or glob, or a list of them; got {paths!r:.200}"
            )
        with collector_paused(), self.contents.reading():
            from casnap.restore.read_object import read_objects

            return read_objects(
                self.contents,
                asked,
                memory_budget_bytes,
                allow_pickle=allow_pickle,
                progress=progress,
            )

    def read_object(
        self,
        path: str,
        obj_out: Any = None,
        memory_budget_bytes: int | None = None,
        *,
        index: Index | None = None,
        allow_pickle: bool = False,
    ) -> Any:
        """Read one tensor or value, a part of a tensor, or everything below a container.

        Args:
            path: A path of :meth:`get_manifest`, with or without the rank. Without it, rank 0's
                entry is read if there is no global one.
            obj_out: A tensor of the same shape to read into; another dtype is cast.
            memory_budget_bytes: The most bytes of buffers besides the result. One chunk is always
                allowed.
            index: Ints, slices and ``...``, as in ``tensor[index]``. Only the chunks that hold
                selected elements are read.
            allow_pickle: As for :meth:`restore`.

        Raises:
            EntryNotFoundError: There is no entry of this path. The error names the nearest one.
            MismatchError: ``obj_out`` has another shape.
            DamagedError: Stored bytes are missing or damaged.
        """
        # To load these modules would set off a visit to all objects of torch, several times as long
        # as a small read.
        with collector_paused(), self.contents.reading():
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
            own = frozenset(f"{r}/{path}" for r in ranks for path in contents.own_paths(r))
            return EntriesByPath(entries, own)

    def get_state_dict_for_key(self, key: str, *, allow_pickle: bool = False) -> dict[str, Any]:
        """Return the state that was taken under a key of the app state, in new memory.

        Raises:
            EntryNotFoundError: The app state had no such key.
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
        progress: Progress | None = None,
    ) -> RestoreReport:
        """Fill the parameters and persistent buffers of a module in place, and nothing else.

        Unlike :meth:`casnap.Snapshot.restore`, this runs no ``load_state_dict`` and no hook, and
        needs no app state. Of a sharded module (FSDP2, tensor parallelism), each rank fills its own
        parts. Shapes and dtypes are checked before anything is written; another dtype is cast.

        Args:
            module: The module.
            prefix: Where its tensors are: a key such as ``model``, or a submodule in it, as in
                ``model/encoder`` for ``model/encoder.weight``. It may begin with a rank.
            rename: The name in the module for each name below the prefix: a mapping, or a
                function. None leaves an entry out; a mapping leaves other names as they are.
            device: Where tensors on the meta device get their memory; ties are kept. Others must
                be there already.
            strict: Whether to raise if module and snapshot differ. Otherwise what fits is filled;
                the rest stays as it is.
            progress: Called as ``progress(phase, done, total)``, in bytes, from any thread.

        Returns:
            What was not filled, or has no counterpart in the module.

        Raises:
            EntryNotFoundError: There is nothing below the prefix, or several ranks have own tensors
                there and it does not name the rank.
            MismatchError: With ``strict``, module and snapshot differ; the error lists all
                differences, and nothing was written. Or two names were renamed to one.
            DamagedError: Stored bytes are missing or damaged. Tensors may hold new values already.
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
                progress=progress,
            )
