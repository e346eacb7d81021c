"""The mixin: a Trainer that saves each checkpoint as a snapshot, and finds the last whole one."""

from __future__ import annotations

import copyreg
import inspect
import logging
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import WEIGHTS_NAME, is_peft_available

from casnap import RNGState, Snapshot, StateDict, Stateful
from casnap.errors import CasnapError, StateError
from casnap.extending import (
    Markers,
    TakeOptions,
    WeightFiles,
    is_file,
    is_taken,
    join,
    local_path,
    matching,
    own_rank,
)
from casnap.integrations import with_deepspeed
from casnap.integrations.folders.rotation import forget
from casnap.integrations.sharded import ShardedModel, ShardedOptimizer, adapter_of
from casnap.integrations.trainers import (
    WEIGHTS_ALONE,
    Checkpoints,
    Notices,
    Value,
    plain_model,
    snapshot_at,
)
from casnap.integrations.transformers.classes import alone, has_own_form, storing, unpickled
from casnap.integrations.transformers.small_files import (
    naming_full_disk,
    put_small_files,
    staging,
)
from casnap.integrations.transformers.storing import STATE, load_engine
from casnap.integrations.transformers.weights import (
    give_up_weights,
    is_its_own,
    is_rewritten,
    put_staged,
    remove_weights,
    tied_in,
    without_progress_bars,
)
from casnap.integrations.witnesses import OnMismatch, Witnesses

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object
_log = logging.getLogger("casnap")
_WEIGHTS = ("last", "all", "none")
_NEVER_SAVED = ""
_NOTICE = (
    "This checkpoint is a snapshot of casnap, which holds the weights, the optimizer and all else "
    "that a run goes on with. To resume, use `casnap run COMMAND`, or a Trainer with "
    f"casnap.integrations.transformers.CasnapTrainerMixin. {WEIGHTS_ALONE}"
)


class _Start(msgspec.Struct, array_like=True):
    """How a rank begins to train.

    Attributes:
        resumes: Whether it resumes.
        last: On rank 0, what :func:`_last_or_none` returned.
    """

    resumes: bool
    last: str | None = None


