"""The values of an app state: their protocol, a dict that follows it, and random states.

Torch is imported only where a random state is read or set, so importing this module is cheap.
"""

from __future__ import annotations

import logging
import sys
from collections import UserDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ForwardRef, Protocol, TypeAlias, runtime_checkable

from casnap.errors import MismatchError, UnsupportedTypeError, with_article
from casnap.runtime.lazy_imports import ModuleLater

if TYPE_CHECKING:
    import numpy
    import torch
else:
    numpy, torch = ModuleLater("numpy"), ModuleLater("torch")

_log = logging.getLogger("casnap")


@runtime_checkable
class Stateful(Protocol):
    """A value of an app state: a module, an optimizer, a scheduler, a :class:`StateDict`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a state."""
        ...


if TYPE_CHECKING:
    AppState: TypeAlias = Mapping[str, Stateful | torch.Generator | numpy.random.Generator]
    """The values that a take stores and a restore fills, by key."""
else:
    # ``typing.get_type_hints`` resolves this wherever a signature names an app state.
    AppState = Mapping[
        str, ForwardRef("Stateful | torch.Generator | numpy.random.Generator", module=__name__)
    ]


class StateDict(UserDict[str, Any]):
    """A dict for values in an app state.

    A restore keeps the keys that the snapshot lacks, as TorchSnapshot does. So a program may add a
    field and continue from an older snapshot.

    Example:
        >>> progress = StateDict(step=100)
        >>> progress["step"]
        100
    """

    def __init__(self, values: Any = None, /, **more: Any) -> None:
        """Take items from a mapping or from pairs, and from keyword arguments."""
        if type(self) is StateDict:
            # UserDict sets each value by a call, which takes long for a million values.
            self.data = dict(() if values is None else values, **more)
        else:
            super().__init__(values, **more)

    def state_dict(self) -> dict[str, Any]:
        """Return the content itself, not a copy."""
        return self.data

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every key of ``state_dict``; other keys stay."""
        self.data.update(state_dict)


TORCH_NAMES = ("torch", "rng_state")
"""The keys of the state of torch's generator on the CPU: in RNGState, and in TorchSnapshot."""


class RNGState:
    """The global random states of torch (CPU, and the accelerator in use), Python and numpy.

    The state of numpy's legacy functions (``numpy.random.*``) is included if numpy is imported. A
    state from TorchSnapshot has torch's alone. Loading such a state leaves the states of Python and
    numpy as they are, and logs a warning.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the random states as numbers and tensors."""
        import random

        import torch

        from casnap.runtime.torch_modes import without_torch_modes

        version, words, gauss = random.getstate()
        with without_torch_modes():
            state: dict[str, Any] = {
                "torch": torch.get_rng_state(),
                "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
            }
            name, module = _accelerator()
            if name and module.is_initialized():
                state[name] = tuple(map(module.get_rng_state, range(module.device_count())))
            if sys.modules.get("numpy") is not None:
                state["numpy"] = _numpy_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the random states; states of devices that this host lacks are ignored."""
        import random

        import torch

        from casnap.runtime.torch_modes import without_torch_modes

        of_torch = next((state_dict[n] for n in TORCH_NAMES if n in state_dict), None)
        if of_torch is None:
            raise KeyError(f"no random state of torch: none of {', '.join(TORCH_NAMES)}")
        with without_torch_modes():
            if "python" in state_dict:
                version, words, gauss = state_dict["python"]
                random.setstate((version, tuple(words.tolist()), gauss))
            else:
                _log.warning(
                    "this random state holds only that of torch: those of Python and numpy stay as "
                    "they are"
                )
            if "numpy" in state_dict:
                _set_numpy_state(state_dict["numpy"])
            name, module = _accelerator()
            if states := state_dict.get(name):
                for device, state in zip(range(module.device_count()), states, strict=False):
                    module.set_rng_state(state.cpu(), device)
            torch.set_rng_state(of_torch.cpu())

    def __repr__(self) -> str:
        return "RNGState()"


def _accelerator() -> tuple[str, Any]:
    """Return the kind of accelerator that this torch is built for, and torch's module for it.

    The kind is "" if the module has no random states. The function does not ask whether a device is
    there, since after that a forked child could not use CUDA.
    """
    import torch

    device = torch.accelerator.current_accelerator()
    name = "" if device is None else device.type
    module = getattr(torch, name, None)
    return (name, module) if hasattr(module, "is_initialized") else ("", None)


class _Generator:
    """Gives a generator of torch or numpy, such as a sampler's, the methods of a Stateful."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._name = type(generator).__module__.partition(".")[0]

    def state_dict(self) -> dict[str, Any]:
        from casnap.runtime.torch_modes import without_torch_modes

        if self._name == "numpy":
            return {"numpy": self._generator.bit_generator.state}
        with without_torch_modes():
            return {"torch": self._generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        from casnap.runtime.torch_modes import without_torch_modes

        if self._name not in state_dict:
            raise MismatchError(
                f"this generator of {self._name} cannot go on from the state of another kind"
            )
        if self._name == "numpy":
            self._generator.bit_generator.state = state_dict["numpy"]
            return
        with without_torch_modes():
            self._generator.set_state(state_dict["torch"].cpu())


def is_generator(value: object) -> bool:
    """Whether a value is a ``torch.Generator`` or a ``numpy.random.Generator``."""
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Generator):
        return True
    return numpy is not None and isinstance(value, numpy.random.Generator)


