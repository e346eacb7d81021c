"""The role of an entry in a training, such as weights, moments or a place in the data."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Literal, get_args

from casnap.format.entries import Entry, Payload, TensorEntry, ValueEntry
from casnap.state.stateful import TORCH_NAMES

Role = Literal[
    "generators", "loader", "scheduler", "scaler", "counters", "moments", "weights", "values"
]
ROLES: tuple[Role, ...] = get_args(Role)
"""All roles, causes first: a difference in one role may cause differences in later roles."""

_OF_RANDOM_STATES = frozenset({*TORCH_NAMES, "numpy", "python"})
_OF_SCALER = frozenset({"_growth_tracker", "growth_factor", "backoff_factor", "growth_interval"})
_OF_SCHEDULER = frozenset({"last_epoch", "_step_count", "_last_lr", "base_lrs", "param_groups"})
_OF_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
_GENERATORS = frozenset({"rng", "random", "generator", "generators"})
_SCALER = frozenset({"scaler", "scalers"})
_SCHEDULER = frozenset({"scheduler", "schedulers", "sched"})
_LOADER = frozenset({"loader", "loaders", "dataloader", "dataloaders", "sampler", "samplers"})
_DATA = frozenset({"batches", "data", "dataset"})
_COUNTERS = frozenset(
    {"step", "steps", "epoch", "epochs", "iteration", "iterations", "batch", "batches", "tracked"}
    | {"count", "counter", "samples", "seen", "tokens"}
)


def role_of(path: str, entry: Entry) -> Role:
    """Guess what an entry is for in a training, from the names in its path and from the entry.

    The first rule that holds decides. The words of a component are its runs of letters. A tensor of
    floating-point numbers ("fractions") with more than one element counts as weights or moments,
    whatever its name, since ``casnap prove`` may tolerate differences in other roles.

    ==============  ============================================================================
    ``generators``  the second component is ``torch``, ``numpy`` or ``python``, as in the states
                    of ``RNGState`` and of generators; or a word is ``rng``, ``random`` or
                    ``generator``. A tensor of fractions is never one of these
    ``loader``      a word is ``loader``, ``dataloader`` or ``sampler``; or a word of the key is
                    ``batches``, ``data`` or ``dataset``
    ``scaler``      a word is ``scaler``, or a name is of the state of a ``GradScaler``
    ``scheduler``   a word is ``scheduler``, or a name is of the state of an ``LRScheduler`` or
                    is ``param_groups``, where optimizers keep their learning rates
    ``moments``     a component above the last one is ``state``, as in optimizers; or a name is
                    that of a moment, such as ``exp_avg``, or ends so after a dot
    ``counters``    a number, or a tensor of one element, with a word such as ``step``, ``epoch``
                    or ``seen`` in its name
    ``weights``     any other tensor of fractions: parameters, buffers, averages of weights
    ``values``      anything else
    ==============  ============================================================================

    Args:
        path: The path, ``<key>/<path>``, or with the number of a rank before it.
        entry: Its entry.
    """
    names = _names_in(path)
    # torchtitan's optimizers have such names: state.layers.0.weight.exp_avg
    ends = {end for name in names for end in (name.partition(".")[0], name.rpartition(".")[2])}
    words, last_words, key_words = _words(names), _words(names[-1:]), _words(names[:1])
    is_fractions = isinstance(entry, TensorEntry) and _is_of_fractions(entry.dtype)
    is_of_generator = bool(_OF_RANDOM_STATES.intersection(names[1:2]) or words & _GENERATORS)
    if is_of_generator and not is_fractions:
        return "generators"
    if not is_fractions or _is_one_number(entry):
        if words & _LOADER or key_words & _DATA:
            return "loader"
        if words & _SCALER or _OF_SCALER.intersection(names):
            return "scaler"
        if words & _SCHEDULER or _OF_SCHEDULER.intersection(ends):
            return "scheduler"
    if "state" in names[1:-1] or _OF_MOMENTS.intersection(ends):
        return "moments"
    if last_words & _COUNTERS and _is_one_number(entry):
        return "counters"
    return "weights" if is_fractions else "values"


_STRICT: dict[Role, frozenset[str]] = {
    "loader": _LOADER,
    "scheduler": _SCHEDULER,
    "generators": frozenset({"rng"}),
}

# The statistics of BatchNorm. A plain state dict does not say that they are buffers.
_OF_BATCHES = frozenset({"running_mean", "running_var"})


def is_buffer(path: str, entry: Entry) -> bool:
    """Whether an entry is a buffer of a module, or has the name of a statistic of BatchNorm."""
    if not isinstance(entry, TensorEntry):
        return False
    return entry.kind == "buffer" or path.rpartition("/")[2].rpartition(".")[2] in _OF_BATCHES


def stricter_role_of(path: str, entry: Entry) -> Role:
    """Return the role of an entry, where fractions may be of a loader, a scheduler or a generator.

    :func:`role_of` never says so of more than one fraction. But a shuffled buffer of samples is no
    weight to average, and its change does not mean that a training went on. The names of modules
    with weights are not believed: those with a dot, as in a model's state dict, and ``generator``,
    as in a GAN.
    """
    role = role_of(path, entry)
    if role != "weights":
        return role
    names = _names_in(path)[:-1]
    # Only whole words of a key are of data: data2vec is a model.
    if any(_DATA.intersection(re.split("[^a-z0-9]+", key)) for key in names[:1]):
        return "loader"
    words = _words(name for name in names if "." not in name)
    return next((found for found, strict in _STRICT.items() if words & strict), role)


def is_trained(path: str, entry: Entry) -> bool:
    """Whether an entry is one of the weights that a training changes: it is no buffer."""
    return stricter_role_of(path, entry) == "weights" and not is_buffer(path, entry)


_ONE = ((), (1,))
_FORMS: tuple[Entry, ...] = tuple(
    TensorEntry(Payload(0), dtype, shape) for dtype in ("int64", "float32") for shape in ((2,), ())
)
"""One entry for each number that :func:`form_of` returns."""


def form_of(entry: Entry) -> int:
    """Return the *form* of an entry: a number below 4 that, with its path, determines its role."""
    if isinstance(entry, TensorEntry):
        # A state may have a million of them.
        return 2 * _is_of_fractions(entry.dtype) + (entry.shape in _ONE)
    return int(_is_one_number(entry))


def role_of_form(path: str, form: int) -> Role:
    """Return the role of an entry by its path and its form; see :func:`role_of`."""
    return role_of(path, _FORMS[form % len(_FORMS)])


def _names_in(path: str) -> list[str]:
    """Return the components of a path in lower case, without the number of a rank before them."""
    names = path.lower().split("/")
    return names[1:] if names[0].isdigit() and len(names) > 1 else names


def _words(names: Iterable[str]) -> set[str]:
    return {word for name in names for word in re.findall("[a-z]+", name)}


@cache
def _is_of_fractions(dtype: str) -> bool:
    # numpy's typestrs have the kind as their second letter.
    return dtype.startswith(("float", "bfloat", "complex")) or dtype[1:2] in ("f", "c")


def _is_one_number(entry: Entry) -> bool:
    if isinstance(entry, TensorEntry):
        return entry.shape in _ONE
    return isinstance(entry, ValueEntry) and entry.kind in ("int", "float")