class CasnapTrainerMixin(_Base):
    """A mixin for a Trainer that saves each checkpoint as a snapshot; put it before ``Trainer``.

    ``output_dir`` is the store, unless there is one above it. Weights, optimizer, scheduler, scaler
    and random states are in the snapshot; the small files that the Trainer and its users look for
    (``trainer_state.json``, ``config.json``, the tokenizer) are in it too, and in the folder of the
    checkpoint. A checkpoint is whole if there is a snapshot.

    After the commit, the weights are put into the folder too, whole, for ``from_pretrained`` and
    other readers: with PEFT only the adapter, as PEFT itself saves it. No run goes on from these
    files. Checkpoints that the Trainer itself has written are still loaded and rotated.

    A subclass may set the attributes.

    Attributes:
        casnap_weights: Which checkpoints have weights in their folders: ``"last"`` for the last and
            the best one, ``"all"``, or ``"none"``.
        casnap_witness_steps: How many steps of the optimizer after each checkpoint get a witness,
            by which a run that resumes proves that it computes the same; see
            ``docs/guides/proving-a-resume.md``.
        casnap_on_mismatch: ``"warn"`` if a resumed run computes something else, or ``"raise"``.
    """

    casnap_weights = "last"
    casnap_witness_steps = 0
    casnap_on_mismatch: OnMismatch = "warn"
    _witnesses = Witnesses()
    _saving_checkpoint = False
    _trainer_has_saved = False
    _installed = False
    """Whether :func:`install` has put this class before a Trainer."""
    _tell: Callable[[str], object] | None = None
    _asked_for: Any = None
    _engine: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a Trainer of the class with casnap. The docstring of this package describes it."""
        new, kind = super().__new__, storing(cls, CasnapTrainerMixin)  # type: ignore[arg-type]
        return new(kind) if new is object.__new__ else new(kind, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Have pickle store the class that the program asked for: it cannot find the made class."""
        made: Any = super().__reduce_ex__(protocol)
        is_plain = made[0] is copyreg.__newobj__  # type: ignore[attr-defined]
        return (unpickled, (self._asked_for,), *made[2:]) if is_plain else made

    @property
    def deepspeed(self) -> Any:
        """The engine of DeepSpeed. The Trainer sets it before the engine loads a checkpoint."""
        return self._engine

    @deepspeed.setter
    def deepspeed(self, engine: Any) -> None:
        self._engine = engine
        if engine is not None:
            engine.load_checkpoint = partial(load_engine, engine, engine.load_checkpoint)

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

        If only saves that were cut off have left folders, training starts from scratch, with a
        warning. ``"auto"`` does the same as ``True``, and starts from scratch if ``output_dir`` has
        no folder of a checkpoint. So a command that gives it both starts a run and resumes it.

        Raises:
            StateError: The Trainer is set up in a way that this class does not support, or only
                some ranks resume.
        """
        self._check_supported()
        checkpoints = Checkpoints(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-", is_its_own)
        if may_begin := resume_from_checkpoint == "auto":
            resume_from_checkpoint = True
        if isinstance(resume_from_checkpoint, str):
            resume_from_checkpoint = local_path(resume_from_checkpoint)
            if self._installed and _is_newest(resume_from_checkpoint, checkpoints):
                # A tool looks for the newest folder itself, which a cut off save may have left.
                resume_from_checkpoint = True
        self._witnesses = Witnesses(self.casnap_witness_steps, self.casnap_on_mismatch)
        if self._tell is not None and own_rank() == 0:
            kind, folder = type(self).__qualname__, self.args.output_dir
            self._tell(f"the checkpoints of {kind} in {folder} are snapshots")
        with join(None, None, f"the start of a training in {self.args.output_dir}") as comm:
            start = _Start(bool(resume_from_checkpoint))
            if resume_from_checkpoint is True and comm.rank == 0:
                start.last = _last_or_none(checkpoints, may_begin=may_begin)
            start_of_rank_0 = comm.broadcast_message(start, _Start)
            comm.check_same("resume_from_checkpoint=", start.resumes, start_of_rank_0.resumes)
            # Rank 0 hears here of a rank that differs.
            comm.all_gather(b"")
        if resume_from_checkpoint is True:
            last = start_of_rank_0.last
            resume_from_checkpoint = None if last == _NEVER_SAVED else last or True
        at_steps = _AtSteps(partial(self._tell_begin, resume_from_checkpoint), self._witness)
        self.add_callback(at_steps)
        try:
            return super().train(resume_from_checkpoint, *args, **kw)
        finally:
            self.remove_callback(at_steps)

    def _tell_begin(self, checkpoint: str | bool | None, step: int) -> None:
        """Say from which checkpoint the run goes on, if it does: ``"auto"`` does not show that.

        ``True`` names none: nothing was found that this class could name.
        """
        if checkpoint and checkpoint is not True and own_rank() == 0:
            tell = self._tell or _log.info
            tell(f"{type(self).__qualname__} resumes from {checkpoint}, at step {step}")

    def _check_supported(self) -> None:
        if "://" in self.args.output_dir:
            raise StateError(
                f"output_dir={self.args.output_dir!r} is no folder of this machine, where the "
                "Trainer writes its files: give a local folder, and let `casnap cp FOLDER "
                f"{self.args.output_dir} --follow` copy each new snapshot"
            )
        if self.casnap_weights not in _WEIGHTS:
            raise StateError(
                f"casnap_weights is one of {', '.join(map(repr, _WEIGHTS))}; got "
                f"{self.casnap_weights!r:.80}"
            )
        for owner, name in alone(type(self)):
            if name.startswith("_load"):
                _log.warning("casnap loads in place of %s.%s", owner.__qualname__, name)
                continue
            raise StateError(
                f"{owner.__module__}.{owner.__qualname__}.{name} saves without calling the "
                f"Trainer's, so casnap cannot save in its place: let it call super().{name}(...), "
                "or run without casnap"
            )
        names = ("is_fsdp_xla_enabled", "is_distributed_loading_by_transformers")
        instead = "take TrainingArguments(fsdp=...), or FSDP of `accelerate launch`"
        unsupported = [f"{name} ({instead})" for name in names if getattr(self, name, False)]
        if self.is_deepspeed_enabled:
            unsupported += ["save_only_model with DeepSpeed"] * self.args.save_only_model
            unsupported += ["PEFT with DeepSpeed"] * self._has_adapter
        kinds = {type(each) for each in self.model.parameters()} - {DTensor}
        wrappers = sorted(kind.__name__ for kind in kinds if hasattr(kind, "__tensor_flatten__"))
        unsupported += [f"parameters of the type {name}" for name in wrappers]
        if self.is_fsdp_enabled and not getattr(self.accelerator, "is_fsdp2", False):
            unsupported += ["PEFT with FSDP1 (take fsdp_version=2)"] * self._has_adapter
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            why = "they have no weights before their commit"
            unsupported.append(f'pushing checkpoints to the hub ({why}; take hub_strategy="end")')
        if unsupported:
            raise StateError(f"CasnapTrainerMixin does not support {', '.join(unsupported)}")
        if self.args.fsdp and not self.is_fsdp_enabled and own_rank() == 0:
            _log.warning(
                "fsdp= is given, but Transformers trains without FSDP, as it does on CPUs: each "
                "rank has the whole model"
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
            with naming_full_disk(folder):
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
        # Without an adapter nothing but the small files is wanted; the Trainer asks for them in
        # the same way for DeepSpeed.
        weights: dict[str, Any] | None = {}
        if self._has_adapter or self._has_own_form:
            weights = None
        if self._has_adapter and self.is_fsdp_enabled:
            weights = adapter_of(self.model)
        with staging(folder) if self.args.should_save else nullcontext(folder) as staged:
            files = self._put_files(folder, staged, weights) if self.args.should_save else {}
            notices = Notices(_NOTICE, self._notices(folder) if self.args.should_save else [])
            snapshot = with_deepspeed.take(
                self._engine,
                self._app_state() | {"files": Value(files)},
                folder.absolute(),
                TakeOptions(overwrite=True, metadata=self._casnap_metadata()),
                notices,
                # The folder of the user: a search of hyperparameters has a folder for each trial.
                self.args.output_dir,
            )
            self._witnesses.follow(snapshot.path)
            if self.args.should_save:
                if self._has_adapter or (self.casnap_weights != "none" and own_rank() == 0):
                    self._put_weights(snapshot, run_dir, staged, notices)
                self._rotate(run_dir)

    def _app_state(self) -> dict[str, Stateful]:
        """Return the state of a checkpoint, except its files and what an engine has."""
        state: dict[str, Stateful] = {}
        if self._engine is None:
            state["model"] = self._model_state(self.model)
        if not self.args.save_only_model:
            state |= self._optimizer_and_scheduler()
            state |= {"scaler": self._scaler} if self._scaler is not None else {}
            state["rng"] = RNGState()
        return state

    def _witness(self) -> None:
        """Make the witness of the step that has just ended, if there is to be one."""
        if self._witnesses.are_due:
            progress = StateDict(step=self.state.global_step, epoch=self.state.epoch)
            state = self._app_state() | {"progress": progress}
            with_deepspeed.witness(self._engine, state, self._witnesses)

    def _optimizer_and_scheduler(self) -> dict[str, Stateful]:
        """Return the optimizer and the scheduler, unless they belong to the engine of DeepSpeed."""
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

        First, delete the weights, optimizer and scheduler that an earlier save left there. All
        files are written to ``staged`` first, so that a killed save leaves no file of weights.
        """
        with naming_full_disk(folder):
            with without_progress_bars():
                self._save(str(staged), state_dict=weights)
            remove_weights(folder)
            for file in filter(is_file, (folder / name for name in STATE)):
                file.unlink()  # of an earlier run
            return put_small_files(staged, folder)

    def _notices(self, folder: Path) -> list[str]:
        """Return the names of the files that a Trainer without casnap would load."""
        names = [] if self._has_adapter else [WEIGHTS_NAME]
        names += [] if self.args.save_only_model else STATE
        if self._engine is not None and not matching(folder, "global_step*"):
            # The Trainer looks for such a name before it has the engine load anything.
            names.append(f"global_step{self.state.global_step}")
        return names

    def _put_weights(
        self, snapshot: Snapshot, run_dir: str, staged: Path, notices: Notices
    ) -> None:
        """Put the weights beside the snapshot; with ``casnap_weights="last"``, delete older ones.

        It deletes the weights that casnap has put beside all other checkpoints but the best one. No
        weights are put without the notices: from weights alone, a Trainer without casnap would go
        on with a fresh optimizer.
        """
        folder, model, has_adapter = Path(snapshot.path), self._plain_model(), self._has_adapter
        checkpoints = Checkpoints(run_dir, f"{PREFIX_CHECKPOINT_DIR}-", is_its_own).paths()
        others = [path for path in reversed(checkpoints) if path.name != folder.name]
        best = self.state.best_model_checkpoint
        outdated = [
            path
            for path in (others if self.casnap_weights == "last" and not has_adapter else ())
            if best is None or os.path.realpath(path) != os.path.realpath(best)
        ]
        if not notices.put(snapshot):  # once more, since the save has put them
            _remove_weights_of(outdated)
            if not notices.put(snapshot):
                text = "%s gets no weights, since a Trainer without casnap would go on from them"
                _log.warning(f"{text}; `casnap pull` makes a folder with them", folder)
                return
        if has_adapter:
            put_staged(snapshot, folder, staged)
            return
        if has_own_form(type(self)):
            if self._has_own_form:
                put_staged(snapshot, folder, staged)
            _remove_weights_of(outdated)
            return
        differs = is_rewritten(model, WeightFiles.shapes_in(snapshot.contents))
        sizes = inspect.signature(PreTrainedModel.save_pretrained).parameters
        WeightFiles(folder).put(
            snapshot.contents,
            others=others,
            tied=tied_in(model),
            max_shard_size=sizes["max_shard_size"].default,
            write=partial(self._write_weights, snapshot) if differs else None,
            make_room=partial(_remove_weights_of, outdated) if outdated else None,
        )
        _remove_weights_of(outdated)

    def _write_weights(self, snapshot: Snapshot, folder: Path) -> None:
        """Have Transformers write the weights, in the form that it reads."""
        with without_progress_bars():
            self._save(str(folder), state_dict=dict(snapshot.get_state_dict_for_key("model")))

    @property
    def _has_own_form(self) -> bool:
        """Whether a subclass writes the weights in another form, and each rank has all weights."""
        is_whole = self._engine is None and not self.is_fsdp_enabled
        return is_whole and has_own_form(type(self))

    @property
    def _has_adapter(self) -> bool:
        """Whether PEFT saves only an adapter: the model is PEFT's, or has got an adapter."""
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