def is_random_state(stateful: Stateful) -> bool:
    """Whether a value of an app state is a random state. Call :func:`with_states` first."""
    return isinstance(stateful, RNGState | _Generator)


def with_states(app_state: AppState) -> Mapping[str, Stateful]:
    """Return an app state whose generators have ``state_dict`` and ``load_state_dict`` too."""
    values: Any = app_state
    if not isinstance(values, Mapping) or not any(map(is_generator, values.values())):
        return values  # type: ignore[no-any-return]
    return {k: _Generator(v) if is_generator(v) else v for k, v in values.items()}


def same_random_state(a: Any, b: Any) -> bool:
    """Whether two random states, as ``RNGState.state_dict()`` returns them, are equal."""
    import torch

    from casnap.runtime.torch_modes import without_torch_modes

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        with without_torch_modes():
            return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_random_state(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same_random_state, a, b))
    return bool(a == b)


_MERSENNE = "MT19937"


def _numpy_state() -> dict[str, Any]:
    import numpy as np
    import torch

    state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    if state["bit_generator"] == _MERSENNE:
        key = torch.from_numpy(state["state"]["key"].astype(np.int64))
        state["state"] = {**state["state"], "key": key}
    return state


def _set_numpy_state(state: dict[str, Any]) -> None:
    try:
        import numpy as np
    except ImportError:
        return  # without numpy, this state has no effect
    if state["bit_generator"] == _MERSENNE:
        key = state["state"]["key"].cpu().numpy().astype(np.uint32)
        state = {**state, "state": {**state["state"], "key": key}}
    np.random.set_state(state)


def random_states_first(app_state: Mapping[str, Stateful]) -> list[str]:
    """Return the keys of an app state, the key of the random state first.

    It comes first, since reading the state of another value may draw random numbers.

    Raises:
        UnsupportedTypeError: A value lacks ``state_dict`` or ``load_state_dict``.
        RuntimeError: There are two random states.
    """
    if not isinstance(app_state, Mapping):
        raise UnsupportedTypeError(
            f"an app state is a dict of keys and Statefuls, like {{'model': model}}; got "
            f"{with_article(type(app_state).__qualname__)}"
        )
    for key, value in app_state.items():
        if not isinstance(key, str):
            raise UnsupportedTypeError(f"the keys of an app state are str; got {key!r}")
        if not isinstance(value, Stateful):
            raise UnsupportedTypeError(
                f"app_state[{key!r}] is {with_article(type(value).__qualname__)}, which lacks "
                "state_dict() or load_state_dict(); wrap plain values in casnap.StateDict"
            )
    random = [k for k, v in app_state.items() if isinstance(v, RNGState)]
    if len(random) > 1:
        raise RuntimeError(f"an app state holds one RNGState at most; found {', '.join(random)}")
    return random + [k for k in app_state if k not in random]
