"""Learn from a loader of weights where it puts the elements of a checkpoint in a model.

A loader knows which tensors it joins, and which slices a rank of tensor parallelism has. So casnap
runs it once with the tensors of a checkpoint. Each copy that the loader would make is recorded and
compared with the model. Later, patches are written directly to these places.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from casnap.errors import CasnapError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class UnknownPlacesError(CasnapError):
    """casnap cannot find out where the elements of a checkpoint lie in the model."""


class OtherBaseError(CasnapError):
    """The model does not hold the weights that the patches are to replace."""


class ModelPart(NamedTuple):
    """A part of a tensor of the checkpoint, and the memory of the model that the part fills.

    Attributes:
        start: The number of the part's first element in the flat tensor of the checkpoint.
        strides: The part's strides in that flat tensor, in elements, for each axis of ``target``.
        target: The view of the model's tensor that the part fills.
    """

    start: int
    strides: tuple[int, ...]
    target: torch.Tensor

    def located(self, indices: torch.Tensor) -> tuple[slice | torch.Tensor, torch.Tensor]:
        """Return where elements of the checkpoint lie in the model.

        Args:
            indices: The indices of elements in the flat tensor of the checkpoint, ascending.

        Returns:
            An index into ``indices`` that selects the elements of this part, and the place of each
            of these elements in the storage of the model's tensor.
        """
        axes = self._axes()
        last = self.start + sum((size - 1) * stride for size, stride, _ in axes)
        # Most parts are a few whole rows, so this leaves out most indices at once.
        ends = torch.tensor([self.start, last + 1], dtype=indices.dtype)
        first, stop = torch.searchsorted(indices, ends).tolist()
        rest = indices[first:stop].long() - self.start
        offset, within = int(self.target.storage_offset()), slice(first, stop)
        if len(axes) == 1 and axes[0][1] == 1:
            return within, rest.mul_(axes[0][2]).add_(offset)
        places, is_here = torch.full_like(rest, offset), torch.ones_like(rest, dtype=torch.bool)
        for size, stride, step in axes:
            at = torch.div(rest, stride, rounding_mode="floor")
            rest = rest - at * stride
            places += at * step
            is_here &= at < size
        is_here &= rest == 0
        return is_here.nonzero().view(-1) + first, places[is_here]

    def _axes(self) -> list[tuple[int, int, int]]:
        """Return size, stride in the checkpoint and stride in the model of each axis of the part.

        The axis that is outermost in the checkpoint comes first. Axes that are contiguous to each
        other on both sides are merged.
        """
        axes: list[tuple[int, int, int]] = []
        each = zip(self.target.shape, self.strides, self.target.stride(), strict=True)
        for size, stride, step in sorted(each, key=lambda axis: -axis[1]):
            if size == 1:
                continue
            if axes and axes[-1][1:] == (size * stride, size * step):
                axes[-1] = (axes[-1][0] * size, stride, step)
            else:
                axes.append((size, stride, step))
        return axes


class Places:
    """Where a checkpoint's tensors lie in a model.

    Args:
        regions: The name of each tensor → its parts.
        targets: All tensors of the model.
    """

    def __init__(
        self, regions: Mapping[str, Sequence[ModelPart]], targets: list[torch.Tensor]
    ) -> None:
        self._regions = regions
        self._targets = targets
        self._pointers = _pointers(targets)

    def fits(self, targets: list[torch.Tensor]) -> bool:
        """Whether the tensors of a model have the same addresses as when the places were learnt."""
        return self._pointers == _pointers(targets)

    def of(self, name: str) -> Sequence[ModelPart]:
        """Return the parts of a tensor of the checkpoint; none if the loader leaves it out."""
        return self._regions.get(name, ())


def learn(
    load: Callable[[list[tuple[str, torch.Tensor]]], object],
    weights: Mapping[str, torch.Tensor],
    model: torch.nn.Module,
    padded: Sequence[torch.Tensor] = (),
) -> Places:
    """Find out where a loader puts the tensors of a checkpoint that the model has already loaded.

    Args:
        load: The loader. Its copies are recorded and not made.
        weights: The tensors of the checkpoint, contiguous, each in memory of its own.
        model: The model.
        padded: Tensors of the model with a part that comes from no checkpoint.

    Raises:
        UnknownPlacesError: The loader does more than copy parts.
        OtherBaseError: The model holds other values than the checkpoint.
    """
    notes = _Notes(weights, targets_of(model))
    with _copies_go_to(notes.note):
        try:
            load(list(weights.items()))
        except CasnapError:
            raise
        except Exception as e:
            raise UnknownPlacesError(f"the loader cannot be followed: {e!r}") from e
    notes.check_all_is_covered(model, padded)
    return Places(notes.regions, targets_of(model))


def targets_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a model: the tensors to which a loader may write."""
    return [tensor.data for tensor in (*model.parameters(), *model.buffers())]


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor of all elements in the storage of ``tensor``."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor as integers of the same size, to compare and copy its bits."""
    return tensor.view(_BITS[tensor.element_size()])


