"""Checks before a take begins: the name is free, and all ranks pass the same arguments."""

from __future__ import annotations

import os

import msgspec

from casnap.errors import DamagedError, SnapshotExistsError
from casnap.format.codec import Codec
from casnap.format.names import component_of
from casnap.format.records import Root
from casnap.ranks.comm import Comm
from casnap.storage.catalog.other_formats import check_no_other_form
from casnap.storage.catalog.settings import codec_of
from casnap.storage.catalog.table import check_free, check_path_is_free
from casnap.storage.chunks.objects import Objects
from casnap.take.options import TakeOptions


class Request(msgspec.Struct, array_like=True):
    """The arguments of a take on one rank.

    Attributes:
        store: The id of the store.
        name: The name of the snapshot.
        keys: The keys of the app state, as components: a key need not be Unicode.
        options: The options that must be the same on all ranks.
        codec: How chunks are stored; that of rank 0 counts, which looks what the store is set to.
        seed: A random number; that of rank 0 chooses which bytes of replicas are compared.
        root: The newest root, which rank 0 reads for all where each look is a request.
    """

    store: str
    name: str
    keys: list[str]
    options: dict[str, str]
    codec: Codec
    seed: int
    root: Root | None = None


def agree_on_request(
    objects: Objects,
    name: str,
    keys: list[str],
    options: TakeOptions,
    comm: Comm,
) -> Request:
    """Return the request of rank 0, once every rank has checked that its own is the same.

    Its keys are in the order in which all ranks read their states: reading may be a collective of
    the trainer's.

    Args:
        objects: The store.
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
        root = _check_name_is_free(objects, name, options)
        codec = codec_of(root, objects.backend.uri)
    own = Request(
        objects.config.store_id,
        name,
        [component_of(key) for key in keys],
        {
            "overwrite": str(options.overwrite),
            "allow_pickle": str(options.allow_pickle),
            "max_pending": str(options.max_pending),
            "retention": repr(options.retention),
        },
        codec,
        seed=int.from_bytes(os.urandom(7), "big"),
        root=root if objects.backend.costly_requests else None,
    )
    first = comm.broadcast_message(own, Request)
    if first.root is not None and comm.rank:
        objects.observe_root(first.root)
    for what, here, on_rank_0 in (
        ("the store", own.store, first.store),
        ("the name", own.name, first.name),
        ("the keys of app_state", sorted(own.keys), sorted(first.keys)),
        *((f"the option {key}=", text, first.options[key]) for key, text in own.options.items()),
    ):
        comm.check_same(what, here, on_rank_0)
    return first


def _check_name_is_free(objects: Objects, name: str, options: TakeOptions) -> Root:
    """Check it in the newest root, and return that."""
    check_path_is_free(objects.backend, name)
    if objects.backend.folder is not None:
        check_no_other_form(objects.backend.folder / name)

    def check(root: Root) -> Root:
        table = objects.table(root)
        check_free(table, name, overwrite=options.overwrite, uri=objects.backend.uri)
        return root

    try:
        return check(objects.recent())
    except (SnapshotExistsError, DamagedError):
        # That root may be a moment old.
        return objects.current(check)
