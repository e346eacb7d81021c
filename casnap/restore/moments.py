"""Find moments of an optimizer whose shapes do not fit their parameters.

torch loads moments of any shape. The next step then fails, or a fused kernel writes beyond their
memory.

Here a *moment* is any tensor that an optimizer keeps for a parameter. Some correctly differ in
shape from the parameter: counters, factors, projections, blocks of quantized moments. So a moment
is refused only if the live parameter and the stored one differ in shape, or if the live optimizer
is known to need a moment of another shape than the stored one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from casnap.format.entries import ContainerEntry, TensorEntry
from casnap.format.names import component_of, key_of
from casnap.restore.key_state import KeyState, copied, packed_lists
from casnap.restore.load_into import tensors_of
from casnap.restore.loading import Loading
from casnap.restore.restore_report import RestoreReport
from casnap.state.flatten import fill_targets, live_parts
from casnap.state.values import encode_key
from casnap.storage import Contents

_OF_ADAM = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
_OF_ITS_SHAPE: Mapping[str, Collection[str]] = {
    "_adafactor": ("variance",),
    "_muon": ("momentum_buffer",),
    "adadelta": ("acc_delta", "square_avg"),
    "adagrad": ("sum",),
    "adam": _OF_ADAM,
    "adamax": ("exp_avg", "exp_inf"),
    "asgd": ("ax",),
    "nadam": _OF_ADAM,
    "radam": _OF_ADAM,
    "rmsprop": ("grad_avg", "momentum_buffer", "square_avg"),
    "rprop": ("prev", "step_size"),
    "sgd": ("momentum_buffer",),
    "sparse_adam": _OF_ADAM,
}
"""The moments of torch's own optimizers that have the shape of their parameter.

