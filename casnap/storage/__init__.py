"""The bytes side: a repository of chunks, trees and commits on any backend, without torch.

Its folders are its rooms. A room may import the rooms that are listed before it, but ``opening``
does not import ``writing``:

- ``commit_log``: the roots of a store, its settings and ``casnap.json``, and put-if-absent.
- ``packs``: files of many chunks; writes and reads them.
- ``lookup``: finds in which pack a chunk is: the index, and the caches of this host and process.
- ``reading``: the repository, which reads nodes and chunks by digest; the table of snapshots; the
  cache of chunks.
- ``writing``: new packs and segments, and the commit of a take.
- ``opening``: finds, makes and opens a store.
- ``snapshots``: the contents of each snapshot, which of them stay, and commits that add none:
  prune, thin, rewind, tag.
- ``collecting``: finds garbage, condemns it, and deletes it once its grace is over.

The rest of casnap uses only the names below; import-linter refuses any other. Check, repair and
usage need more names from inside the rooms: ``inspecting.py``, above all rooms, lists these.

The rooms import ``backends``, ``format``, ``runtime``, ``errors`` and ``version``; neither
``state``, ``ranks`` nor torch. Begin with ``reading/repository.py``, then read
``writing/session.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from casnap.runtime.lazy_imports import imported_later

if TYPE_CHECKING:
    from casnap.storage.collecting.automatic import AutomaticCollector as AutomaticCollector
    from casnap.storage.collecting.automatic import Outlook as Outlook
    from casnap.storage.collecting.gc import GcOptions as GcOptions
    from casnap.storage.collecting.gc import GcReport as GcReport
    from casnap.storage.collecting.gc import collect as collect
    from casnap.storage.commit_log.put_if_absent_probe import PutIfAbsent as PutIfAbsent
    from casnap.storage.commit_log.settings import CODECS as CODECS
    from casnap.storage.commit_log.settings import new_settings as new_settings
    from casnap.storage.opening.creation import chunk_size_of as chunk_size_of
    from casnap.storage.opening.foreign_checkpoints import ForeignCheckpoints as ForeignCheckpoints
    from casnap.storage.opening.location import Location as Location
    from casnap.storage.opening.opening import open_at as open_at
    from casnap.storage.packs.chunk_reads import Fill as Fill
    from casnap.storage.packs.chunk_reads import ReadOptions as ReadOptions
    from casnap.storage.packs.chunk_reads import Want as Want
    from casnap.storage.packs.pack_writer import Raw as Raw
    from casnap.storage.packs.pack_writer import SelectNew as SelectNew
    from casnap.storage.reading.cached_stores import CachedStore as CachedStore
    from casnap.storage.reading.repository import Repository as Repository
    from casnap.storage.reading.table import Table as Table
    from casnap.storage.snapshots.cell_pairs import bases_in as bases_in
    from casnap.storage.snapshots.changes import Changes as Changes
    from casnap.storage.snapshots.contents import Contents as Contents
    from casnap.storage.snapshots.contents import Entries as Entries
    from casnap.storage.snapshots.contents import Listed as Listed
    from casnap.storage.snapshots.marker_files import Markers as Markers
    from casnap.storage.snapshots.published import TagMove as TagMove
    from casnap.storage.snapshots.published import Tags as Tags
    from casnap.storage.snapshots.retention import Best as Best
    from casnap.storage.snapshots.retention import PruneReport as PruneReport
    from casnap.storage.snapshots.retention import Retention as Retention
    from casnap.storage.snapshots.retention import Verdict as Verdict
    from casnap.storage.snapshots.run_changes import Runs as Runs
    from casnap.storage.snapshots.run_upkeep import Upkeep as Upkeep
    from casnap.storage.writing.copying import ChunkBuffer as ChunkBuffer
    from casnap.storage.writing.handovers import Handover as Handover
    from casnap.storage.writing.hooks import CommitHooks as CommitHooks
    from casnap.storage.writing.reliance import Reliance as Reliance
    from casnap.storage.writing.session import Session as Session
    from casnap.storage.writing.starting_over import again as again

__getattr__, __all__ = imported_later(globals())
