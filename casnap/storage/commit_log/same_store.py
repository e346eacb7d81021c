"""Check that a place still holds the store that was opened there.

A folder can be moved away, and another store can be moved to its path. An operation that began with
the first store must then change nothing in the second.
"""

from __future__ import annotations

from casnap.backends.base import Backend
from casnap.errors import CasnapError, StoreError, UnavailableError
from casnap.format.records import Root
from casnap.storage.commit_log.config import read_config
from casnap.storage.commit_log.roots import last_listed


def id_in(root: Root) -> str | None:
    """Return the store's id according to a root; None if the root does not have it."""
    store_id = root.store.get("store_id")
    return store_id if isinstance(store_id, str) else None


def check_same_store(backend: Backend, store_id: str) -> None:
    """Check that a place holds the store with a given id.

    The check passes if ``casnap.json`` or the newest root has the id. If only one has it, the other
    is damaged or comes from another store: a repair can mend that. The check also passes if neither
    can be read.

    Args:
        backend: The backend of the place.
        store_id: The id.

    Raises:
        StoreError: The place holds another store.
        UnavailableError: The place cannot be read now.
    """
    ids = {_id_in_record(backend), _id_in_newest(backend)} - {None}
    if ids and store_id not in ids:
        raise StoreError(
            f"{backend.uri}: another store has come to this place since it was opened, so nothing "
            f"is changed there. Open it anew, or find the first one (its id is {store_id}) where "
            "it was moved to"
        )


def _id_in_record(backend: Backend) -> str | None:
    try:
        return read_config(backend).store_id
    except UnavailableError:
        raise
    except (FileNotFoundError, CasnapError):
        return None


def _id_in_newest(backend: Backend) -> str | None:
    try:
        return id_in(last_listed(backend))
    except UnavailableError:
        raise
    except (FileNotFoundError, CasnapError):
        return None
