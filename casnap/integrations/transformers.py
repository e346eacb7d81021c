"""Checkpoints of the Trainer of Transformers as snapshots.

::

    from casnap.integrations.transformers import CasnapTrainerMixin

    class MyTrainer(CasnapTrainerMixin, Trainer):
        pass

:func:`install` gives the mixin to every Trainer of the process, for programs that nobody edits.
The class of a Trainer with casnap is made together with the Trainer: the mixin, then the classes of
the user and of tools, then :class:`_StoringTrainer`, then ``Trainer`` itself. So what subclasses
do when they save and load is done too.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import logging
import math
import os
import shutil
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from casnap import RNGState, Snapshot, Stateful
from casnap.errors import CasnapError, SnapshotNotFoundError, StateError
from casnap.extending import (
    ForeignCheckpoints,
    Markers,
    TakeOptions,
    WeightFiles,
    is_file,
    is_file_name,
    is_folder,
    is_taken,
    join,
    local_path,
    matching,
    own_rank,
    paths_in,
)
from casnap.integrations import with_deepspeed
from casnap.integrations.folders.rotation import forget
from casnap.integrations.notices import is_notice
from casnap.integrations.sharded import (
    ShardedModel,
    ShardedOptimizer,
    adapter_of,
    optimizer_for,
)
from casnap.integrations.trainers import (
    OTHER_WEIGHTS,
    WEIGHTS,
    Checkpoints,
    Notices,
    Value,
    agreed,
    both_there_error,
    check_saved_by,
    check_weights,
    check_whole,
    load_own,
    plain_model,
    snapshot_at,
)
from casnap.integrations.versions import check_methods, check_version

check_version("transformers")

import torch  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import PreTrainedModel, Trainer  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402
from transformers.utils import (  # noqa: E402
    ADAPTER_SAFE_WEIGHTS_NAME,
    ADAPTER_WEIGHTS_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
    is_peft_available,
)

try:
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:  # of Transformers 4
    revert_weight_conversion = None

check_methods(
    "transformers",
    Trainer,
    [
        *("_get_output_dir", "_load_best_model", "_load_from_checkpoint", "_load_rng_state"),
        *("_load_optimizer_and_scheduler", "_load_scaler", "_save", "_save_checkpoint"),
        *("_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler", "save_model"),
    ],
)

__all__ = ["CasnapTrainerMixin", "install"]

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object
_log = logging.getLogger("casnap")
_UNFINISHED = "checkpoint-is-incomplete.txt"
"""A file that the Trainer puts into the folder while it saves after a SIGTERM."""
_MODEL = (SAFE_WEIGHTS_NAME, WEIGHTS_NAME)
_ADAPTER = (ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME)
_LOADED = (*WEIGHTS, *_ADAPTER, "pytorch_model_fsdp*")
"""The names of what the Trainer itself loads weights from: files, or a folder of FSDP's."""
_STATE = ("optimizer.pt", "scheduler.pt")
"""Files of the Trainer without which it would go on with a fresh optimizer, and say nothing."""
_WEIGHTS = ("last", "all", "none")
_NEVER_SAVED = ""
_NOTICE = (
    "This checkpoint is a snapshot of casnap, which holds the weights, the optimizer and all else "
    "that a run goes on with. Use `casnap run COMMAND`, a Trainer with "
    "casnap.integrations.transformers.CasnapTrainerMixin, or "
    'casnap.Snapshot(folder).restore({"model": model})'
)