class _AtSteps(TrainerCallback):
    """Calls a function before the first step of the optimizer, and another one after each.

    The first one gets the number of steps that were made before.
    """

    def __init__(self, begin: Callable[[int], object], call: Callable[[], object]) -> None:
        self._begin, self._call = begin, call

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Call the first one: the checkpoint is loaded, except for random states."""
        self._begin(state.global_step)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Call the other one."""
        self._call()


def _remove_weights_of(folders: list[Path]) -> None:
    for folder in folders:
        try:
            give_up_weights(folder)
        except (OSError, CasnapError) as e:
            _log.warning("the weights of an older checkpoint cannot be removed: %s", e)


def _is_newest(path: str, checkpoints: Checkpoints) -> bool:
    return [Path(path).absolute()] == [p.absolute() for p in checkpoints.paths()[-1:]]


def _last_or_none(checkpoints: Checkpoints, *, may_begin: bool) -> str | None:
    """Return the path of the last whole checkpoint; None if there is none.

    If no save has ended, but there are checkpoints or ``may_begin`` is true, return
    ``_NEVER_SAVED``: training starts from scratch. A warning says so if there are checkpoints.
    """
    last, folders = checkpoints.find_last(), checkpoints.paths()
    if last is not None or any(is_file(f / Markers.FILE) for f in folders):
        return last
    if folders:
        _log.warning("%s holds no whole checkpoint: training begins anew", folders[0].parent)
    return _NEVER_SAVED if folders or may_begin else None
