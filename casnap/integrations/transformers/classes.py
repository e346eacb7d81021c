"""Make the class of a Trainer with casnap, from the class that is asked for."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from casnap.integrations.trainers import snapshot_at
from casnap.integrations.transformers.storing import StoringTrainer


@functools.cache
def storing(kind: Any, mixin: Any) -> Any:
    """Return the class of a Trainer with casnap.

    Args:
        kind: The class that was asked for.
        mixin: The mixin, which comes first if the class does not have it.
    """
    if issubclass(kind, StoringTrainer):
        return kind
    names = {name: getattr(kind, name) for name in ("__doc__", "__module__", "__qualname__")}
    names["_asked_for"] = kind
    if not issubclass(kind, mixin):
        installed = names | {"_installed": True}
        kind = _subclass(kind.__name__, (mixin, kind), installed)
    kind = _subclass(kind.__name__, (kind, StoringTrainer), names)
    for _, name in alone(kind):
        if name.startswith("_load"):
            setattr(kind, name, _load_of_both(getattr(kind, name), vars(StoringTrainer)[name]))
    return kind


def alone(kind: type) -> Iterator[tuple[type, str]]:
    """Yield class and name of each overriding method that never calls the method it overrides.

    Only the methods of the Trainer that casnap replaces count. A method counts as calling the
    overridden one if its code has that name. So one that calls it only in some cases is not found.
    """
    yield from _replacing(kind, vars(StoringTrainer).keys())


def has_own_form(kind: type) -> bool:
    """Whether a class writes weights in another form: its ``_save`` does not call Trainer's."""
    return any(_replacing(kind, {"_save"}))


def _replacing(kind: type, names: Collection[str]) -> Iterator[tuple[type, str]]:
    order = kind.__mro__
    for owner in order[1 : order.index(StoringTrainer)]:  # the first is casnap's
        for name in vars(owner).keys() & set(names):
            code = getattr(inspect.unwrap(vars(owner)[name]), "__code__", None)
            if code is not None and name not in _names_in(code):
                yield owner, name


def unpickled(kind: Any) -> Any:
    """Return a new Trainer of a class, without a state. Pickle calls this."""
    return kind.__new__(kind)


def _subclass(name: str, bases: tuple[Any, ...], names: Mapping[str, Any]) -> Any:
    return types.new_class(name, bases, exec_body=lambda body: body.update(names))


def _load_of_both(theirs: Any, ours: Any) -> Any:
    """Return a method that loads by casnap where there is a snapshot, else as a subclass does."""
    # The first argument is the checkpoint, by position or by its name; or there is none.
    name = next(iter([*inspect.signature(ours).parameters][1:]), None)

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name is None:
            checkpoint = self.state.best_model_checkpoint
        else:
            checkpoint = args[0] if args else kwargs.get(name)
        is_ours = checkpoint is not None and snapshot_at(checkpoint) is not None
        return (ours if is_ours else theirs)(self, *args, **kwargs)

    return load


def _names_in(code: types.CodeType) -> set[str]:
    inner = (_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*inner)
