"""Checkpoints of DeepSpeed's ZeRO as snapshots, on any number of ranks.

::

    from casnap.integrations.deepspeed import load_checkpoint, save_checkpoint

    save_checkpoint(engine, "/ckpts/run1", client_state={"epoch": 3})
    path, client_state = load_checkpoint(engine, "/ckpts/run1")

Each rank of ZeRO holds runs of consecutive elements of parameters. casnap stores a run as a few
boxes of a named tensor, like the shards of a DTensor. So a snapshot depends neither on the stage
nor on the number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from casnap import HealthOptions, PendingSnapshot, Retention, Snapshot, Stateful, Store
from casnap.errors import StateError
from casnap.extending import (
    Comm,
    DividedLeaves,
    Fit,
    ForeignCheckpoints,
    Leaf,
    ObjectPath,
    Region,
    StateSource,
    TakeOptions,
    Target,
    WithOthers,
    boxes_of_run,
    casnap_path,
    check_together,
    containers_above,
    describe,
    flatten,
    join,
    leaf_of_parts,
    load_together,
    local_path,
    without_torch_modes,
)
from casnap.integrations.trainers import (
    Save,
    StrPath,
    agreed,
    check_alone,
    check_saved_by,
    not_found_error,
    snapshot_at,
)
from casnap.integrations.versions import check_version

check_version("deepspeed")

__all__ = ["async_save_checkpoint", "load_checkpoint", "save_checkpoint"]

T = TypeVar("T")


def save_checkpoint(
    engine: Any,
    save_dir: StrPath,
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    *,
    exclude_frozen_parameters: bool = False,
    allow_pickle: bool = False,
    retention: Retention | None = None,
    timeout: float | None = None,
) -> Snapshot:
    """Take a snapshot of what ``engine.save_checkpoint`` saves. All ranks call this.

    The snapshot has three keys. ``model`` has the weights as the module has them, and the buffers
    of rank 0. ``optimizer`` has the master weights (``fp32``) and states such as ``exp_avg``, by
    the names of the parameters, and ``groups``. ``engine`` has counts, loss scale, scheduler and
    client state.

    Args:
        engine: The engine, of ZeRO-1, 2 or 3.
        save_dir: The folder of the snapshot. It is or becomes the store, unless there is a store
            above it. A bucket works too.
        tag: The name of the snapshot in the folder; ``global_step<n>`` by default. A snapshot of
            that name is replaced once the new one is whole.
        client_state: Values of rank 0 that :func:`load_checkpoint` returns.
        exclude_frozen_parameters: Leave out the parameters that are not trained.
        allow_pickle: Store values that have no safe encoding by pickle.
        retention: Afterwards, delete the snapshots of ``save_dir`` that these rules do not keep.
        timeout: Seconds that a rank waits for another before all ranks raise; 600 by default.

    Raises:
        StateError: The engine splits the model in a way that casnap does not support.
        CasnapError: This rank or another one failed; nothing was committed.
    """
    check_supported(engine)
    save = Save(
        _path(save_dir, tag or _tag_of(engine)),
        _options(engine, allow_pickle, retention, timeout),
        root=save_dir,
    )
    with _Partitioned(engine):
        return save.take(
            partial(_state_of, engine, client_state, exclude_frozen_parameters, allow_pickle)
        )


def async_save_checkpoint(
    engine: Any,
    save_dir: StrPath,
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    *,
    exclude_frozen_parameters: bool = False,
    allow_pickle: bool = False,
    retention: Retention | None = None,
    timeout: float | None = None,
) -> PendingSnapshot:
    """Do as :func:`save_checkpoint`, but return once the state is copied; store in the background.

    The arguments and errors are the same. ``wait()`` of the returned object, or the next save,
    raises an error that occurred in the background.
    """
    check_supported(engine)
    save = Save(
        _path(save_dir, tag or _tag_of(engine)),
        _options(engine, allow_pickle, retention, timeout),
        root=save_dir,
    )
    with _Partitioned(engine):
        return save.begin(
            partial(_state_of, engine, client_state, exclude_frozen_parameters, allow_pickle)
        )


def load_checkpoint(
    engine: Any,
    load_dir: StrPath,
    tag: str | None = None,
    *,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    allow_pickle: bool = False,
    timeout: float | None = None,
) -> tuple[str | None, dict[str, Any]]:
    """Load a snapshot into an engine, in place and verified. All ranks call this.

    The number of ranks and the stage of ZeRO may differ from those of the save.

    Args:
        engine: The engine, of ZeRO-1, 2 or 3.
        load_dir: The folder of the snapshot.
        tag: The name of the snapshot; the newest one by default.
        load_optimizer_states: Load the master weights and the states of the optimizer. If False,
            the master weights are made from the weights of the module.
        load_lr_scheduler_states: Load the scheduler.
        load_module_only: Load only the module.
        allow_pickle: Unpickle values that were stored by pickle.
        timeout: Seconds that a rank waits for another before all ranks raise; 600 by default.

    Returns: The path of the snapshot, and the client state. If there is no snapshot and no tag was
    given: None, and an empty dict. If the folder has checkpoints of another form, a warning says
    so.

    Raises:
        SnapshotNotFoundError: There is no snapshot of this tag.
        StateError: No tag was given, and the folder itself is a snapshot, or DeepSpeed has saved a
            checkpoint after the last snapshot. Or DeepSpeed has saved one into the snapshot's
            folder.
        MismatchError: The engine does not fit the snapshot; nothing was loaded.
        DamagedError: Stored bytes are missing or damaged.
    """
    check_supported(engine)
    comm = join(None, timeout, f"loading from {os.fspath(load_dir)!r}")
    with_states = load_optimizer_states and not load_module_only
    with_scheduler = load_lr_scheduler_states and not load_module_only
    with comm:
        find = partial(_newest, load_dir) if tag is None else partial(_path, load_dir, tag)
        path = agreed(comm, find)
        if path is None:
            return None, {}
        stored = _read(path, with_states=with_states, allow_pickle=allow_pickle)
        kept, states = stored.kept, stored.states
        with _Partitioned(engine), torch.no_grad(), stored.snapshot.contents.reading():
            _check(engine, stored, comm, with_scheduler=with_scheduler)
            if with_states:
                _make_room(engine.optimizer, states)
            load_together(stored.snapshot, comm, _targets(engine, states, kept["has_frozen"]))
            if with_states:
                _load_groups(engine.optimizer, stored.groups)
            else:
                engine.optimizer.refresh_fp32_params()
    if not load_module_only:
        engine.global_steps, engine.global_samples = kept["global_steps"], kept["global_samples"]
        engine.skipped_steps = kept["skipped_steps"]
        _load_scaler(engine.optimizer, kept)
    if with_scheduler and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(kept["lr_scheduler"])
    return path, kept["client_state"]


def check_with(engine: Any, path: StrPath, *, allow_pickle: bool = False) -> None:
    """Check that :func:`load_checkpoint` could load a snapshot, before other values are loaded.

    Args:
        engine: The engine.
        path: The path of the snapshot.
        allow_pickle: Unpickle values that were stored by pickle.

    Raises:
        MismatchError: The engine does not fit the snapshot.
    """
    with join(None, None, f"looking at {os.fspath(path)!r}") as comm:
        stored = _read(os.fspath(path), with_states=True, allow_pickle=allow_pickle)
        with _Partitioned(engine), torch.no_grad(), stored.snapshot.contents.reading():
            _check(engine, stored, comm, with_scheduler=True)


def take_with(
    engine: Any,
    take: Callable[[Callable[[], StateSource]], T],
    others: Mapping[str, Stateful],
    *,
    allow_pickle: bool = False,
) -> T:
    """Take a snapshot of an engine and of other values, for trainers that have an engine.

    :func:`load_checkpoint` loads the engine's part.

    Args:
        engine: The engine, which :func:`check_supported` has accepted.
        take: Takes the state that its argument returns: a save, or a witness.
        others: The other values by key. No key may be a key of the engine.
        allow_pickle: Store values that have no safe encoding by pickle.
    """
    with _Partitioned(engine):
        return take(lambda: WithOthers(_state_of(engine, None, False, allow_pickle), others))


def _tag_of(engine: Any) -> str:
    return f"global_step{engine.global_steps}"


def _path(folder: StrPath, name: str) -> str:
    return f"{os.fspath(folder).rstrip('/')}/{name}"


def _options(
    engine: Any, allow_pickle: bool, retention: Retention | None, timeout: float | None
) -> TakeOptions:
    return TakeOptions(
        metadata={"step": engine.global_steps},
        overwrite=True,
        allow_pickle=allow_pickle,
        retention=retention,
        timeout=timeout,
    )


def _newest(load_dir: StrPath) -> str | None:
    """Return the path of the newest snapshot of a folder; None if there is none."""
    last = Store(local_path(load_dir)).latest(healthy=HealthOptions.are_obeyed())
    if last is None and (itself := snapshot_at(load_dir)) is not None:
        folder, _, name = itself.path.rpartition("/")
        raise StateError(
            f"{os.fspath(load_dir)} is a snapshot, and no folder of snapshots; to load it, "
            f"give load_checkpoint the folder {folder!r} and the tag {name!r}"
        )
    if last is None:
        return None
    _check_none_later(load_dir, last)
    return last.path


def _check_none_later(load_dir: StrPath, last: Snapshot) -> None:
    """Check that the last checkpoint of a folder is a snapshot, not one that DeepSpeed has saved.

    Raises:
        StateError: DeepSpeed has written ``latest`` after the last snapshot.
    """
    if "://" in os.fspath(load_dir):
        return
    folder = Path(local_path(load_dir))
    is_there = ForeignCheckpoints(folder).library() == "DeepSpeed"
    if is_there and (latest := folder / "latest").stat().st_mtime > last.time:
        raise StateError(
            f"{latest} names {latest.read_text(errors='replace').strip()!r:.80}, a checkpoint of "
            f"DeepSpeed, and is newer than the last snapshot, {last.name!r}. Either DeepSpeed "
            "itself has saved after it: engine.load_checkpoint goes on from what it has saved. "
            "Or the folder is a copy by `cp -r`, which gives files new times (`cp -a` keeps them). "
            "To go on from the snapshot, as in such a copy, give load_checkpoint the tag "
            f"{last.name!r}, or remove the file {latest}"
        )


def check_supported(engine: Any) -> None:
    """Check that the ranks divide nothing but the states of ZeRO.

    Raises:
        StateError: The ranks divide the model in another way, such as tensor parallelism.
    """
    problems = {
        "ZeRO-0": engine.optimizer is None or not engine.zero_optimization(),
        "model parallelism": engine.mp_world_size != 1,
        "pipelines": type(engine).__name__ == "PipelineEngine",
        "experts": engine.has_moe_layers,
        "offloading to NVMe": engine.zero_nvme_offload_optimizer(),
    }
    found_problems = [name for name, is_there in problems.items() if is_there]
    if found_problems:
        raise StateError(
            f"casnap.integrations.deepspeed does not support {', '.join(found_problems)}; without "
            "ZeRO, take a snapshot of engine.module and engine.optimizer by casnap.Snapshot.take"
        )


class _Partitioned:
    """A context manager. In its block ZeRO-3 keeps only this rank's part of each tensor.

    Otherwise ZeRO-3 keeps small tensors whole on each rank.
    """

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer

    def __enter__(self) -> None:
        getattr(self._optimizer, "checkpoint_event_prologue", _do_nothing)()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:  # a collective, so only if no rank fails
            getattr(self._optimizer, "checkpoint_event_epilogue", _do_nothing)()


def _do_nothing() -> None:
    pass


# --- the parts of this rank -------------------------------------------------------------------


class _HeldElements(NamedTuple):
    """A run of consecutive elements of a tensor that this rank holds.

    Attributes:
        shape: The shape of the whole tensor.
        start: The number of the first element, row-major.
        memory: The elements, flat.
    """

    shape: tuple[int, ...]
    start: int
    memory: torch.Tensor

    def boxes(self) -> Iterator[tuple[Region, torch.Tensor]]:
        """Yield the boxes that the elements fill, each with its memory."""
        position = 0
        for box in boxes_of_run(self.shape, self.start, self.start + self.memory.numel()):
            yield box, self.memory.narrow(0, position, box.numel).view(box.sizes)
            position += box.numel


def _module_run(parameter: Any) -> _HeldElements:
    """Return the elements of a module's parameter that this rank stores."""
    if hasattr(parameter, "ds_tensor"):
        return _run_of_stage_3(parameter, parameter.ds_tensor)
    memory = parameter.detach().flatten()
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:
        start, count = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
    elif parameter.requires_grad:
        start, count = 0, 0
    else:  # all ranks have the same values
        rank, size, numel = dist.get_rank(), dist.get_world_size(), memory.numel()
        start = numel * rank // size
        count = numel * (rank + 1) // size - start
    return _HeldElements(tuple(parameter.shape), start, memory[start : start + count])


