"""One take of leaves that a trainer makes itself, by ranks that have joined.

:meth:`casnap.Snapshot.take` captures an app state. A trainer whose framework divides tensors in its
own way hands over a source of leaves instead (``take/capture.py``). This module imports
``snapshot.py``, ``latest.py``, ``view.py``, ``take`` and lower layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from casnap.latest import find_witness
from casnap.ranks.comm import Comm
from casnap.ranks.joining import join
from casnap.runtime.environment import crowded_folders, local_path
from casnap.runtime.lazy_imports import ModuleLater
from casnap.runtime.nesting import is_within_call, refuse_nested_take
from casnap.snapshot import Snapshot, begin_take, take_from, witness_from
from casnap.storage import Location
from casnap.take.capture import StateSource
from casnap.take.options import TakeOptions
from casnap.view import View, find_view_together

if TYPE_CHECKING:
    import casnap
    from casnap import pending
else:
    casnap, pending = ModuleLater("casnap"), ModuleLater("casnap.pending")


class JoinedTake:
    """One take, which all ranks make together.

    Each rank makes one of these objects, then calls :meth:`take`, :meth:`begin` or :meth:`witness`
    once, after which the ranks leave ``comm``.

    Args:
        path: The path of the snapshot, or its name in ``store``.
        options: The options of the take.
        comm: Returns the ranks; by default this joins the whole world.
        store: The :class:`casnap.Store` for the snapshot; None: the store of ``path``.
        storage_options: How to reach a remote store.
        root: A folder of this machine that the user has named for checkpoints. It becomes the store
            for a path deeper in it, if there is no store above that path yet.
        create: Whether to make the store if there is none. A witness follows a snapshot, so its
            store is there, unless a file system has been unmounted.
        advice: Advice for the error if the caller is inside another call of casnap.

    Attributes:
        comm: The ranks.
        view: The store, for casnap's own trainers.
        full_name: The full name of the snapshot in the store.

    Raises:
        CasnapError: The caller is inside another call of casnap, or the store cannot be used.
        RankError: Another rank failed, or did not come in time.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: TakeOptions,
        *,
        comm: Callable[[], Comm] | None = None,
        store: object = None,
        storage_options: Mapping[str, Any] | None = None,
        root: str | os.PathLike[str] | None = None,
        create: bool = True,
        advice: str = "",
    ) -> None:
        refuse_nested_take(advice)
        self._options = options
        operation = f"the save of {os.fspath(path)!r}"
        self.comm = join(None, options.timeout, operation) if comm is None else comm()
        if store is None and root is not None and self.comm.rank == 0:
            with self.comm.reporting_errors():
                store = _store_in(root, path)
        self.view: View
        self.view, self._name = find_view_together(
            path, storage_options, store, self.comm, create=create
        )
        self.full_name: str = self.view.full_of(self._name)

    @staticmethod
    def may_begin() -> bool:
        """Whether a take may begin now.

        It may not begin inside another call of casnap, as in a signal handler that interrupts one.
        """
        return not is_within_call()

    def take(self, source: Callable[[], StateSource]) -> Snapshot:
        """Take the snapshot; return once it is durable.

        Args:
            source: Returns the state that this rank stores.

        Raises:
            CasnapError: This rank or another one failed; nothing was committed.
        """
        return take_from(self.view, self.comm, source, self._name, self._options)

    def begin(
        self,
        source: Callable[[], StateSource],
        on_stored: Callable[[Snapshot], object] | None = None,
    ) -> pending.PendingSnapshot:
        """Copy the state of this rank, and take the snapshot in the background.

        Args:
            source: Returns the state that this rank stores.
            on_stored: ``wait()`` calls it with the snapshot, once the snapshot is durable.

        Raises:
            CasnapError: This rank or another one failed while the state was copied.
        """
        with self.comm.reporting_errors():
            state = source()
        return begin_take(
            self.view, self.comm, state, self._name, self._options, on_stored=on_stored
        )

    def witness(
        self,
        source: Callable[[], StateSource],
        steps: int,
        *,
        on_mismatch: Literal["raise", "warn"] = "raise",
    ) -> casnap.WitnessReport:
        """Store the digests of the state some steps after the snapshot, or compare it with them.

        The witness is called ``<name>+<steps>``. It stays as long as the snapshot does; see
        :meth:`casnap.Store.witness`.

        Args:
            source: Returns the state of this rank.
            steps: How many steps were made since the snapshot at the path was taken or loaded.
            on_mismatch: "raise" raises an error if the state differs; "warn" logs it.

        Raises:
            WitnessError: The state differs, on any rank. All ranks raise it.
            CasnapError: This rank or another one failed.
        """
        return witness_from(
            self.view,
            self.comm,
            source,
            f"{self._name}+{steps}",
            self._options,
            on_mismatch,
            find_witness,
            self._name,
        )


def _store_in(root: str | os.PathLike[str], path: str | os.PathLike[str]) -> str | None:
    """Return ``root`` if it has to become the store for ``path``; else None.

    A name with slashes makes the path lie deeper in the root. Without this function, each parent
    folder of such paths would become a store of its own.

    Args:
        root: The folder that the user has named for checkpoints.
        path: The path of the snapshot.

    Raises:
        StoreError: The root holds a store of another user.
    """
    root, path = local_path(root), local_path(path)
    if "://" in root or "://" in path:
        return None
    folder, parent = (Path(os.path.realpath(place)) for place in (root, Path(path).parent))
    is_deeper = folder in parent.parents and folder not in crowded_folders()
    if not is_deeper or Location.of_snapshot(path).exists:
        return None
    Location.of_snapshot(folder / Path(path).name).backend.check_changes()
    return str(folder)
