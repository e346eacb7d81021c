"""Before a take begins, all ranks check that they were called with the same arguments.

Some arguments may differ, such as the order of the keys. All ranks then use those of rank 0.
"""

from __future__ import annotations

import os

import msgspec

from casnap.errors import DamagedError, SnapshotExistsError
from casnap.format.codec import Codec
from casnap.format.names import component_of
from casnap.format.records import Root
from casnap.ranks.comm import Comm
from casnap.storage import ForeignCheckpoints, Location, Repository, Table
from casnap.take.options import TakeOptions, unclear_commits


class Agreement(msgspec.Struct, array_like=True):
    """A message between ranks: what the sender was asked to take. All ranks follow rank 0's.

    Attributes:
        store_id: The id of the store.
        name: The name of the snapshot.
        keys: The keys of the app state, as components: a key need not be Unicode.
        options: Other arguments that must be the same on all ranks, by their names for messages.
        codec: How chunks are stored. Only rank 0 looks up the setting of the store.
        seed: A random number. Rank 0's chooses which bytes of replicas are compared.
        root: The newest root, if the store is in a bucket. Rank 0 reads it for all ranks, since
            each read is a request.
        lists: Whether rank 0 lists the store's packs for all ranks. A rank must know the length of
            a pack before it relies on chunks in the pack.
    """

    store_id: str
    name: str
    keys: list[str]
    options: dict[str, str]
    codec: Codec
    seed: int
    root: Root | None = None
    lists: bool = False


def agree(
    store: Repository,
    name: str,
    keys: list[str],
    options: TakeOptions,
    comm: Comm,
    *,
    is_new: bool = True,
) -> Agreement:
    """Check that all ranks ask for the same take, and return rank 0's message.

    All ranks read their states in the order of the keys in this message, since a ``state_dict()``
    may be a collective.

    Args:
        store: The store.
        name: The name of the snapshot.
        keys: The keys of this rank.
        options: The options of the take.
        comm: The ranks.
        is_new: Whether the name must be free.

    Raises:
        SnapshotExistsError: The store has a snapshot of this name.
        StateError: The ranks were called with different arguments.
    """
    root, codec = None, Codec.RAW
    if comm.rank == 0 and is_new:
        root = _check_name_is_free(store, name, options)
        codec = store.settings(root).codec
    mine = Agreement(
        store.config.store_id,
        name,
        [component_of(key) for key in keys],
        {
            "the option overwrite=": str(options.overwrite),
            "the option allow_pickle=": str(options.allow_pickle),
            "the option max_pending=": str(options.max_pending),
            "the option retention=": repr(options.retention),
            "the option health=": str(options.health),
            "the verb": (
                "try_take or try_async_take" if options.attempt.goes_on else "take or async_take"
            ),
        },
        codec,
        seed=int.from_bytes(os.urandom(7), "big"),
        root=root if store.backend.costs.one_asks else None,
        lists=comm.size > 1 and store.has_to_list_packs(),
    )
    agreed = comm.broadcast_message(mine, Agreement)
    if agreed.root is not None and comm.rank:
        store.observe_root(agreed.root)
    for subject, on_this_rank, on_rank_0 in (
        ("the store", mine.store_id, agreed.store_id),
        ("the name", mine.name, agreed.name),
        ("the keys of app_state", sorted(mine.keys), sorted(agreed.keys)),
        *((key, text, agreed.options[key]) for key, text in mine.options.items()),
    ):
        comm.check_same(subject, on_this_rank, on_rank_0)
    return agreed


def check_name(table: Table, name: str, options: TakeOptions, uri: str) -> None:
    """Check that a take may make a snapshot of this name.

    A take of this process may have raised an error after its snapshot was committed. The name of
    such a snapshot is free: the new one replaces it.

    Raises:
        SnapshotExistsError: The table has another snapshot of this name.
    """
    row = table.get(name)
    is_own = row is not None and row.commit in unclear_commits
    table.check_free(name, overwrite=options.overwrite or is_own, uri=uri)


def _check_name_is_free(store: Repository, name: str, options: TakeOptions) -> Root:
    """Check in the store that a take may make a snapshot of this name; return the root read.

    Raises:
        SnapshotExistsError: The newest root has a snapshot of this name.
    """
    Location(store.backend, name).check_path_is_free()
    if store.backend.folder is not None:
        ForeignCheckpoints(store.backend.folder / name).check_none()

    def check(root: Root) -> Root:
        table = store.table(root)
        check_name(table, name, options, store.backend.uri)
        return root

    try:
        return check(store.recent())
    except (SnapshotExistsError, DamagedError):
        # The recent root may be a moment old.
        return store.read_at_newest(check)
