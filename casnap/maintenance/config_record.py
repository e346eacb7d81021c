"""``casnap.json`` where it is missing or damaged: what is wrong, and making it anew."""

from __future__ import annotations

from casnap.backends import Backend
from casnap.errors import CasnapError, DamagedError, UnavailableError
from casnap.format.records import CONFIG_KEY, StoreConfig
from casnap.maintenance.damage import ALL, READ_ERRORS, Damage, listed_roots
from casnap.storage.config import config_content, config_in, read_config
from casnap.storage.location import holds
from casnap.storage.objects import Objects
from casnap.storage.roots import read_root


def config_damages(objects: Objects) -> list[Damage]:
    """Return what is wrong with the ``casnap.json`` of an open store."""
    try:
        if read_config(objects.backend) == objects.config:
            return []
        kind, why = "changed", "it has changed since this store was opened"
    except UnavailableError:
        raise
    except CasnapError as e:
        kind, why = "changed" if holds(objects.backend, CONFIG_KEY) else "missing", str(e)
    return [Damage(kind, CONFIG_KEY, why, hurts={ALL: None})]


def copied_config(backend: Backend) -> StoreConfig:
    """Return the copy of ``casnap.json`` that the newest root has, or the newest that has one.

    Raises:
        DamagedError: No root has one.
    """
    numbers = listed_roots(backend)
    first = None
    for seq in reversed(numbers):
        try:
            root = read_root(backend, seq)
        except READ_ERRORS as e:
            if isinstance(e, UnavailableError):
                raise
            continue
        config = config_in(root, backend.uri)
        if config is not None:
            return config
        first = root if seq == 0 else None
    known = "Its store_id and chunk_size are not known"
    # Earlier versions gave root 0 of format 1 an id of its own.
    if first is not None and first.format > 1:
        known = f"Its store_id is {first.commit.hex()}, as root 0 says; its chunk_size is not known"
    raise DamagedError(
        f"{backend.uri}: {CONFIG_KEY} cannot be made anew, since no root has a copy of it: "
        "the store was last written by a casnap before these copies. Restore it from a backup. "
        f"{known}; the chunk_size is 1048576 unless another was chosen"
    )


def restore_config(backend: Backend, config: StoreConfig) -> None:
    """Put ``casnap.json`` anew."""
    content = config_content(config)
    if not backend.put_if_absent(CONFIG_KEY, content):
        backend.delete(CONFIG_KEY)
        backend.put_if_absent(CONFIG_KEY, content)
    backend.sync()
