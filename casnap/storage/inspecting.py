"""The names from inside the storage's rooms that only check, repair and usage use.

These three must know packs, segments and roots as they lie in the store; no other code needs that.
They only read, except for :class:`Mending`, by which a repair writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from casnap.runtime.lazy_imports import imported_later

if TYPE_CHECKING:
    from casnap.storage.collecting.stored_files import StoredFiles as StoredFiles
    from casnap.storage.commit_log.config import config_content as config_content
    from casnap.storage.commit_log.config import config_in as config_in
    from casnap.storage.commit_log.config import read_config as read_config
    from casnap.storage.commit_log.put_if_absent_probe import (
        put_if_absent_warnings as put_if_absent_warnings,
    )
    from casnap.storage.commit_log.roots import COPIES as COPIES
    from casnap.storage.commit_log.roots import read_root as read_root
    from casnap.storage.lookup.chains import ShortestChains as ShortestChains
    from casnap.storage.lookup.chains import bases_at as bases_at
    from casnap.storage.lookup.given_places import GivenPlaces as GivenPlaces
    from casnap.storage.lookup.index import IndexView as IndexView
    from casnap.storage.lookup.index_cache import preferred as preferred
    from casnap.storage.lookup.pack_lengths import listed_packs as listed_packs
    from casnap.storage.packs.chunk_reads import Failure as Failure
    from casnap.storage.packs.chunk_reads import Reason as Reason
    from casnap.storage.packs.chunk_reads import is_possible as is_possible
    from casnap.storage.packs.footers import read_footer as read_footer
    from casnap.storage.snapshots.marker_files import unknown_markers as unknown_markers
    from casnap.storage.snapshots.references import MANIFEST as MANIFEST
    from casnap.storage.snapshots.references import digest_in as digest_in
    from casnap.storage.snapshots.references import is_node as is_node
    from casnap.storage.snapshots.references import references as references
    from casnap.storage.snapshots.references import walk as walk
    from casnap.storage.writing.mending import Mending as Mending

__getattr__, __all__ = imported_later(globals())