class CasnapTrainerMixin(_Base):
    """A mixin for a Trainer that saves each checkpoint as a snapshot; put it before ``Trainer``.

    ``output_dir`` is the store, unless there is one above it. Weights, optimizer, scheduler, scaler
    and random states are in the snapshot; the small files that the Trainer and its users look for
    (``trainer_state.json``, ``config.json``, the tokenizer) are in it too, and in the folder of the
    checkpoint. A checkpoint is whole if there is a snapshot.

    After the commit, the weights are put into the folder too, whole, for ``from_pretrained`` and
    other readers: of PEFT the adapter, as PEFT itself saves it. No run goes on from these files.
    Checkpoints that the Trainer itself has written are still loaded and rotated.

    Attributes:
        casnap_weights: Whose folders have the weights of a model: those of the ``"last"``
            checkpoint and of the best one, ``"all"``, or ``"none"``. A subclass may set it.
    """

    casnap_weights = "last"
    _saving_checkpoint = False
    _trainer_has_saved = False
    _installed = False
    """Whether :func:`install` has put this class before a Trainer."""
    _tell: Callable[[str], object] | None = None
    _asked_for: Any = None
    _engine: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a Trainer of the class that stores: see the docstring of this module."""
        new, kind = super().__new__, _storing(cls)  # type: ignore[arg-type]
        return new(kind) if new is object.__new__ else new(kind, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the class that was asked for: pickle would not find the one of this object."""
        made: Any = super().__reduce_ex__(protocol)
        is_plain = made[0] is copyreg.__newobj__  # type: ignore[attr-defined]
        return (_new, (self._asked_for,), *made[2:]) if is_plain else made

    @property
    def deepspeed(self) -> Any:
        """The engine of DeepSpeed, which the Trainer sets before it loads a checkpoint into it."""
        return self._engine

    @deepspeed.setter
    def deepspeed(self, engine: Any) -> None:
        self._engine = engine
        if engine is not None:
            engine.load_checkpoint = partial(_load_engine, engine, engine.load_checkpoint)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the order of the bases.

        Raises:
            TypeError: ``Trainer`` comes first, so that its methods would be used.
        """
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(CasnapTrainerMixin):
            raise TypeError(
                f"{cls.__name__}: put CasnapTrainerMixin before Trainer: "
                f"class {cls.__name__}(CasnapTrainerMixin, Trainer)"
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kw: Any) -> Any:
        """Train, as the Trainer does. ``True`` resumes from the last checkpoint that is whole.

        If only saves that were cut off have left folders, training begins anew, with a warning.

        Raises:
            StateError: The Trainer is set up in a way that this class does not support.
        """
        self._check_supported()
        checkpoints = Checkpoints(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-", _is_its_own)
        if isinstance(resume_from_checkpoint, str):
            resume_from_checkpoint = local_path(resume_from_checkpoint)
            if self._installed and _is_newest(resume_from_checkpoint, checkpoints):
                # A tool looks for the newest folder itself, which a cut off save may have left.
                resume_from_checkpoint = True
        if self._tell is not None and own_rank() == 0:
            kind, folder = type(self).__qualname__, self.args.output_dir
            self._tell(f"the checkpoints of {kind} in {folder} are snapshots")
        if resume_from_checkpoint is True:
            with join(None, None, f"looking for the last of {self.args.output_dir}") as comm:
                found = agreed(comm, partial(_last_or_none, checkpoints))
            resume_from_checkpoint = None if found == _NEVER_SAVED else found or True
        return super().train(resume_from_checkpoint, *args, **kw)

    def _check_supported(self) -> None:
        if self.casnap_weights not in _WEIGHTS:
            raise StateError(
                f"casnap_weights is one of {', '.join(map(repr, _WEIGHTS))}; got "
                f"{self.casnap_weights!r:.80}"
            )
        for owner, name in _alone(type(self)):
            if name.startswith("_load"):
                _log.warning("casnap loads in place of %s.%s", owner.__qualname__, name)
                continue
            raise StateError(
                f"{owner.__module__}.{owner.__qualname__}.{name} saves without calling the "
                f"Trainer's, so casnap cannot save in its place: let it call super().{name}(...), "
                "or run without casnap"
            )
        names = ("is_fsdp_xla_enabled", "is_distributed_loading_by_transformers")
        unsupported = [name for name in names if getattr(self, name, False)]
        if self.is_deepspeed_enabled:
            unsupported += ["save_only_model with DeepSpeed"] * self.args.save_only_model
            unsupported += ["PEFT with DeepSpeed"] * self._has_adapter
        kinds = {type(each) for each in self.model.parameters()} - {DTensor}
        wrappers = sorted(kind.__name__ for kind in kinds if hasattr(kind, "__tensor_flatten__"))
        unsupported += [f"parameters of the type {name}" for name in wrappers]
        if self.is_fsdp_enabled and not getattr(self.accelerator, "is_fsdp2", False):
            unsupported += ["PEFT with FSDP1 (take fsdp_version=2)"] * self._has_adapter
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            unsupported.append(f"hub_strategy={self.args.hub_strategy!r}")
        if unsupported:
            raise StateError(
                f"CasnapTrainerMixin does not support {', '.join(unsupported)}. FSDP is that of "
                "TrainingArguments(fsdp=...) or of `accelerate launch`; a checkpoint gets its "
                'weights after its commit, too late to be pushed to the hub: hub_strategy="end"'
            )

    # --- saving ---

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run_dir = self._get_output_dir(trial=trial)
        folder = Path(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        if self.args.should_save:
            # Without its marker the old snapshot does not count: new files replace its files now.
            (folder / Markers.FILE).unlink(missing_ok=True)
        self._saving_checkpoint, self._trainer_has_saved = True, False
        try:
            # This writes the state of the Trainer. The methods below then write nothing, since the
            # snapshot has their state; and no checkpoint is removed before the snapshot exists.
            super()._save_checkpoint(model, trial)
        finally:
            self._saving_checkpoint = False
            self.args.save_total_limit = limit
        if not self._trainer_has_saved:
            raise StateError(
                f"{type(self).__module__}.{type(self).__qualname__} has saved {folder} by itself, "
                "without the Trainer's _save_checkpoint: switch that way to save off, or run "
                "without casnap"
            )
        state: dict[str, Stateful] = {}
        if self._engine is None:
            state["model"] = self._model_state(self.model)
        if not self.args.save_only_model:
            state |= self._optimizer_and_scheduler()
            state |= {"scaler": self._scaler} if self._scaler is not None else {}
            state["rng"] = RNGState()
        # Without an adapter nothing but the small files is wanted; the Trainer asks for them in
        # the same way for DeepSpeed.
        weights: dict[str, Any] | None = None if self._has_adapter else {}
        if self._has_adapter and self.is_fsdp_enabled:
            weights = adapter_of(self.model)
        with TemporaryDirectory(prefix="casnap-") as staged:
            files = self._put_files(folder, Path(staged), weights) if self.args.should_save else {}
            snapshot = with_deepspeed.take(
                self._engine,
                state | {"files": Value(files)},
                folder.absolute(),
                TakeOptions(overwrite=True, metadata=self._casnap_metadata()),
                Notices(_NOTICE, self._notices(folder) if self.args.should_save else []),
                # The folder of the user: a search of hyperparameters has a folder for each trial.
                self.args.output_dir,
            )
            if self.args.should_save:
                if self._has_adapter:
                    self._put_adapter(snapshot, folder, Path(staged))
                elif self.casnap_weights != "none" and own_rank() == 0:
                    self._put_weights(snapshot, run_dir)
                self._rotate(run_dir)

    def _optimizer_and_scheduler(self) -> dict[str, Stateful]:
        """Return them, except what the engine of DeepSpeed has."""
        state: dict[str, Stateful] = {}
        if self.is_fsdp_enabled:
            state["optimizer"] = ShardedOptimizer(self.model, self.optimizer)
        elif self._engine is None:
            state["optimizer"] = self.optimizer
        for scheduler in with_deepspeed.not_of_engine(self._engine, [self.lr_scheduler]):
            state["scheduler"] = scheduler
        return state

    def _put_files(
        self, folder: Path, staged: Path, weights: dict[str, Any] | None
    ) -> dict[str, bytes]:
        """Put the small files into the folder of a checkpoint, and return them.

        All files are written to ``staged`` first, so that a killed save leaves no file of weights.
        """
        self._save(str(staged), state_dict=weights)
        for place in {folder, *(path.parent for path in _weights_in(folder))}:
            WeightFiles(place).remove()
        for file in (*_weights_in(folder), *(folder / name for name in _STATE)):
            if is_file(file):  # of an earlier run
                file.unlink()
        for path in sorted(staged.rglob("*")):
            if is_file(path) and path.name not in (*_MODEL, *_ADAPTER):
                target = folder / path.relative_to(staged)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
        files = (path for path in paths_in(folder) if is_file(path))
        return {p.name: p.read_bytes() for p in files if p.name not in (Markers.FILE, _UNFINISHED)}

    def _notices(self, folder: Path) -> list[str]:
        """Return the names of the files that a Trainer without casnap would load."""
        names = [] if self._has_adapter else [WEIGHTS_NAME]
        names += [] if self.args.save_only_model else _STATE
        if self._engine is not None and not matching(folder, "global_step*"):
            # The Trainer looks for such a name before it has the engine load anything.
            names.append(f"global_step{self.state.global_step}")
        return names

    def _put_adapter(self, snapshot: Snapshot, folder: Path, staged: Path) -> None:
        """Put the adapters beside the snapshot, whole, for the tools of PEFT."""
        for path in sorted(staged.rglob("*")):
            if path.name in _ADAPTER:
                place = folder / path.parent.relative_to(staged)
                WeightFiles(place).put(snapshot.contents, write=partial(_copy_into, path))

    def _put_weights(self, snapshot: Snapshot, run_dir: str) -> None:
        """Put the weights beside the snapshot, and take those of others that are to have none."""
        folder, model = Path(snapshot.path), self._plain_model()
        checkpoints = Checkpoints(run_dir, f"{PREFIX_CHECKPOINT_DIR}-", _is_its_own).paths()
        others = [path for path in reversed(checkpoints) if path.name != folder.name]
        is_rewritten = _is_rewritten(model, WeightFiles.shapes_in(snapshot.contents))
        sizes = inspect.signature(PreTrainedModel.save_pretrained).parameters
        WeightFiles(folder).put(
            snapshot.contents,
            others=others,
            tied=_tied(model),
            max_shard_size=sizes["max_shard_size"].default,
            write=partial(self._write_weights, snapshot) if is_rewritten else None,
        )
        best = self.state.best_model_checkpoint
        for other in others if self.casnap_weights == "last" else ():
            if best is None or os.path.realpath(other) != os.path.realpath(best):
                try:
                    WeightFiles(other).remove()
                except (OSError, CasnapError) as e:
                    _log.warning("the weights of an older checkpoint cannot be removed: %s", e)

    def _write_weights(self, snapshot: Snapshot, folder: Path) -> None:
        """Have Transformers write the weights, in the form that it reads."""
        self._save(str(folder), state_dict=dict(snapshot.get_state_dict_for_key("model")))

    @property
    def _has_adapter(self) -> bool:
        """Whether PEFT saves only an adapter: of its own model, or of a model that got one."""
        model = self._plain_model()
        if isinstance(model, PreTrainedModel):
            return bool(model._hf_peft_config_loaded)
        if not is_peft_available():
            return False
        from peft import PeftModel

        return isinstance(model, PeftModel)

    def _rotate(self, run_dir: str) -> None:
        before = matching(run_dir, f"{PREFIX_CHECKPOINT_DIR}-*")
        if hasattr(self, "_rotate_checkpoints"):  # up to Transformers 4
            self._rotate_checkpoints(use_mtime=True, output_dir=run_dir)
        else:
            from transformers.trainer_utils import rotate_checkpoints

            rotate_checkpoints(
                output_dir=run_dir,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        for folder in before:
            if not is_taken(folder) and (snapshot := snapshot_at(folder)) is not None:
                forget(snapshot)

    def _casnap_metadata(self) -> dict[str, Any]:
        """Return metadata for `casnap ls`: the step, and the last numbers that were logged."""
        metadata: dict[str, Any] = {"step": self.state.global_step}
        for entry in self.state.log_history[-2:]:
            if entry.get("step") == self.state.global_step:
                metadata |= {k: v for k, v in entry.items() if isinstance(v, int | float)}
        if self.state.best_metric is not None:
            metadata["best_metric"] = self.state.best_metric
        return {k: v for k, v in metadata.items() if math.isfinite(v)}

    def _model_state(self, model: Any) -> Stateful:
        """Return a model as it is stored: under the names that it has without any wrapper."""
        return ShardedModel(model) if self.is_fsdp_enabled else self._plain_model()

    def _plain_model(self) -> Any:
        return plain_model(self.accelerator, self.model)

    @property
    def _scaler(self) -> Any:
        return getattr(self.accelerator, "scaler", None)


class _StoringTrainer(Trainer):
    """The Trainer with casnap in place of its files, right above the Trainer itself.

    So what subclasses do in these methods is done too. While a checkpoint is saved, those that
    write files do nothing: what they would write is in the snapshot.
    """

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self._trainer_has_saved = True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for ``from_pretrained``, as the Trainer does."""
        if not self._saving_checkpoint:
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            Path(output_dir or self.args.output_dir).mkdir(parents=True, exist_ok=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._saving_checkpoint:
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        if not self._saving_checkpoint:
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        if not self._saving_checkpoint:
            super()._save_rng_state(output_dir)

    # --- loading ---

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        snapshot = snapshot_at(resume_from_checkpoint)
        if snapshot is None:
            if not _is_its_own(Path(resume_from_checkpoint)):
                raise SnapshotNotFoundError(
                    f"{resume_from_checkpoint} holds no whole checkpoint: its save was cut off, "
                    "its snapshot was deleted, or the store of casnap is not there. "
                    "resume_from_checkpoint=True takes the last whole one"
                    + ForeignCheckpoints(Path(resume_from_checkpoint)).advice()
                )
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        check_saved_by(snapshot, __name__, ["files"])
        _check_folder(snapshot, Path(resume_from_checkpoint))
        if own_rank() == 0:
            _put_back(snapshot, Path(resume_from_checkpoint))
        if model is None or self.is_fsdp_enabled:
            model = self._model_state(self.model if model is None else model)
        snapshot.restore({"model": model})

    def _load_best_model(self) -> None:
        snapshot = snapshot_at(self.state.best_model_checkpoint)
        if snapshot is None or self._engine is not None:
            super()._load_best_model()
        else:
            if own_rank() == 0 and (others := _others(snapshot)):
                # An error now would end a training that is done.
                text = "%s: %s. The best model is that of the snapshot"
                _log.warning(text, ", ".join(map(str, others)), OTHER_WEIGHTS)
            snapshot.restore({"model": self._model_state(self.model)})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        snapshot = None if checkpoint is None else snapshot_at(checkpoint)
        if snapshot is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        check_whole(snapshot, "optimizer")
        if "optimizer" in snapshot.contents.trees(own_rank()):
            state = self._optimizer_and_scheduler()
            if self._engine is None:
                state["optimizer"] = optimizer_for(
                    snapshot, "optimizer", self.model, self.optimizer, self.is_fsdp_enabled
                )
            snapshot.restore(state)

    def _load_scaler(self, checkpoint: str | None) -> None:
        snapshot = None if checkpoint is None else snapshot_at(checkpoint)
        if snapshot is None:
            super()._load_scaler(checkpoint)
        elif self._scaler is not None:
            load_own(snapshot, "scaler", self._scaler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        snapshot = None if checkpoint is None else snapshot_at(checkpoint)
        if snapshot is None:
            super()._load_rng_state(checkpoint)
        elif not load_own(snapshot, "rng", RNGState()):
            _log.warning("%s has no random state of rank %d", checkpoint, own_rank())


@functools.cache
def _storing(kind: Any) -> Any:
    """Return the class of a Trainer with casnap, for the class that was asked for."""
    if issubclass(kind, _StoringTrainer):
        return kind
    names = {name: getattr(kind, name) for name in ("__doc__", "__module__", "__qualname__")}
    names["_asked_for"] = kind
    if not issubclass(kind, CasnapTrainerMixin):
        installed = names | {"_installed": True}
        kind = _subclass(kind.__name__, (CasnapTrainerMixin, kind), installed)
    kind = _subclass(kind.__name__, (kind, _StoringTrainer), names)
    for _, name in _alone(kind):
        if name.startswith("_load"):
            setattr(kind, name, _load_of_both(getattr(kind, name), vars(_StoringTrainer)[name]))
    return kind


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _subclass(name: str, bases: tuple[Any, ...], names: Mapping[str, Any]) -> Any:
    return types.new_class(name, bases, exec_body=lambda body: body.update(names))


def _load_of_both(theirs: Any, ours: Any) -> Any:
    """Return a method that loads by casnap where there is a snapshot, else as a subclass does."""

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint = next(iter([*args, *kwargs.values()]), self.state.best_model_checkpoint)
        is_ours = isinstance(checkpoint, str) and snapshot_at(checkpoint) is not None
        return (ours if is_ours else theirs)(self, *args, **kwargs)

    return load


def _alone(kind: type) -> Iterator[tuple[type, str]]:
    """Yield the class and the name of each method that does not call the one that casnap replaces.

    A method calls that if it names it; so one that calls it in some cases only is not found.
    """
    order = kind.__mro__
    for owner in order[1 : order.index(_StoringTrainer)]:  # the first is casnap's
        if owner is not CasnapTrainerMixin:
            for name in vars(_StoringTrainer).keys() & vars(owner).keys():
                code = getattr(inspect.unwrap(vars(owner)[name]), "__code__", None)
                if code is not None and name not in _names_in(code):
                    yield owner, name


def _names_in(code: types.CodeType) -> set[str]:
    inner = (_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*inner)


def install(tell: Callable[[str], object] | None = None, *, weights: str | None = None) -> None:
    """Have every Trainer that this process makes from now on save and load as by the mixin.

    Subclasses are included, also those that were imported before. Checkpoints that the Trainer
    itself has written are still loaded. A tool that names the newest checkpoint of ``output_dir``
    gets the last whole one, as ``resume_from_checkpoint=True`` does.

    Args:
        tell: Called on rank 0 when a Trainer begins to train, with a line that says where it saves.
        weights: ``casnap_weights`` of :class:`CasnapTrainerMixin`, unless a class with that mixin
            sets it; by default it stays as it is.
    """
    if weights is not None:
        CasnapTrainerMixin.casnap_weights = weights
    CasnapTrainerMixin._tell = None if tell is None else staticmethod(tell)

    def new(cls: Any, *_: Any, **__: Any) -> Any:
        return object.__new__(_storing(cls))

    Trainer.__new__ = new


def _is_newest(path: str, checkpoints: Checkpoints) -> bool:
    return [Path(path).absolute()] == [p.absolute() for p in checkpoints.paths()[-1:]]


def _last_or_none(checkpoints: Checkpoints) -> str | None:
    """Return the last whole checkpoint. Where the first save was cut off, nothing is lost yet."""
    last, folders = checkpoints.find_last(), checkpoints.paths()
    if last is None and folders and not any(is_file(f / Markers.FILE) for f in folders):
        _log.warning("%s holds no whole checkpoint: training begins anew", folders[0].parent)
        return _NEVER_SAVED
    return last


def _check_folder(snapshot: Snapshot, folder: Path) -> None:
    """Check that nobody has put another checkpoint beside a snapshot. All ranks call this.

    Raises:
        StateError: The folder has an optimizer of the Trainer's, or other weights.
    """
    state = folder / _STATE[0]
    if is_file(state) and not is_notice(state):
        raise both_there_error(folder, "the Trainer itself", f"remove {state}")
    check_weights(snapshot, _candidates(snapshot, folder))


def _candidates(snapshot: Snapshot, folder: Path) -> Iterator[Path]:
    """Yield the weights beside a snapshot, except those that a subclass has saved with it."""
    has_files = "files" in snapshot.contents.keys()  # noqa: SIM118 - no dict
    files: Mapping[str, bytes] = snapshot.read_object("0/files") if has_files else {}
    for path in _weights_in(folder):
        if not _is_same(path, files.get(path.name)):
            yield path


def _others(snapshot: Snapshot) -> list[Path]:
    """Return the weights beside a snapshot that are not its own."""
    return WeightFiles.others_than(snapshot.contents, _candidates(snapshot, Path(snapshot.path)))


def _is_same(path: Path, content: bytes | None) -> bool:
    return content is not None and is_file(path) and path.read_bytes() == content


def _put_back(snapshot: Snapshot, folder: Path) -> None:
    """Put the small files of a snapshot where the Trainer looks for them, if they are missing.

    They are missing if the snapshot was copied from another store. A file that differs stays, since
    a user may have edited it. But if a save that should have replaced the snapshot was cut off, the
    snapshot's files replace those of that save.
    """
    files: Mapping[str, bytes] = snapshot.read_object("0/files")
    commit = Markers(snapshot.contents.store).commit_in(snapshot.contents.name)
    stays = commit == snapshot.row.commit
    differing: list[str] = []
    # Who can write to the store chooses the names.
    bad = sorted(name for name in files if not is_file_name(name) or name == Markers.FILE)
    for name in files.keys() - bad:
        path, data = folder / name, files[name]
        if name in (*_MODEL, *_ADAPTER) or _is_same(path, data):
            continue
        if is_there := is_taken(path):
            differing.append(path.name)
        if not (is_there and stays):
            # Made only if a file is missing: this user may have no right to write there.
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    if bad:
        text = "%s: files of the snapshot are left out, for their names (%.500s)"
        _log.warning(text, folder, ", ".join(map(repr, bad)))
    if differing and stays:
        _log.warning(
            "%s: files that are not as they were saved are used as they are (%s); to have those of "
            "the snapshot, remove them before the run resumes",
            folder,
            ", ".join(sorted(differing)),
        )
    elif differing:
        text = "%s: files of a save that was cut off are replaced by those of the snapshot (%s)"
        _log.warning(text, folder, ", ".join(sorted(differing)))


def _load_engine(engine: Any, load: Any, load_dir: str, *args: Any, **options: Any) -> Any:
    """Load a checkpoint into an engine of DeepSpeed: a snapshot, or DeepSpeed's own checkpoint."""
    snapshot = snapshot_at(load_dir)
    if snapshot is None:
        return load(load_dir, *args, **options)
    _check_folder(snapshot, Path(load_dir))
    return with_deepspeed.load(engine, snapshot)


def _weights_in(folder: Path) -> list[Path]:
    """Return what the Trainer itself would load weights from, whoever has written it."""
    weights = matching(folder, *_LOADED)
    for inner in filter(is_folder, paths_in(folder)):
        if inner.name != WeightFiles.STAGED:
            weights += matching(inner, *_ADAPTER)
    return [path for path in weights if not is_notice(path)]


def _is_its_own(folder: Path) -> bool:
    """Whether the Trainer itself has written weights into a folder."""
    return any(path.name not in WeightFiles(path.parent).names() for path in _weights_in(folder))


def _copy_into(file: Path, folder: Path) -> None:
    folder.mkdir()
    shutil.copyfile(file, folder / file.name)


def _tied(model: Any) -> set[str]:
    """Return the tensors that Transformers saves under another name alone."""
    names = getattr(model, "all_tied_weights_keys", None)  # of Transformers 5
    return set(names or getattr(model, "_tied_weights_keys", None) or ())


def _is_rewritten(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether Transformers saves other tensors than the model has, or gives them other names."""
    if not isinstance(model, PreTrainedModel):
        return False
    if getattr(model, "hf_quantizer", None) is not None or model._keys_to_ignore_on_save:
        return True
    if revert_weight_conversion is None:
        return bool(getattr(model, "_checkpoint_conversion_mapping", None))
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    saved = revert_weight_conversion(model, dict(state))
    return saved.keys() != state.keys() or any(saved[name] is not state[name] for name in state)
