"""Give the mixin to every Trainer of a process, as ``casnap run`` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Trainer

from casnap.integrations.transformers.classes import storing
from casnap.integrations.transformers.mixin import CasnapTrainerMixin
from casnap.integrations.witnesses import OnMismatch


def install(
    tell: Callable[[str], object] | None = None,
    *,
    weights: str | None = None,
    witness_steps: int | None = None,
    on_mismatch: OnMismatch | None = None,
) -> None:
    """Have each new Trainer of this process save and load as :class:`CasnapTrainerMixin` does.

    Subclasses are included, also those that were imported before. Checkpoints that the Trainer
    itself has written are still loaded. A tool that names the newest checkpoint of ``output_dir``
    gets the last whole one, as ``resume_from_checkpoint=True`` does.

    Args:
        tell: Called on rank 0 when a Trainer begins to train, with a line that says where it saves;
            and with one that says from which checkpoint it resumes, if it does.
        weights: ``casnap_weights`` of :class:`CasnapTrainerMixin`, unless a class with that mixin
            sets it; by default it stays as it is.
        witness_steps: ``casnap_witness_steps``, in the same way.
        on_mismatch: ``casnap_on_mismatch``, in the same way.
    """
    given = {"weights": weights, "witness_steps": witness_steps, "on_mismatch": on_mismatch}
    for name, value in given.items():
        if value is not None:
            setattr(CasnapTrainerMixin, f"casnap_{name}", value)
    CasnapTrainerMixin._tell = None if tell is None else staticmethod(tell)

    def new(cls: Any, *_: Any, **__: Any) -> Any:
        return object.__new__(storing(cls, CasnapTrainerMixin))

    Trainer.__new__ = new