def _state_run(optimizer: Any, parameter: Any, key: str) -> _HeldElements:
    """Return this rank's elements of a parameter's optimizer state.

    Args:
        optimizer: The optimizer of ZeRO.
        parameter: The parameter.
        key: The name of the state; ``fp32`` for the master weights.
    """
    if hasattr(parameter, "ds_tensor"):
        state_key = None if key == "fp32" else key
        held, _ = optimizer._get_fp32_opt_state_partition(parameter, True, state_key)
        return _run_of_stage_3(parameter, held)
    mapping = parameter._hp_mapping
    if mapping is None:
        return _HeldElements(tuple(parameter.shape), 0, parameter.new_empty(0))
    _, flat = _flat_groups(optimizer)[mapping.param_group_index]
    memory, place = flat.detach(), mapping.hp_fragment_address
    if key != "fp32":
        memory = optimizer.optimizer.state[flat][key]
    held = memory.narrow(0, place.start, place.numel)
    return _HeldElements(tuple(parameter.shape), mapping.lp_fragment_address.start, held)


def _run_of_stage_3(parameter: Any, held: torch.Tensor) -> _HeldElements:
    """Return this rank's elements of a parameter, without the padding of ZeRO-3.

    Args:
        parameter: The parameter.
        held: This rank's part, padded to the same length on all ranks.
    """
    start = dist.get_rank(parameter.ds_process_group) * held.numel()
    count = min(held.numel(), parameter.ds_numel - start)
    return _HeldElements(tuple(parameter.ds_shape), start, held.detach()[: max(count, 0)])


