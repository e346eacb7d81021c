"""The names that other programs build on: trainers, engines and reports outside of casnap.

Most trainers need only ``Store.async_take``; the names about ranks and divided tensors are for
frameworks that divide tensors in their own way.

Such a program imports the names of ``casnap`` and ``casnap.errors``, and the names below. Semantic
versioning holds for all of them. ``docs/guides/own-trainer.md`` uses them.

==========================  ====================================================================
takes of a trainer          ``JoinedTake``, ``TakeOptions``; a ``StateSource`` is a ``LiveState``
                            or ``DividedLeaves``; ``name_trainer``
ranks                       ``join``, ``Comm``, ``SingleProcess``, ``own_rank``
divided tensors             ``Region``, ``leaf_of_parts``, ``boxes_of_run``, ``WithOthers``;
                            ``Target``, ``load_together``, ``check_together``, ``Fit``
leaves and their paths      ``Leaf``, ``flatten``, ``describe``, ``map_leaves``; ``ObjectPath``,
                            ``casnap_path``, ``containers_above``, ``component_of``,
                            ``live_components``, ``key_of``
entries of a snapshot       ``Entry``, ``TensorEntry``, ``ContainerEntry``; ``why_unfit``,
                            ``check_fit``; ``allocate``, ``decode_value``
files and folders           ``local_path``; ``exists``, ``is_file``, ``is_folder``, ``is_link``,
                            ``is_taken``, ``paths_in``, ``matching``
folders of checkpoints      ``Markers``, ``ForeignCheckpoints``; ``is_file_name``, ``put_whole``
pulled versions             ``Version``, ``VersionTensor``; ``StagedPatches``, ``Patch``;
                            ``WeightFiles`` beside a snapshot
progress, texts, classes    ``Progress``; ``size``, ``amount``, ``LEFT_OUT``;
                            ``log_remarks``; ``override``, ``without_torch_modes``
==========================  ====================================================================

Each name is loaded at its first use, since few programs need torch and all of these modules. Begin
with the guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from casnap.runtime.lazy_imports import imported_later

if TYPE_CHECKING:
    from casnap.backends.local_files import exists as exists
    from casnap.backends.local_files import is_file as is_file
    from casnap.backends.local_files import is_folder as is_folder
    from casnap.backends.local_files import is_link as is_link
    from casnap.backends.local_files import is_taken as is_taken
    from casnap.backends.local_files import matching as matching
    from casnap.backends.local_files import paths_in as paths_in
    from casnap.backends.local_files import put_whole as put_whole
    from casnap.divided import Fit as Fit
    from casnap.divided import Target as Target
    from casnap.divided import WithOthers as WithOthers
    from casnap.divided import boxes_of_run as boxes_of_run
    from casnap.divided import check_fit as check_fit
    from casnap.divided import check_together as check_together
    from casnap.divided import leaf_of_parts as leaf_of_parts
    from casnap.divided import load_together as load_together
    from casnap.files.dcp_names import ObjectPath as ObjectPath
    from casnap.files.dcp_names import casnap_path as casnap_path
    from casnap.files.dcp_names import containers_above as containers_above
    from casnap.format.entries import ContainerEntry as ContainerEntry
    from casnap.format.entries import Entry as Entry
    from casnap.format.entries import TensorEntry as TensorEntry
    from casnap.format.names import component_of as component_of
    from casnap.format.names import is_file_name as is_file_name
    from casnap.format.names import key_of as key_of
    from casnap.format.region import Region as Region
    from casnap.joined_take import JoinedTake as JoinedTake
    from casnap.ranks.comm import Comm as Comm
    from casnap.ranks.comm import SingleProcess as SingleProcess
    from casnap.ranks.joining import join as join
    from casnap.ranks.joining import own_rank as own_rank
    from casnap.restore.remarks import log_remarks as log_remarks
    from casnap.restore.targets import why_unfit as why_unfit
    from casnap.runtime.environment import local_path as local_path
    from casnap.runtime.progress import Progress as Progress
    from casnap.runtime.sizes import amount as amount
    from casnap.runtime.sizes import size as size
    from casnap.runtime.torch_modes import without_torch_modes as without_torch_modes
    from casnap.runtime.typing import override as override
    from casnap.serving.patches import Patch as Patch
    from casnap.serving.patches import StagedPatches as StagedPatches
    from casnap.serving.version import Version as Version
    from casnap.serving.version import VersionTensor as VersionTensor
    from casnap.serving.weight_files import WeightFiles as WeightFiles
    from casnap.state.containers import live_components as live_components
    from casnap.state.flatten import flatten as flatten
    from casnap.state.flatten import map_leaves as map_leaves
    from casnap.state.run_environment import name_trainer as name_trainer
    from casnap.state.tensors import Leaf as Leaf
    from casnap.state.tensors import allocate as allocate
    from casnap.state.tensors import describe as describe
    from casnap.state.values import decode_value as decode_value
    from casnap.storage import ForeignCheckpoints as ForeignCheckpoints
    from casnap.storage import Markers as Markers
    from casnap.take.capture import DividedLeaves as DividedLeaves
    from casnap.take.capture import LiveState as LiveState
    from casnap.take.capture import StateSource as StateSource
    from casnap.take.left_out import LEFT_OUT as LEFT_OUT
    from casnap.take.options import TakeOptions as TakeOptions

__getattr__, __all__ = imported_later(globals())
