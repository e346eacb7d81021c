"""Check ``casnap.json``, and write it again if it is missing or damaged."""

from __future__ import annotations

from casnap.backends import Backend
from casnap.errors import CasnapError, DamagedError, UnavailableError
from casnap.format.records import CONFIG_KEY, Root, StoreConfig
from casnap.maintenance.damage import ALL, READ_ERRORS, Damage, listed_roots
from casnap.storage import Repository
from casnap.storage.inspecting import config_content, config_in, read_config, read_root


def check_config(store: Repository, root: Root) -> None:
    """Check that the ``casnap.json`` of an open store equals the copy in its newest root.

    Raises:
        DamagedError: They differ, so ``casnap.json`` belongs to another store.
    """
    if config_in(root) not in (None, store.config):
        raise DamagedError(
            f"{store.backend.where(CONFIG_KEY)} is not the record of this store: its newest root "
            "has another one. Restore this file from a backup; or delete it, and `casnap repair` "
            "makes it anew from the root"
        )


def config_damages(store: Repository, root: Root | None) -> list[Damage]:
    """Return the damages of the ``casnap.json`` of an open store; there is one at most.

    Args:
        store: The store.
        root: Its newest root; None if that cannot be read.
    """
    try:
        if root is not None:
            check_config(store, root)
        if read_config(store.backend) == store.config:
            return []
        kind, message = "changed", "it has changed since this store was opened"
    except UnavailableError:
        raise
    except CasnapError as e:
        is_there = store.backend.size_if_there(CONFIG_KEY) is not None
        kind, message = "changed" if is_there else "missing", str(e)
    return [Damage(kind, CONFIG_KEY, message, hurts={ALL: None})]


def lost_config(backend: Backend) -> StoreConfig | None:
    """Return the record from which a lost ``casnap.json`` can be written again.

    Returns:
        The copy of the record in the newest root that has one; None if the file is not lost.

    Raises:
        NotAStoreError: There is no store.
        DamagedError: The file is lost, and no root has a copy.
    """
    try:
        read_config(backend)
    except DamagedError:
        return _copied_config(backend)
    return None


def _copied_config(backend: Backend) -> StoreConfig:
    for seq in reversed(listed_roots(backend)):
        try:
            root = read_root(backend, seq)
        except READ_ERRORS:
            continue
        config = config_in(root)
        if config is not None:
            return config
    raise DamagedError(
        f"{backend.uri}: {CONFIG_KEY} cannot be made anew, since no root that can be read has a "
        "copy of it. Restore it from a backup"
    )


def restore_config(backend: Backend, config: StoreConfig) -> None:
    """Write ``casnap.json`` again. If there is a file of this name, delete it first."""
    content = config_content(config)
    if not backend.put_if_absent(CONFIG_KEY, content):
        backend.delete(CONFIG_KEY)
        backend.put_if_absent(CONFIG_KEY, content)
    backend.sync()