def _flat_groups(optimizer: Any) -> list[tuple[int, torch.Tensor]]:
    """Return the flat master weights of this rank, each with the number of its group."""
    if hasattr(optimizer, "sub_group_to_group_id"):  # ZeRO-3
        groups = optimizer.sub_group_to_group_id
        return [(groups[i], flat) for i, flat in enumerate(optimizer.fp32_partitioned_groups_flat)]
    names = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    flats = next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))
    return list(enumerate(flats))


def _trained(engine: Any) -> dict[str, Any]:
    return {n: p for n, p in engine.module.named_parameters() if p.requires_grad}


# --- saving -----------------------------------------------------------------------------------


@torch.no_grad()
def _state_of(
    engine: Any,
    client_state: Mapping[str, Any] | None,
    without_frozen: bool,
    allow_pickle: bool,
) -> DividedLeaves:
    """Return the leaves that this rank stores.

    Args:
        engine: The engine.
        client_state: The user's values; None for none.
        without_frozen: Whether to leave out frozen parameters.
        allow_pickle: Whether values without a safe encoding may be pickled.
    """
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    module_state = engine.module.state_dict()
    names = [
        name
        for name in module_state
        if name not in parameters or parameters[name].requires_grad or not without_frozen
    ]
    optimizer, trained = engine.optimizer, _trained(engine)
    states = ["fp32", *_flat_states(optimizer)]
    leaves: dict[str, list[Leaf]] = {"model": [], "optimizer": [], "engine": []}
    if dist.get_rank() == 0:
        values: list[ObjectPath] = [("model", name) for name in names]
        values += [("optimizer", key, name) for key in states for name in trained]
        for key, containers in containers_above([*values, ("optimizer", "groups")]).items():
            leaves[key] += containers
        plain = partial(flatten, allow_pickle=allow_pickle)
        leaves["optimizer"] += plain(_groups(optimizer), "optimizer/groups")
        counts = _counts(engine, client_state)
        counts |= {"states": states, "has_frozen": not without_frozen}
        leaves["engine"] += plain(counts, "engine")
        for name, value in module_state.items():
            if name not in parameters:
                leaves["model"] += plain(value, casnap_path(("model", name)))
    with without_torch_modes():
        for name in names:
            if name in parameters:
                run = _module_run(parameters[name])
                leaves["model"] += _leaves(casnap_path(("model", name)), run)
        for key, name in product(states, trained):
            run = _state_run(optimizer, trained[name], key)
            leaves["optimizer"] += _leaves(casnap_path(("optimizer", key, name)), run)
    return DividedLeaves(leaves)