The key is the module of ``torch.optim`` that has the optimizer's step. A subclass that keeps this
step may have moments of its own, of any name and shape.
"""


class Taken(NamedTuple):
    """A module's parameter in the snapshot.

    Attributes:
        path: Its path.
        shape: Its shape.
    """

    path: str
    shape: tuple[int, ...]


TakenParameters: TypeAlias = Mapping[int, Taken]
"""The ``id()`` of each live parameter → the same parameter in the snapshot."""


def taken_parameters(states: Iterable[KeyState]) -> TakenParameters:
    """Return the path and shape of each parameter of the modules in the snapshot.

    Args:
        states: The keys of the app state. Keys that are no modules are ignored.

    Returns:
        The ``id()`` of the live parameter → path and shape in the snapshot.
    """
    taken: dict[int, Taken] = {}
    for state in states:
        if isinstance(state.stateful, torch.nn.Module):
            for name, each in tensors_of(state.stateful):
                path = f"{state.component}/{component_of(name)}"
                entry = state.entries.get(path)
                if isinstance(entry, TensorEntry):
                    taken.setdefault(id(each.value), Taken(path, entry.shape))
    return taken


def without_misfits(
    contents: Contents,
    state: KeyState,
    optimizer: torch.optim.Optimizer,
    taken: TakenParameters,
    report: RestoreReport,
) -> KeyState:
    """Report the moments that do not fit their parameters, and leave them out.

    Args:
        contents: The snapshot.
        state: The key of the optimizer. Its groups have the same number and sizes as in the
            snapshot.
        optimizer: The optimizer.
        taken: What the snapshot has for the parameters of modules.
        report: Gets the moments.

    Returns: The key. A parameter with a moment that does not fit has no state in it, so that the
    optimizer treats it as never trained.
    """
    parameters = dict(_states(contents, state, optimizer))
    unfit = set[str]()
    for path, entry in state.entries.items():
        match entry:
            case TensorEntry(shape=shape):
                stored: tuple[int, ...] | None = shape
            case ContainerEntry(kind=kind) if kind.startswith("sparse"):
                stored = None
            case _:
                continue
        parent, _, name = path.rpartition("/")
        parameter = parameters.get(parent)
        if parameter is None or parameter.shape == stored:
            continue
        reason = _why_unfit(optimizer, parameter, name, stored, taken.get(id(parameter)))
        if reason:
            report.mismatched.append(f"{path}: {reason}")
            unfit.add(parent)
    return replace(state.without(unfit), skipped=state.skipped | unfit)


def _states(
    contents: Contents, state: KeyState, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the path of each parameter's optimizer state in the snapshot, and the parameter.

    The snapshot names parameters by numbers or texts. torch matches them by their order in the
    groups, and so does this function.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    lists = [f"{state.component}/param_groups/{i}/params" for i in range(len(groups))]
    packed, loading = packed_lists(contents, state, lists), Loading(contents)
    pairs: list[tuple[object, torch.Tensor]] = []
    parameters: dict[str, torch.Tensor] = {}
    for path, group in zip(lists, groups, strict=True):
        pairs += zip(packed.get(path, ()), group, strict=False)
        for j, parameter in enumerate(group):
            if (element := f"{path}/{j}") in state.entries:
                parameters[element] = parameter
                loading.add(element, state.entries[element])
    pairs += ((key, parameters[path]) for path, key in loading.load_values().items())
    for key, parameter in pairs:
        if isinstance(key, int | str) and not is_lazy(parameter):
            component = str(key) if type(key) is int else component_of(encode_key(key))
            yield f"{state.component}/state/{component}", parameter


def _why_unfit(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    name: str,
    stored: tuple[int, ...] | None,
    taken: Taken | None,
) -> str:
    """Return why a stored moment does not fit a parameter; empty if it may fit.

    Call this only if moment and parameter differ in shape. The moment does not fit in any of these
    cases:

    - The parameter has one shape in the snapshot, and another one here.
    - The optimizer already holds this moment here, in the shape of the parameter.
    - The optimizer is one of torch's own, and would make this moment in a shape that is not the
      stored one.

    Args:
        optimizer: The optimizer.
        parameter: The parameter.
        name: The name of the moment.
        stored: The moment's shape in the snapshot; None for a sparse one.
        taken: What the snapshot has for the parameter, if a module has it.
    """
    shape = tuple(parameter.shape)
    if taken is not None and taken.shape != shape and (stored != () or not taken.shape):
        return f"its parameter {taken.path} has {shape} here, {taken.shape} in the snapshot"
    held = optimizer.state.get(parameter, {}).get(name)
    wanted = _shape_by_torch(optimizer, shape, name)
    if isinstance(held, torch.Tensor) and tuple(held.shape) == shape:
        wanted = shape
    if wanted is None or stored in (None, wanted):
        return ""
    return f"{wanted} here, {stored} in the snapshot"


def _shape_by_torch(
    optimizer: torch.optim.Optimizer, shape: tuple[int, ...], name: str
) -> tuple[int, ...] | None:
    """Return the shape that an optimizer of torch gives a moment; None if that is not known.

    It is known only for the moments of torch's own optimizers.

    Args:
        optimizer: The optimizer.
        shape: The shape of the parameter.
        name: The name of the moment.
    """
    package, _, module = type(optimizer).step.__module__.rpartition(".")
    if package != "torch.optim":
        return None
    if module == "lbfgs":
        # One flat vector of all parameters is the state of the first.
        flat: Any = optimizer
        return (flat._numel(),) if name in ("d", "prev_flat_grad") else None
    if module == "_adafactor" and len(shape) > 1 and name == "row_var":
        return (*shape[:-1], 1)
    if module == "_adafactor" and len(shape) > 1 and name == "col_var":
        return (*shape[:-2], 1, shape[-1])
    return shape if name in _OF_ITS_SHAPE.get(module, ()) else None


# --- by the names of parameters -------------------------------------------------------------------


def without_named_misfits(
    state: KeyState, modules: Iterable[torch.nn.Module], report: RestoreReport
) -> KeyState:
    """Report the moments that do not fit, in a state made by ``get_optimizer_state_dict()``.

    In their place the live moments are kept: the loader refuses a state that lacks a moment. A
    moment does not fit if it has another shape in the snapshot, and the live one has the shape of
    its parameter. The state names each moment by its parameter.

    Args:
        state: The key of a value whose loader is neither torch's nor casnap's.
        modules: The modules of the app state.
        report: Gets the moments.

    Returns:
        The key. A parameter with a moment that does not fit keeps its whole live state.
    """
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for module in modules:
        for name, each in tensors_of(module):
            if isinstance(each.value, torch.nn.Parameter) and not is_lazy(each.value):
                bare_name = name.replace("_orig_mod.", "").removeprefix("module.")
                shapes.setdefault(bare_name, set()).add(tuple(each.value.shape))
    unfit = set[str]()
    for path, shards in fill_targets(state.current, state.component).items() if shapes else ():
        entry, name = state.entries.get(path), _parameter_of(path)
        if isinstance(entry, TensorEntry) and entry.shape != shards.shape in shapes.get(name, ()):
            report.mismatched.append(f"{path}: {shards.shape} here, {entry.shape} in the snapshot")
            unfit.add(name)
    if not unfit:
        return state
    parts = live_parts(state.current, state.component)
    kept = {path: value for path, value in parts if _parameter_of(path) in unfit}
    entries = {p: e for p, e in state.entries.items() if _parameter_of(p) not in unfit}
    known = {path: copied(value) for path, value in kept.items()}
    skipped = state.skipped | (state.entries.keys() - entries.keys() - kept.keys())
    return replace(state, entries=entries, known={**state.known, **known}, skipped=skipped)


def _parameter_of(path: str) -> str:
    """Return the parameter's name in a path of an optimizer state; empty if there is none.

    The path has ``state/<name>/<moment>``, or in the flattened form ``state.<name>.<moment>``.
    """
    keys = [key_of(component) for component in path.split("/")]
    if keys[-1].startswith("state."):
        return keys[-1].removeprefix("state.").rpartition(".")[0]
    if "state" in keys[1:]:
        return (*keys[keys.index("state", 1) + 1 :], "")[0]
    return ""
