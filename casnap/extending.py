"""What a guest of casnap stands on: a trainer, an engine, or a report of its own.

A guest imports the names of ``casnap`` and ``casnap.errors``, and the names below: nothing from
within. import-linter holds casnap's own guests to that: ``serving/``, ``integrations/`` and
``report/``. Each name is loaded when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from casnap.runtime.later import imported_later

if TYPE_CHECKING:
    from casnap.backends import Backend as Backend
    from casnap.backends.announcement import Note as Note
    from casnap.backends.local.durability import sync_folder as sync_folder
    from casnap.backends.local.file_io import read_file as read_file
    from casnap.backends.local.file_io import read_run as read_run
    from casnap.backends.local.file_io import write_cached as write_cached
    from casnap.backends.local.file_locks import lock as lock
    from casnap.backends.local.file_locks import open_to_lock as open_to_lock
    from casnap.backends.local.local_paths import as_written as as_written
    from casnap.backends.local.local_paths import exists as exists
    from casnap.backends.local.local_paths import is_file as is_file
    from casnap.backends.local.local_paths import is_folder as is_folder
    from casnap.backends.local.local_paths import is_link as is_link
    from casnap.backends.local.local_paths import is_taken as is_taken
    from casnap.backends.local.local_paths import matching as matching
    from casnap.backends.local.local_paths import paths_in as paths_in
    from casnap.backends.local.local_paths import status as status
    from casnap.backends.local.owners import Owners as Owners
    from casnap.backends.local.owners import new_file_in as new_file_in
    from casnap.backends.local.owners import owners_by as owners_by
    from casnap.backends.local.safe_paths import OpenFolder as OpenFolder
    from casnap.backends.local.safe_paths import create_file as create_file
    from casnap.backends.local.safe_paths import folder_at as folder_at
    from casnap.backends.local.safe_paths import open_file as open_file
    from casnap.backends.local.safe_paths import unlink_at as unlink_at
    from casnap.backends.local.system_errors import ABSENT as ABSENT
    from casnap.backends.local.system_errors import NO_SPACE as NO_SPACE
    from casnap.backends.local.system_errors import is_of_the_place as is_of_the_place
    from casnap.backends.local.system_errors import translated as translated
    from casnap.backends.remote.uris import joined as joined
    from casnap.files.dcp_names import DCP_VERSION as DCP_VERSION
    from casnap.files.dcp_names import DictKey as DictKey
    from casnap.files.dcp_names import ObjectPath as ObjectPath
    from casnap.files.dcp_names import Stored as Stored
    from casnap.files.dcp_names import as_in_dcp as as_in_dcp
    from casnap.files.dcp_names import casnap_path as casnap_path
    from casnap.files.dcp_names import containers_above as containers_above
    from casnap.files.dcp_names import described as described
    from casnap.files.dcp_names import first_keys as first_keys
    from casnap.files.dcp_names import with_keys as with_keys
    from casnap.files.export_output import ExportOutput as ExportOutput
    from casnap.files.export_output import check_local as check_local
    from casnap.files.export_output import check_outside as check_outside
    from casnap.files.layout import FileLayout as FileLayout
    from casnap.files.layout import PlacedChunk as PlacedChunk
    from casnap.files.layout import PlacedTensor as PlacedTensor
    from casnap.files.layout import PlannedFile as PlannedFile
    from casnap.files.safetensors_header import header_of as header_of
    from casnap.files.safetensors_header import itemsize_of as itemsize_of
    from casnap.files.safetensors_header import read_header as read_header
    from casnap.format.decoding import json_decoder as json_decoder
    from casnap.format.delta import apply_delta as apply_delta
    from casnap.format.delta import base_of as base_of
    from casnap.format.delta import changed_by as changed_by
    from casnap.format.digest import DIGEST_SIZE as DIGEST_SIZE
    from casnap.format.digest import Digest as Digest
    from casnap.format.digest import digest_of as digest_of
    from casnap.format.digest import split_digests as split_digests
    from casnap.format.entries import INLINE_BYTES as INLINE_BYTES
    from casnap.format.entries import ContainerEntry as ContainerEntry
    from casnap.format.entries import Entry as Entry
    from casnap.format.entries import Payload as Payload
    from casnap.format.entries import TensorEntry as TensorEntry
    from casnap.format.entries import ValueEntry as ValueEntry
    from casnap.format.grid import grid_of as grid_of
    from casnap.format.names import MARKER as MARKER
    from casnap.format.names import NOTICE_HEAD as NOTICE_HEAD
    from casnap.format.names import component_of as component_of
    from casnap.format.names import folder_of as folder_of
    from casnap.format.names import is_file_name as is_file_name
    from casnap.format.names import key_of as key_of
    from casnap.format.names import plain_text as plain_text
    from casnap.format.records import CONFIG_KEY as CONFIG_KEY
    from casnap.format.records import Root as Root
    from casnap.format.records import Row as Row
    from casnap.format.region import Region as Region
    from casnap.joined_take import JoinedTake as JoinedTake
    from casnap.ranks.comm import Comm as Comm
    from casnap.ranks.comm import SingleProcess as SingleProcess
    from casnap.ranks.joining import join as join
    from casnap.ranks.joining import join_ranks as join_ranks
    from casnap.ranks.joining import own_rank as own_rank
    from casnap.restore.loading import Fetch as Fetch
    from casnap.restore.loading import Loading as Loading
    from casnap.restore.patching import LiveWeights as LiveWeights
    from casnap.restore.patching import Patch as Patch
    from casnap.restore.renaming import Rename as Rename
    from casnap.restore.shared_reads import fetch_shared as fetch_shared
    from casnap.restore.targets import why_unfit as why_unfit
    from casnap.restore.ties import told as told
    from casnap.runtime.backoff import Backoff as Backoff
    from casnap.runtime.buffers import on_release as on_release
    from casnap.runtime.descriptors import Descriptor as Descriptor
    from casnap.runtime.descriptors import opened as opened
    from casnap.runtime.environment import given_path as given_path
    from casnap.runtime.environment import local_path as local_path
    from casnap.runtime.fork import PerProcess as PerProcess
    from casnap.runtime.fork import cached_property as cached_property
    from casnap.runtime.fork import in_child as in_child
    from casnap.runtime.fork import locked_file as locked_file
    from casnap.runtime.fork import new_lock as new_lock
    from casnap.runtime.fork import new_rlock as new_rlock
    from casnap.runtime.nesting import is_within_call as is_within_call
    from casnap.runtime.progress import Progress as Progress
    from casnap.runtime.progress import ProgressCounter as ProgressCounter
    from casnap.runtime.sizes import size as size
    from casnap.runtime.threads import cores as cores
    from casnap.runtime.threads import mapped as mapped
    from casnap.runtime.threads import python_gc_paused as python_gc_paused
    from casnap.runtime.torch_modes import without_torch_modes as without_torch_modes
    from casnap.runtime.typing import override as override
    from casnap.runtime.units import Duration as Duration
    from casnap.runtime.units import Size as Size
    from casnap.runtime.units import bytes_of as bytes_of
    from casnap.runtime.units import count_of as count_of
    from casnap.runtime.units import seconds_of as seconds_of
    from casnap.state.containers import live_components as live_components
    from casnap.state.devices import synchronize as synchronize
    from casnap.state.flatten import containers_of as containers_of
    from casnap.state.flatten import flatten as flatten
    from casnap.state.flatten import inflate as inflate
    from casnap.state.flatten import map_leaves as map_leaves
    from casnap.state.overlap import can_hold_all as can_hold_all
    from casnap.state.overlap import conflicting_groups as conflicting_groups
    from casnap.state.parts import holds_parts as holds_parts
    from casnap.state.parts import path_of_tensor as path_of_tensor
    from casnap.state.parts import said_of_parts as said_of_parts
    from casnap.state.sharded import Shards as Shards
    from casnap.state.sharded import shards_of as shards_of
    from casnap.state.sharded import without_torch_function as without_torch_function
    from casnap.state.tensors import ORDINARY_TYPES as ORDINARY_TYPES
    from casnap.state.tensors import Leaf as Leaf
    from casnap.state.tensors import allocate as allocate
    from casnap.state.tensors import describe as describe
    from casnap.state.tensors import describe_shards as describe_shards
    from casnap.state.tensors import holds_no_values as holds_no_values
    from casnap.state.tensors import is_freed as is_freed
    from casnap.state.tensors import is_its_storage as is_its_storage
    from casnap.state.tensors import is_wrapper as is_wrapper
    from casnap.state.tensors import why_not_writable as why_not_writable
    from casnap.state.values import decode_value as decode_value
    from casnap.state.values import encode_key as encode_key
    from casnap.state.values import encode_object as encode_object
    from casnap.storage import Contents as Contents
    from casnap.storage import Entries as Entries
    from casnap.storage import Fill as Fill
    from casnap.storage import Markers as Markers
    from casnap.storage import ReadOptions as ReadOptions
    from casnap.storage import Repository as Repository
    from casnap.storage import Table as Table
    from casnap.storage import TagMove as TagMove
    from casnap.storage import Verdict as Verdict
    from casnap.storage import Want as Want
    from casnap.storage import advice_at as advice_at
    from casnap.storage import advice_in as advice_in
    from casnap.storage import check_no_foreign_checkpoint as check_no_foreign_checkpoint
    from casnap.storage import link_advice as link_advice
    from casnap.storage import locate_store as locate_store
    from casnap.storage import move_of as move_of
    from casnap.storage import open_at as open_at
    from casnap.storage import prune_judged as prune_judged
    from casnap.storage import published_row as published_row
    from casnap.storage import was_taken_here as was_taken_here
    from casnap.take.capture import CapturedState as CapturedState
    from casnap.take.capture import DividedLeaves as DividedLeaves
    from casnap.take.capture import LiveState as LiveState
    from casnap.take.capture import StateSource as StateSource
    from casnap.take.options import TakeOptions as TakeOptions
    from casnap.view import View as View
    from casnap.view import find_view as find_view
    from casnap.view import view_of as view_of

# Where each name is. A module is loaded when one of its names is asked for: a pull needs no torch.
_NAMES = {
    "backends": "Backend",
    "backends.announcement": "Note",
    "backends.local.durability": "sync_folder",
    "backends.local.file_io": "read_file read_run write_cached",
    "backends.local.file_locks": "lock open_to_lock",
    "backends.local.local_paths": (
        "as_written exists is_file is_folder is_link is_taken matching paths_in status"
    ),
    "backends.local.owners": "Owners new_file_in owners_by",
    "backends.local.safe_paths": "OpenFolder create_file folder_at open_file unlink_at",
    "backends.local.system_errors": "ABSENT NO_SPACE is_of_the_place translated",
    "backends.remote.uris": "joined",
    "files.dcp_names": (
        "DCP_VERSION DictKey ObjectPath Stored as_in_dcp casnap_path containers_above "
        "described first_keys with_keys"
    ),
    "files.export_output": "ExportOutput check_local check_outside",
    "files.layout": "FileLayout PlacedChunk PlacedTensor PlannedFile",
    "files.safetensors_header": "header_of itemsize_of read_header",
    "format.decoding": "json_decoder",
    "format.delta": "apply_delta base_of changed_by",
    "format.digest": "DIGEST_SIZE Digest digest_of split_digests",
    "format.entries": "ContainerEntry Entry INLINE_BYTES Payload TensorEntry ValueEntry",
    "format.grid": "grid_of",
    "format.names": "MARKER NOTICE_HEAD component_of folder_of is_file_name key_of plain_text",
    "format.records": "CONFIG_KEY Root Row",
    "format.region": "Region",
    "joined_take": "JoinedTake",
    "ranks.comm": "Comm SingleProcess",
    "ranks.joining": "join join_ranks own_rank",
    "restore.loading": "Fetch Loading",
    "restore.patching": "LiveWeights Patch",
    "restore.renaming": "Rename",
    "restore.shared_reads": "fetch_shared",
    "restore.targets": "why_unfit",
    "restore.ties": "told",
    "runtime.backoff": "Backoff",
    "runtime.buffers": "on_release",
    "runtime.descriptors": "Descriptor opened",
    "runtime.environment": "given_path local_path",
    "runtime.fork": "PerProcess cached_property in_child locked_file new_lock new_rlock",
    "runtime.nesting": "is_within_call",
    "runtime.progress": "Progress ProgressCounter",
    "runtime.sizes": "size",
    "runtime.threads": "cores mapped python_gc_paused",
    "runtime.torch_modes": "without_torch_modes",
    "runtime.typing": "override",
    "runtime.units": "Duration Size bytes_of count_of seconds_of",
    "state.containers": "live_components",
    "state.devices": "synchronize",
    "state.flatten": "containers_of flatten inflate map_leaves",
    "state.overlap": "can_hold_all conflicting_groups",
    "state.parts": "holds_parts path_of_tensor said_of_parts",
    "state.sharded": "Shards shards_of without_torch_function",
    "state.tensors": (
        "Leaf ORDINARY_TYPES allocate describe describe_shards holds_no_values is_freed "
        "is_its_storage is_wrapper why_not_writable"
    ),
    "state.values": "decode_value encode_key encode_object",
    "storage": (
        "Contents Entries Fill ReadOptions Repository Table TagMove Verdict Want advice_at "
        "advice_in check_no_foreign_checkpoint link_advice locate_store Markers move_of "
        "open_at prune_judged published_row was_taken_here"
    ),
    "take.capture": "CapturedState DividedLeaves LiveState StateSource",
    "take.options": "TakeOptions",
    "view": "View find_view view_of",
}

_MODULES = {name: f"casnap.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)

__getattr__ = imported_later(globals(), _MODULES)