def _leaves(path: str, run: _HeldElements) -> Iterator[Leaf]:
    if 0 in run.shape:  # only one rank stores a tensor without elements
        if dist.get_rank() == 0:
            yield describe(path, run.memory.new_empty(run.shape))
    else:
        yield from leaf_of_parts(path, run.shape, run.boxes())


def _flat_states(optimizer: Any) -> list[str]:
    """Return the names of the optimizer states that have an element for each parameter element."""
    for _, flat in _flat_groups(optimizer):
        state = optimizer.optimizer.state.get(flat, {})
        return [k for k, v in state.items() if torch.is_tensor(v) and v.shape == flat.shape]
    return []


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the settings of each group of parameters, and its states that are not per element."""
    groups = [
        {"settings": {k: v for k, v in group.items() if k != "params"}, "state": {}}
        for group in optimizer.param_groups
    ]
    for number, flat in _flat_groups(optimizer):
        state = optimizer.optimizer.state.get(flat, {})
        groups[number]["state"] = {
            k: v for k, v in state.items() if not torch.is_tensor(v) or v.shape != flat.shape
        }
    return groups


def _counts(engine: Any, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
    scheduler, optimizer = engine.lr_scheduler, engine.optimizer
    loss_scaler = getattr(optimizer, "loss_scaler", None)
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "scaler": {name: getattr(optimizer, name, None) for name in _SCALER},
        "loss_scaler": {} if loss_scaler is None else dict(vars(loss_scaler)),
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "client_state": dict(client_state or {}),
    }


_SCALER = ("dynamic_loss_scale", "overflow")


# --- loading ----------------------------------------------------------------------------------


class _Stored(NamedTuple):
    """The values of a snapshot, without the tensors.

    Attributes:
        snapshot: The snapshot.
        kept: The value of its key ``engine``.
        groups: The settings of the groups of the optimizer, if states are loaded.
        states: The states of the optimizer that are loaded; ``fp32`` for the master weights.
    """

    snapshot: Snapshot
    kept: dict[str, Any]
    groups: list[dict[str, Any]]
    states: list[str]


def _read(path: str, *, with_states: bool, allow_pickle: bool) -> _Stored:
    snapshot = snapshot_at(path)
    if snapshot is None:
        raise not_found_error(path)
    check_alone(path)
    check_saved_by(snapshot, __name__, ("model", "engine", *["optimizer"] * with_states))
    kept = snapshot.read_object("engine", allow_pickle=allow_pickle)
    if not with_states:
        return _Stored(snapshot, kept, [], [])
    groups = snapshot.read_object("optimizer/groups", allow_pickle=allow_pickle)
    return _Stored(snapshot, kept, groups, kept["states"])


def _check(engine: Any, stored: _Stored, comm: Comm, *, with_scheduler: bool) -> None:
    """Check that an engine fits a snapshot; change nothing. All ranks call this.

    Args:
        engine: The engine.
        stored: The values of the snapshot.
        comm: The ranks.
        with_scheduler: Whether the scheduler is loaded.

    Raises:
        MismatchError: The engine does not fit.
    """
    states = stored.states
    problems = _problems_of_groups(engine.optimizer, stored) if states else []
    if with_scheduler and engine.lr_scheduler is not None and stored.kept["lr_scheduler"] is None:
        problems.append(
            "it was saved without a scheduler, and this engine has one "
            "(load_lr_scheduler_states=False leaves that as it is)"
        )
    names: dict[ObjectPath, Collection[str]] = {("model",): engine.module.state_dict().keys()}
    names |= {("optimizer", key): _trained(engine).keys() for key in states}
    targets = _targets(engine, states, stored.kept["has_frozen"], look=True)
    check_together(stored.snapshot, comm, targets, Fit(names, problems))


def _problems_of_groups(optimizer: Any, stored: _Stored) -> list[str]:
    groups = optimizer.param_groups
    if len(stored.groups) != len(groups):
        return [
            f"it has {len(stored.groups)} groups of parameters, and this optimizer {len(groups)}"
        ]
    there, here = set(stored.states) - {"fp32"}, set(_flat_states(optimizer))
    # Before its first step an optimizer has no states. Then its settings tell its kind.
    if not (there and here) and groups:
        there, here = _numbers_of(stored.groups[0]["settings"]), _numbers_of(groups[0])
        if not (there - here and here - there):
            return []
    if there == here:
        return []
    return [
        f"it is of an optimizer with {', '.join(sorted(there)) or 'nothing'}, and this one has "
        f"{', '.join(sorted(here)) or 'nothing'} (load_optimizer_states=False leaves that out)"
    ]


def _numbers_of(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of a group's numeric settings, which differ between kinds of optimizers."""
    return {
        name
        for name, value in settings.items()
        if isinstance(value, int | float | tuple | list | torch.Tensor)
        and not isinstance(value, bool)
        and name != "params"
    }


