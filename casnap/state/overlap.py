"""Find live tensors that share memory, and fill them in place if that is safe.

A snapshot holds tied weights and views like any other tensors. Two of them may be filled in place
only if their new contents agree on the shared memory. The same is true of one tensor whose elements
share memory, as after ``unfold``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias, TypeVar

import torch

from casnap.runtime.torch_modes import fill
from casnap.state.tensors import as_copyable

Name = TypeVar("Name", bound=tuple[str, int])
_ALIGNMENT = 64


def conflicting_groups(
    tensors: Mapping[Name, torch.Tensor], content: Callable[[Name], object]
) -> list[list[Name]]:
    """Return the groups of tensors that share memory and whose new contents may conflict.

    Args:
        tensors: The tensors by name.
        content: Returns the new content of a tensor by its name. Contents are compared by ``==``.
    """
    spans = []
    for name, t in tensors.items():
        if t.numel():
            spans.append((str(t.device), t.data_ptr(), end_address(t), name))
    groups: list[list[Name]] = []
    device, stop = "", 0
    for span_device, start, end, name in sorted(spans):
        if groups and span_device == device and start < stop:
            groups[-1].append(name)
            stop = max(stop, end)
        else:
            groups.append([name])
            device, stop = span_device, end

    def agrees(group: list[Name]) -> bool:
        if len(group) == 1:
            return not overlaps_itself(tensors[group[0]])
        looks = {
            (t.data_ptr(), t.dtype, t.shape, t.stride(), content(n))
            for n, t in ((n, tensors[n]) for n in group)
        }
        return len(looks) == 1 and not overlaps_itself(tensors[group[0]])

    return [group for group in groups if not agrees(group)]


def end_address(tensor: torch.Tensor) -> int:
    """Return the address just past the last element of a tensor that is not empty."""
    if tensor.is_contiguous():
        return tensor.data_ptr() + tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last_offset = sum((n - 1) * stride for n, stride in steps)
    return tensor.data_ptr() + (last_offset + 1) * tensor.itemsize


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a strided tensor may share memory; True if in doubt."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    reach = 0
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and stride <= reach:
            return True
        reach += (n - 1) * stride
    return False


_Filling: TypeAlias = tuple[torch.Tensor, object]  # a strided tensor, and its new content


def fill_shared_memory(fillings: Iterable[_Filling]) -> bool:
    """Copy new contents into tensors that share memory, if all can hold their contents at once.

    Returns:
        Whether the tensors were filled. If not, none was changed.
    """
    listed = list(fillings)
    if can_hold_all(listed):
        _fill(listed)
        return True
    return False


def can_hold_all(fillings: Iterable[_Filling]) -> bool:
    """Whether tensors that share memory can all hold their new contents at once.

    The contents are tried in a copy of the memory, so that no tensor changes.
    """
    listed = list(fillings)
    # The start is rounded down, so that the copies are aligned as the tensors are.
    start = min(tensor.data_ptr() for tensor, _ in listed) // _ALIGNMENT * _ALIGNMENT
    stop = max(end_address(tensor) for tensor, _ in listed)
    scratch = torch.empty(stop - start, dtype=torch.uint8).untyped_storage()

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        offset = (tensor.data_ptr() - start) // tensor.itemsize
        return torch.empty(0, dtype=tensor.dtype).set_(
            scratch, offset, tensor.shape, tensor.stride()
        )

    filled = _fill((copy_of(tensor), content) for tensor, content in listed)
    return all(same_bytes(copy, content) for copy, content in filled)


def _fill(fillings: Iterable[_Filling]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copy new contents into tensors; return each tensor with its content, in the same dtype."""
    both = [
        (as_copyable(target.detach()), as_copyable(content.to(target.dtype)))
        for target, content in fillings
        if isinstance(content, torch.Tensor)
    ]
    for target, content in both:
        # Torch refuses to write an expanded element more than once, so write its first copy.
        distinct = tuple(slice(0, 1) if step == 0 else slice(None) for step in target.stride())
        fill(target[distinct], content[distinct])
    return both


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bytes, NaNs included."""
    flat_a, flat_b = (
        t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for t in (a, b.to(a.device))
    )
    return torch.equal(flat_a, flat_b)