def _pointers(targets: list[torch.Tensor]) -> list[tuple[int, torch.dtype, tuple[int, ...]]]:
    return [(each.data_ptr(), each.dtype, tuple(each.shape)) for each in targets]


class _Notes:
    """Records where in a model a loader would copy each tensor of the checkpoint.

    Attributes:
        regions: Name of a tensor of the checkpoint → its parts in the model.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], targets: list[torch.Tensor]) -> None:
        self._weights = sorted(
            (
                (tensor.data_ptr(), name, tensor)
                for name, tensor in weights.items()
                if tensor.numel()
            ),
            key=lambda each: each[0],
        )
        self._starts = [start for start, _, _ in self._weights]
        self._storages = {each.untyped_storage().data_ptr() for each in targets}
        self.regions: dict[str, list[ModelPart]] = {}

    def note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Record one copy that the loader would make.

        Args:
            target: The memory in the model.
            source: A tensor of the checkpoint, or a part of it.

        Raises:
            UnknownPlacesError: The target is not in the model, or has another shape.
            OtherBaseError: The target holds other values.
        """
        if not source.numel():
            return
        name, tensor = self._owner(source)
        if target.untyped_storage().data_ptr() not in self._storages:
            raise UnknownPlacesError(f"the loader copies {name} elsewhere than to the model")
        strides = zip(source.shape, source.stride(), strict=True)
        if target.shape != source.shape or any(n > 1 and not stride for n, stride in strides):
            raise UnknownPlacesError(f"the loader copies {name} to a place of another shape")
        value = source.to(target.device, target.dtype)
        if not torch.equal(bits_of(value), bits_of(target)):
            raise OtherBaseError(f"the model holds other values of {name}")
        start = (source.data_ptr() - tensor.data_ptr()) // tensor.element_size()
        self.regions.setdefault(name, []).append(ModelPart(start, source.stride(), target.detach()))

    def _owner(self, source: torch.Tensor) -> tuple[str, torch.Tensor]:
        at = bisect_right(self._starts, source.data_ptr()) - 1
        if at >= 0:
            start, name, tensor = self._weights[at]
            is_inside = source.data_ptr() < start + tensor.nbytes
            if is_inside and source.dtype == tensor.dtype and source.device == tensor.device:
                return name, tensor
        raise UnknownPlacesError("the loader copies what it has computed from the checkpoint")

    def check_all_is_covered(self, model: torch.nn.Module, padded: Sequence[torch.Tensor]) -> None:
        """Check that all parameters come from the checkpoint: patches would miss any other.

        Args:
            model: The model.
            padded: Tensors of the model with a part that comes from no checkpoint.

        Raises:
            UnknownPlacesError: Some parameters do not come from the checkpoint.
        """
        parts: dict[int, list[torch.Tensor]] = {}
        for regions in self.regions.values():
            for region in regions:
                key = region.target.untyped_storage().data_ptr()
                parts.setdefault(key, []).append(region.target)
        allowed = {each.untyped_storage().data_ptr() for each in padded}
        for name, parameter in model.named_parameters():
            key = parameter.untyped_storage().data_ptr()
            if not parameter.numel():
                raise UnknownPlacesError(f"the model has given up its {name}")
            if key not in parts:
                raise UnknownPlacesError(f"the loader does not copy to {name}")
            if key in allowed:
                continue
            seen = torch.zeros(len(storage_of(parameter.data)), dtype=torch.bool)
            for part in parts[key]:
                seen.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(True)
            own = seen.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())
            if not own.all():
                raise UnknownPlacesError(f"the loader copies to a part of {name} alone")


@contextmanager
def _copies_go_to(note: Callable[[torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """Within this ``with`` block, call ``note`` in place of each ``copy_`` of this thread."""
    copy, thread = torch.Tensor.copy_, threading.get_ident()
    had_own = "copy_" in vars(torch.Tensor)

    def noted(target: Any, source: Any, non_blocking: bool = False) -> Any:
        if threading.get_ident() != thread:
            return copy(target, source, non_blocking)
        note(target, source)
        return target

    torch.Tensor.copy_ = noted  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        if had_own:
            torch.Tensor.copy_ = copy  # type: ignore[method-assign]
        else:
            del torch.Tensor.copy_