def _targets(
    engine: Any, states: list[str], with_frozen: bool, *, look: bool = False
) -> Iterator[Target]:
    """Yield the tensors that this rank fills, with their boxes.

    Args:
        engine: The engine.
        states: The states of the optimizer to fill.
        with_frozen: Whether to fill frozen parameters too.
        look: Whether the targets are only compared. If so, the master weights are yielded in place
            of states, as the optimizer may not have these yet.
    """
    module, optimizer = engine.module, engine.optimizer
    kept_names = module.state_dict().keys()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if hasattr(tensor, "ds_tensor"):
            run = _module_run(tensor)
            shape, parts = run.shape, list(run.boxes())
        else:
            shape = tuple(tensor.shape)
            parts = [(Region.whole(shape), tensor.detach())]
        is_frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
        if name in kept_names and (with_frozen or not is_frozen):
            yield Target(("model", name), shape, parts)
    trained = _trained(engine)
    for key, name in product(states, trained):
        run = _state_run(optimizer, trained[name], "fp32" if look else key)
        if run.memory.numel():
            yield Target(("optimizer", key, name), run.shape, list(run.boxes()))


def _make_room(optimizer: Any, states: list[str]) -> None:
    """Allocate the optimizer states of each parameter, which an optimizer lacks before a step.

    Args:
        optimizer: The optimizer of ZeRO.
        states: The names of the states.
    """
    for _, flat in _flat_groups(optimizer):
        state = optimizer.optimizer.state[flat]
        if states == ["fp32"]:  # the snapshot is of before the first step
            state.clear()
        for key in states:
            if key != "fp32" and key not in state:
                state[key] = torch.zeros_like(flat)
    # ZeRO-1 and 2 look for the states of each parameter at their next step.
    optimizer._hp_optimizer_states_linked = False


def _load_groups(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """Set the settings of each group, and its states that are not per element."""
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        group.update(stored["settings"])
    for number, flat in _flat_groups(optimizer):
        for key, value in groups[number]["state"].items():
            held = value.clone() if torch.is_tensor(value) else value
            optimizer.optimizer.state[flat][key] = held


def _load_scaler(optimizer: Any, stored: dict[str, Any]) -> None:
    for name, value in stored["scaler"].items():
        if hasattr(optimizer, name):
            setattr(optimizer, name, value)
    if getattr(optimizer, "loss_scaler", None) is not None:
        vars(optimizer.loss_scaler).update(stored["loss_scaler"])
