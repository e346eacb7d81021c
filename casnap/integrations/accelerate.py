"""The state of an Accelerator as snapshots.

::

    from casnap.integrations.accelerate import load_state, save_state

    save_state(accelerator, "/ckpts/run1/step_100")
    load_state(accelerator, "/ckpts/run1/step_100")

After ``witness_steps(accelerator, 2)``, a run that resumes proves that it computes the same.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from casnap import RNGState, Snapshot, Stateful
from casnap.errors import SnapshotExistsError, StateError
from casnap.extending import (
    LiveState,
    TakeOptions,
    is_taken,
    join,
    local_path,
    matching,
    own_rank,
)
from casnap.integrations import with_deepspeed
from casnap.integrations.sharded import ShardedModel, ShardedOptimizer, optimizer_for
from casnap.integrations.trainers import (
    WEIGHTS,
    WEIGHTS_ALONE,
    Checkpoints,
    Notices,
    StrPath,
    Value,
    both_there_error,
    check_beside,
    check_whole,
    load_own,
    not_found_error,
    plain_model,
    snapshot_at,
)
from casnap.integrations.versions import check_version
from casnap.integrations.witnesses import OnMismatch, Witnesses

check_version("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from accelerate.utils.constants import RNG_STATE_NAME, WEIGHTS_NAME  # noqa: E402

__all__ = ["load_state", "save_state", "witness_steps"]

_NOTICE = (
    "This is a snapshot of casnap; load it by "
    f"casnap.integrations.accelerate.load_state(accelerator, folder). {WEIGHTS_ALONE}"
)
_ITS_OWN = "one of the Accelerator's own"
_OF_A_RANK = ["dataloader*"]
_ONE_COPY = ("NO", "MULTI_CPU", "MULTI_GPU")
"""The kinds of worlds in which each process has the whole model."""


def save_state(
    accelerator: Accelerator, output_dir: StrPath | None = None, *, allow_pickle: bool = False
) -> Snapshot:
    """Take a snapshot of what ``accelerator.save_state(output_dir)`` saves. All processes call it.

    That is the prepared models, optimizers, schedulers and stateful data loaders, the scaler, the
    random states, the step, and what was registered for checkpointing. The keys are ``model``,
    ``model_1``, ``custom_0`` and so on. The models are stored as they are without a wrapper of DDP
    or FSDP. With FSDP, optimizers are stored by the names of parameters.

    Before it saves, it deletes each older snapshot in the same parent folder whose own folder this
    process has seen, and a user or a program has deleted since, as by ``shutil.rmtree``.

    Args:
        accelerator: The Accelerator.
        output_dir: The path of the snapshot, which replaces a snapshot of that name. With
            ``automatic_checkpoint_naming`` it is ``checkpoint_<n>`` below ``checkpoints`` of the
            project; once the new snapshot is there, the oldest beyond ``total_limit`` are deleted.
        allow_pickle: Store values that have no safe encoding by pickle.

    Raises:
        StateError: The Accelerator splits the model in a way that casnap does not support here.
        SnapshotExistsError: With automatic naming, a snapshot of that number exists with its
            folder; or the Accelerator itself has written a checkpoint there.
    """
    _check_supported(accelerator)
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    if automatic:
        output_dir = _project(accelerator) / f"checkpoint_{accelerator.save_iteration}"
    elif output_dir is None:
        raise StateError("no output_dir, and automatic_checkpoint_naming is off")
    if _is_its_own(output_dir):
        raise SnapshotExistsError(
            f"{os.fspath(output_dir)} holds a checkpoint that the Accelerator itself has written, "
            "and one name is not for two states: save under another one, or remove that folder"
            + automatic
            * "; accelerator.project_configuration.iteration is the next number"
        )
    engine, weights = _engine(accelerator), _weights(accelerator)
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(accelerator._models, weights, os.fspath(output_dir))
    state = _app_state(accelerator, weights)
    options = TakeOptions(
        metadata=_metadata_of(accelerator),
        # A kill after the commit leaves a snapshot without a folder, which no run goes on from.
        overwrite=not (automatic and is_taken(output_dir)),
        allow_pickle=allow_pickle,
        per_rank=_OF_A_RANK,
    )
    leads = own_rank() == 0
    notices = Notices(_NOTICE, [WEIGHTS_NAME] if leads else [])
    snapshot = with_deepspeed.take(engine, state, _absolute(output_dir), options, notices)
    limit = accelerator.project_configuration.total_limit
    if leads and automatic and limit is not None:
        _checkpoints(accelerator).forget_oldest(limit)
    accelerator.project_configuration.iteration += 1
    _witnesses(accelerator).follow(snapshot.path, allow_pickle=allow_pickle)
    return snapshot


def load_state(
    accelerator: Accelerator,
    input_dir: StrPath | None = None,
    *,
    allow_pickle: bool = False,
    **load_model_func_kwargs: Any,
) -> None:
    """Load a snapshot into the prepared objects, in place. All processes call it.

    If the Accelerator itself has written the folder, the Accelerator loads it.

    Args:
        accelerator: The Accelerator, after ``prepare``.
        input_dir: The path of the snapshot. With ``automatic_checkpoint_naming`` you may leave it
            out: then the last checkpoint is loaded, and the next save gets the next number.
        allow_pickle: Unpickle values that were stored by pickle.
        load_model_func_kwargs: Passed to the Accelerator for a folder that it has written.

    Raises:
        SnapshotNotFoundError: There is no such snapshot.
        StateError: The folder has both a snapshot and a checkpoint of the Accelerator's own, or
            other weights than those of the snapshot.
        MismatchError: The prepared objects do not fit the snapshot; nothing was loaded.
    """
    _check_supported(accelerator)
    if input_dir is None:
        if not accelerator.project_configuration.automatic_checkpoint_naming:
            raise StateError("no input_dir, and automatic_checkpoint_naming is off")
        checkpoints = _checkpoints(accelerator)
        with join(None, None, f"looking for the last of {_project(accelerator)}") as comm:
            input_dir = checkpoints.last(comm)
        if input_dir is None:
            raise not_found_error(_project(accelerator), _ITS_OWN)
        accelerator.project_configuration.iteration = checkpoints.next_number()
    snapshot = snapshot_at(_absolute(input_dir))
    _witnesses(accelerator).follow(None)
    if snapshot is None:
        if not _is_its_own(input_dir):
            raise not_found_error(input_dir, _ITS_OWN)
        accelerator.load_state(os.fspath(input_dir), **load_model_func_kwargs)
        return
    if _is_its_own(input_dir):
        raise both_there_error(input_dir, "the Accelerator itself")
    names = [_numbered("model", i) for i in range(len(accelerator._models))]
    check_beside(snapshot, input_dir, _weights_in(input_dir), names)
    models = list(accelerator._models)
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(models, os.fspath(input_dir))
    _load(accelerator, models, snapshot, allow_pickle=allow_pickle)
    _witnesses(accelerator).follow(snapshot.path, allow_pickle=allow_pickle)


def witness_steps(
    accelerator: Accelerator, steps: int, *, on_mismatch: OnMismatch = "warn"
) -> None:
    """Have the first optimizer steps after each save and load prove that a resume was right.

    Call it once on all processes, after ``prepare``, and before :func:`load_state`. At each of
    these steps, digests of what :func:`save_state` saves are stored, as right after the step of the
    last prepared optimizer; or they are compared if they are there already, as in a run that was
    killed and has resumed. ``docs/guides/proving-a-resume.md`` says more.

    Args:
        accelerator: The Accelerator.
        steps: How many steps after each save; 0 for none.
        on_mismatch: "warn" logs the first paths that differ; "raise" raises ``WitnessError``.

    Raises:
        StateError: No optimizer is prepared, or DeepSpeed steps in its own way.
        ValueError: An argument has no such value.
    """
    if _engine(accelerator) is not None or not accelerator._optimizers:
        raise StateError("witness_steps needs a prepared optimizer, and does not support DeepSpeed")
    accelerator._casnap_witnesses = witnesses = Witnesses(
        steps, on_mismatch, options=TakeOptions(per_rank=_OF_A_RANK)
    )

    # No hook of torch's: to read the state of a fresh optimizer, torch makes a step on some ranks.
    optimizer = accelerator._optimizers[-1]
    step = optimizer.step

    @functools.wraps(step)
    def step_witnessed(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        is_due = accelerator.sync_gradients and witnesses.are_due
        # Another call may have replaced it.
        if is_due and _witnesses(accelerator) is witnesses:
            witnesses.take(lambda: LiveState(_app_state(accelerator, _weights(accelerator))))
        return result

    optimizer.step = step_witnessed


def _witnesses(accelerator: Accelerator) -> Witnesses:
    return getattr(accelerator, "_casnap_witnesses", None) or Witnesses()


def _weights(accelerator: Accelerator) -> list[dict[str, Any]]:
    """Return the weights of each model; none if an engine of DeepSpeed has them."""
    if _engine(accelerator) is not None:
        return []
    return [model.state_dict() for model in _models(accelerator, None)]


def _app_state(accelerator: Accelerator, weights: list[dict[str, Any]]) -> dict[str, Stateful]:
    """Return what a save stores, except what an engine of DeepSpeed has."""
    return {
        **dict(_parts(accelerator)),
        **{_numbered("model", i): Value(w) for i, w in enumerate(weights)},
        "step": Value(accelerator.step),
        "rng": RNGState(),
    }


def _load(
    accelerator: Accelerator, models: list[Any], snapshot: Snapshot, *, allow_pickle: bool
) -> None:
    """Load a snapshot into ``models``, and into all other prepared objects."""
    engine, state = _engine(accelerator), dict[str, Stateful]()
    if engine is None:
        stored = _models(accelerator, models)
        state |= {_numbered("model", i): model for i, model in enumerate(stored)}
    state |= _parts(accelerator)
    _check_keys(snapshot, state, () if engine is None else with_deepspeed.KEYS)
    with_deepspeed.check(engine, snapshot, allow_pickle=allow_pickle)
    if engine is None:
        for i, (module, optimizer) in enumerate(_pairs(accelerator)):
            key = _numbered("optimizer", i)
            state[key] = optimizer_for(snapshot, key, module, optimizer, _is_sharded(accelerator))
    loader_keys = [key for key in state if key.startswith("dataloader")]
    snapshot.restore(
        {key: value for key, value in state.items() if key not in loader_keys},
        allow_pickle=allow_pickle,
    )
    if engine is not None:
        with_deepspeed.load(engine, snapshot, allow_pickle=allow_pickle)
    for key in loader_keys:
        load_own(snapshot, key, state[key], allow_pickle=allow_pickle)
    accelerator.step = snapshot.read_object("step")
    load_own(snapshot, "rng", RNGState())


def _check_supported(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind is DistributedType.DEEPSPEED:
        if len(accelerator._models) != 1:
            raise StateError(
                f"{len(accelerator._models)} models are prepared; with DeepSpeed, save_state and "
                "load_state support one"
            )
    elif kind is DistributedType.FSDP:
        models, optimizers = len(accelerator._models), len(accelerator._optimizers)
        if optimizers and models != optimizers:
            raise StateError(
                f"{models} models and {optimizers} optimizers are prepared; with FSDP, save_state "
                "and load_state need one optimizer for each model, in the same order, as "
                "Accelerate's own do"
            )
    elif kind not in [DistributedType(name) for name in _ONE_COPY]:
        raise StateError(f"save_state and load_state do not support {kind.value}")


def _engine(accelerator: Accelerator) -> Any:
    """Return the engine of DeepSpeed; None if there is none."""
    is_one = accelerator.distributed_type is DistributedType.DEEPSPEED
    return accelerator._models[0] if is_one else None


def _metadata_of(accelerator: Accelerator) -> dict[str, Any]:
    """Return the step as metadata, as the engine or an optimizer counts it; empty if none does.

    The Accelerator's own count is not used: it counts only within ``accumulate()``, and begins
    again at the end of each data loader.
    """
    if (engine := _engine(accelerator)) is not None:
        return {"step": int(engine.global_steps)}
    for optimizer in accelerator._optimizers:
        for state in optimizer.optimizer.state.values():
            if "step" in state:
                return {"step": int(state["step"])}
    return {}


def _is_sharded(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type is DistributedType.FSDP


def _models(accelerator: Accelerator, models: list[Any] | None) -> list[Any]:
    """Return the given models, or all, as they are stored: without wrappers in their names."""
    models = accelerator._models if models is None else models
    if _is_sharded(accelerator):
        return [ShardedModel(model) for model in models]
    return [plain_model(accelerator, model) for model in models]


def _pairs(accelerator: Accelerator) -> list[tuple[Any, Any]]:
    """Return pairs of a model and its optimizer; an empty list if the pairs are not known.

    They are known if there are as many optimizers as models: both are then in the same order.
    """
    models, optimizers = accelerator._models, accelerator._optimizers
    same = len(models) == len(optimizers)
    return list(zip(models, optimizers, strict=True)) if same else []


def _parts(accelerator: Accelerator) -> Iterator[tuple[str, Stateful]]:
    """Yield key and value of each object with a state, except models and objects of an engine."""
    engine = _engine(accelerator)
    optimizers = accelerator._optimizers if engine is None else []
    if _is_sharded(accelerator):
        optimizers = [ShardedOptimizer(*pair) for pair in _pairs(accelerator)]
    for name, values in (
        ("optimizer", optimizers),
        ("scheduler", with_deepspeed.not_of_engine(engine, accelerator._schedulers)),
        ("dataloader", accelerator._dataloaders),
    ):
        for i, value in enumerate(values):
            if name != "dataloader" or getattr(value, "use_stateful_dataloader", False):
                yield _numbered(name, i), value
    for i, value in enumerate(accelerator._custom_objects):
        yield f"custom_{i}", value
    if accelerator.scaler is not None:
        yield "scaler", accelerator.scaler


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _check_keys(
    snapshot: Snapshot, state: dict[str, Stateful], other_keys: Collection[str]
) -> None:
    """Check that the snapshot has exactly the keys of ``state`` and ``other_keys``.

    Raises:
        EntryNotFoundError: The snapshot was thinned, and lacks a key.
        StateError: The snapshot has more keys, or fewer.
    """
    stored_keys = snapshot.contents.trees(own_rank()).keys() - {"step", "rng", *other_keys}
    missing_keys, extra_keys = (
        sorted(state.keys() - stored_keys),
        sorted(stored_keys - state.keys()),
    )
    for key in missing_keys:
        check_whole(snapshot, key)
    if missing_keys or extra_keys:
        raise StateError(
            f"{snapshot.path} does not fit what was prepared and registered: it lacks "
            f"{', '.join(missing_keys) or 'nothing'}, and has more: "
            f"{', '.join(extra_keys) or 'nothing'}"
        )


def _project(accelerator: Accelerator) -> Path:
    return Path(accelerator.project_dir, "checkpoints")


def _absolute(path: StrPath) -> StrPath:
    return path if "://" in os.fspath(path) else Path(local_path(path)).absolute()


def _checkpoints(accelerator: Accelerator) -> Checkpoints:
    return Checkpoints(_project(accelerator), "checkpoint_", _is_its_own)


def _weights_in(path: StrPath) -> list[Path]:
    """Return the files of weights that the Accelerator would load, whoever has written them."""
    numbered = ("model_[0-9]*.safetensors", "pytorch_model_[0-9]*.bin")
    return [] if "://" in os.fspath(path) else matching(local_path(path), *WEIGHTS, *numbered)


def _is_its_own(path: StrPath) -> bool:
    """Whether the Accelerator itself has written a whole checkpoint.

    It has if there are files of random states, which it writes last.
    """
    return "://" not in os.fspath(path) and bool(
        matching(local_path(path), f"{RNG_STATE_NAME}_*.pkl")
    )
