"""The copies of ``dcp.async_save``. Their memory is kept for the next save of this process.

DCP copies a state before it saves it in the background. By default it allocates fresh memory each
time, which takes several times longer than to reuse memory. It also copies the bytes of storages,
which for some tensors are not their values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from casnap.errors import UnsupportedTypeError
from casnap.extending import describe
from casnap.runtime.buffers import on_release
from casnap.runtime.fork import PerProcess
from casnap.state.devices import synchronize
from casnap.state.parts import holds_parts, path_of_tensor
from casnap.state.tensors import holds_no_values, is_freed, is_its_storage, is_wrapper


class UncopiedError(UnsupportedTypeError):
    """A tensor cannot be copied.

    Attributes:
        tensor: The tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(_why_uncopied("a tensor of the state", tensor))
        self.tensor = tensor


def _why_uncopied(path: str, tensor: torch.Tensor) -> str:
    name = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    if is_wrapper(tensor) and not holds_no_values(tensor):
        return (
            f"{path}: {name} is a tensor subclass that dcp.async_save cannot copy, as its "
            "new_empty() gives another type; store the plain tensors that it wraps, or use "
            "dcp.save with CasnapWriter(allow_pickle=True)"
        )
    try:
        describe(path, tensor)
    except UnsupportedTypeError as e:
        return str(e)
    return f"{path}: {name} holds no values"


torch_copy: Callable[..., torch.Tensor] = StateDictStager._offload_tensor


def true_copy(stager: Any, tensor: Any, memo: dict[int, Any], non_blocking: bool = False) -> Any:
    """Copy a tensor as torch's stager does, but by its values instead of its storage's bytes.

    Args:
        stager: The stager.
        tensor: The tensor.
        memo: The memo of ``deepcopy``.
        non_blocking: Whether the copy may go on after the call.

    Raises:
        UncopiedError: The tensor holds no values, or its class turns the copy into another class.
    """
    if hasattr(tensor, "wait"):  # a collective may still be under way
        tensor = tensor.wait()
    if holds_no_values(tensor):
        raise UncopiedError(tensor)
    if is_wrapper(tensor) or is_its_storage(tensor):
        copy = torch_copy(stager, tensor, memo, non_blocking)
        # If torch's copy is a wrapper of the same class, it wraps copies, and so has the values.
        if is_wrapper(tensor) and type(copy) is not type(tensor):
            raise UncopiedError(tensor)
        return copy
    if is_freed(tensor):
        raise UncopiedError(tensor)
    copy = tensor.detach().to("cpu", copy=True).resolve_conj().resolve_neg()
    for name, value in vars(tensor).items():
        setattr(copy, name, stager.deepcopy_with_tensor_offload(value, memo))
    return copy


class _TrueStager(StateDictStager):
    """Copies tensors by value. A new copy of a storage reuses the memory of its last copy."""

    _offload_tensor = true_copy

    def _stage_untyped_storage(self, storage: Any, non_blocking: bool = False) -> Any:
        copies: Any = self._cached_storage_mapping
        if storage in copies and copies[storage].size() != storage.size():
            del copies[storage]
        return super()._stage_untyped_storage(storage, non_blocking)


def _new_stager() -> DefaultStager:
    # Pinned memory only if this process uses CUDA; otherwise it would create a useless context.
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    stager = DefaultStager(StagingOptions(on_cuda, False, False, on_cuda))
    stager._state_dict_stager = _TrueStager(pin_memory=on_cuda)
    return stager


def _copies(stager: DefaultStager) -> dict[int, int]:
    """Return the memory of a stager's copies: address → bytes."""
    storages: Any = stager._state_dict_stager._cached_storage_mapping
    return {s.data_ptr(): s.nbytes() for s in storages.values() if s.nbytes()}


def _address(value: object) -> int:
    """Return the address of a tensor's memory; 0 if it has none."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        return 0
    return value.untyped_storage().data_ptr()


class _Kept:
    """Keeps at most one stager, whose copies no save uses."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stager: DefaultStager | None = None

    def take(self) -> DefaultStager:
        """Return the kept stager, or else a new one."""
        with self._lock:
            stager, self._stager = self._stager, None
        if stager is not None:
            return stager
        return _new_stager()

    def keep(self, stager: DefaultStager) -> None:
        """Keep a stager whose copies are no longer used."""
        with self._lock:
            self._stager = stager

    def give_up(self) -> int:
        """Free the copies of the kept stager; return how many bytes they had."""
        with self._lock:
            stager, self._stager = self._stager, None
        if stager is None:
            return 0
        nbytes = sum(_copies(stager).values())
        stager.close()
        return nbytes


_kept_memory = PerProcess(_Kept)
on_release(lambda: _kept_memory.value.give_up())


class KeptStager:
    """The part of a writer that DCP uses as an ``AsyncStager``.

    It copies by a ``DefaultStager`` of torch, which owns the memory of the copies. Once a save has
    written from them, the next save uses the same ``DefaultStager``. If a save fails before it
    writes, or if another save is staged meanwhile, the ``DefaultStager`` is dropped. So no two
    saves ever share memory.
    """

    _synchronize_after_execute = False
    _stager: DefaultStager | None = None
    _staged_parts: str | None = None
    _lost_parts: str | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: ``dcp.async_save`` need not wait for the copy, which :meth:`stage` has made."""
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state; later changes do not show in it.

        Raises:
            UnsupportedTypeError: A tensor cannot be copied.
        """
        self._staged_parts, self._lost_parts = path_of_tensor(state_dict, holds_parts), None
        if self._stager is None:
            stager = self._stager = _kept_memory.value.take()
        else:
            # The save before has not ended, or has failed: its copies may still be in use.
            stager, self._stager = _new_stager(), None
        try:
            staged = stager.stage(state_dict)
        except UncopiedError as e:
            uncopied = e.tensor
            path = path_of_tensor(state_dict, lambda tensor: tensor is uncopied)
            raise UnsupportedTypeError(_why_uncopied(path, uncopied) if path else str(e)) from None
        # torch waits only for copies from the current device; others are waited for here.
        synchronize(tree_leaves(state_dict))
        assert isinstance(staged, dict)
        return staged

    def synchronize_staging(self) -> None:
        """Do nothing: ``stage`` returns once the copy is made."""

    def close(self) -> None:
        """Do nothing: the memory is freed once the copied tensors are."""

    def _give_back(self, saved: Iterable[object]) -> None:
        """Keep the stager for the next save, if the save that has ended used its copies.

        Args:
            saved: The values that were saved.
        """
        stager = self._stager
        # Keep the stager only if the values lie in its copies: another save may have been staged
        # meanwhile.
        if stager is not None and not _copies(stager).keys().isdisjoint(map(_address, saved)):
            self._stager = None
            _kept_memory.value.keep(stager)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle this object without its copies, which DCP itself sends to the other process.

        Tensors lose their attributes when they are sent. Then a tensor that is a part of a larger
        one looks whole. So the pickle names such a tensor, and the other process refuses to save
        it.
        """
        state = {key: value for key, value in vars(self).items() if key not in ("_stager", "_own")}
        return {**state, "_lost_parts": self._staged_parts}
