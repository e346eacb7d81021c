"""Turn tensors, numpy arrays and numpy scalars into an entry and a carrier of their bytes.

The carrier is a plain strided tensor whose row-major elements are the entry's bytes: an ordinary
tensor itself, the integers of a quantized tensor, the bytes of a numpy array. So code that hashes,
stages and fills carriers handles one kind of tensor. The entry of a sharded tensor describes the
whole tensor. It has a carrier for each part that this rank holds.
"""

from __future__ import annotations

import struct
import sys
from math import prod
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from casnap.errors import DamagedError, StateError, UnsupportedTypeError
from casnap.format.entries import TORCH_DTYPES, KnownEntry, Payload, TensorEntry, check_known
from casnap.runtime.buffers import can_write
from casnap.state.numpy_values import (
    NUMPY_TEXTS,
    assemble_numpy,
    describe_numpy,
    is_numpy,
    numpy_itemsize,
)
from casnap.state.quantized import check_quantization, quantization_of, quantized
from casnap.state.sharded import Shards, shards_of, without_torch_function

ORDINARY_TYPES = (torch.Tensor, torch.nn.Parameter)
"""The plain types of tensors. Each other type of tensor is a subclass of one of them."""


class Leaf(Struct, frozen=True):
    """One entry of a state with its content.

    A struct is made in a tenth of the time of a named tuple, and there may be a million leaves.

    Attributes:
        path: The logical path.
        entry: Its entry. Until the leaf is stored, the payload has no digests. It has the length,
            and perhaps the bytes of a value or container.
        content: The carrier of a tensor; the carriers of a sharded tensor's parts that this rank
            holds; the bytes of any other entry.
    """

    path: str
    entry: KnownEntry
    content: torch.Tensor | bytes | Shards


_CARRIERS = {"quint8": torch.uint8, "qint8": torch.int8, "qint32": torch.int32}

TENSOR_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*TORCH_DTYPES, *_CARRIERS) if hasattr(torch, name)
}
"""Name → dtype, of all dtypes that can be stored."""

_NAMES = {dtype: name for name, dtype in TENSOR_DTYPES.items() if name not in _CARRIERS}
_QUANTIZED = {TENSOR_DTYPES[name]: name for name in _CARRIERS if name in TENSOR_DTYPES}

_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
_MADE_AS = {torch.complex32: torch.int32, _FLOAT4: torch.uint8}

_KINDS: dict[type, str] = {torch.Tensor: "tensor", torch.nn.Parameter: "parameter"}
_STRIDED = torch.strided

_MAX_BYTES = 1 << 62


# --- to an entry ------------------------------------------------------------------------------


def describe(path: str, value: Any) -> Leaf:
    """Return the leaf of a tensor, numpy array or numpy scalar: its entry and its bytes.

    The bytes come as a carrier: a plain tensor (see the docstring of this module).

    Args:
        path: Its logical path.
        value: Anything but a sparse tensor, which is a container (see ``flatten.py``).

    Raises:
        UnsupportedTypeError: The value cannot be stored, or it holds no values.
    """
    kind = _KINDS.get(type(value))
    if kind is None:
        return _describe_other(path, value)
    name = _NAMES.get(value.dtype)
    if name is None or value.layout is not _STRIDED or value.is_nested:
        return _describe_odd(path, value)
    nbytes, requires_grad = value.nbytes, value.requires_grad
    if value.is_meta or (nbytes and not _storage_bytes(value)):
        raise _no_values(path, value)
    if not nbytes and not _is_shape(tuple(value.shape)):
        raise UnsupportedTypeError(
            f"{path}: a contiguous tensor cannot have the shape {tuple(value.shape)}"
        )
    content = value.detach() if requires_grad or kind == "parameter" else value
    if content.is_conj() or content.is_neg():
        content = content.resolve_conj().resolve_neg()
    elif nbytes and not value.data_ptr():
        content = content.clone()  # autograd's zeros, which have no memory
        if not content.data_ptr():
            raise _no_values(path, value)
    if getattr(value, "_is_buffer", False):
        kind = "buffer"
    entry = TensorEntry(Payload(nbytes), name, tuple(value.shape), kind, requires_grad)
    return Leaf(path, entry, content)


def as_copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor that torch can copy: pairs of 4-bit numbers are seen as bytes."""
    return tensor.view(torch.uint8) if is_float4(tensor) else tensor


def is_fillable(value: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary, strided one that can be written in place."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_nested
        and value.dtype in _NAMES
        and not value.is_meta
        and not value.is_conj()
        and not value.is_neg()
        and (value.numel() == 0 or _has_writable_memory(value))
        and (value.is_contiguous() or not _is_expanded(value))
    )


def _is_expanded(value: torch.Tensor) -> bool:
    return any(n > 1 and s == 0 for n, s in zip(value.shape, value.stride(), strict=True))


def is_wrapper(value: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass that computes its elements, perhaps from other tensors."""
    return type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def is_its_storage(value: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in its storage as they are, placed by its strides."""
    return (
        value.layout is _STRIDED
        and not (value.is_nested or value.is_quantized or value.is_meta)
        and not (value.is_conj() or value.is_neg())
        and (not value.nbytes or value.data_ptr() != 0)
    )


def is_its_memory(value: torch.Tensor) -> bool:
    """Whether a CPU tensor's elements are the bytes from its address on, one after the other."""
    return (
        value.device.type == "cpu"
        and value.is_contiguous()
        and not value.is_conj()
        and not value.is_neg()
        and not is_wrapper(value)
    )


def why_not_writable(value: torch.Tensor) -> str:
    """Return why the memory of a tensor cannot be written; empty if it can, or if that is unknown.

    Torch does not check this, and a write to such memory ends the process.
    """
    if is_wrapper(value) or value.layout is not _STRIDED or value.is_nested or value.is_meta:
        return ""
    if not value.numel() or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return ""
    if not _storage_bytes(value):
        return "cannot be written: its storage has been freed (resized to 0, as FSDP does)"
    if not _is_writable(value):
        return (
            "cannot be written: it lies in a file that is mapped to be read only, or that was cut "
            "off since; clone it first"
        )
    return ""


def _has_writable_memory(value: torch.Tensor) -> bool:
    return _storage_bytes(value) > 0 and value.data_ptr() != 0 and _is_writable(value)


def _is_writable(value: torch.Tensor) -> bool:
    # Torch can write to memory that it has allocated, and can resize that. Other memory, such as
    # numpy's, cannot be resized.
    is_own = value.device.type != "cpu" or value.untyped_storage().resizable()
    return is_own or can_write(value.data_ptr())


def _storage_bytes(value: torch.Tensor) -> int:
    try:
        return value.untyped_storage().nbytes()
    except NotImplementedError:  # torch.func wraps tensors while it transforms a function
        return 0


def holds_no_values(value: torch.Tensor) -> bool:
    """Whether a tensor has a shape and a dtype, but no values: a meta tensor or a FakeTensor."""
    return value.is_meta or type(value).__name__ == "FakeTensor"


def is_freed(value: torch.Tensor) -> bool:
    """Whether the storage of an ordinary tensor has been freed (resized to 0, as FSDP does)."""
    return value.layout is _STRIDED and value.nbytes > 0 and not _storage_bytes(value)


class NoValuesError(UnsupportedTypeError):
    """A tensor has no values, so it cannot be stored, not even by pickle."""


class TensorSubclassError(UnsupportedTypeError):
    """A tensor is of a class that has no safe encoding."""


def _no_values(path: str, value: torch.Tensor) -> NoValuesError:
    if value.is_meta:
        return NoValuesError(
            f"{path}: a tensor on the meta device holds no values; give it memory and values "
            "first, as with module.to_empty(device=...)"
        )
    return NoValuesError(
        f"{path}: the storage of this tensor has been freed (resized to 0, as FSDP does), or it "
        "has none, as within a function that torch.func transforms; gather its values first"
    )


def _describe_odd(path: str, value: torch.Tensor) -> Leaf:
    if value.is_nested:
        raise UnsupportedTypeError(
            f"{path}: nested tensors cannot be stored; store the list of value.unbind()"
        )
    if value.layout is not torch.strided:
        raise UnsupportedTypeError(
            f"{path}: a tensor of layout {value.layout} cannot be stored; "
            "convert it first, as with value.to_dense()"
        )
    name = _QUANTIZED.get(value.dtype)
    if name is None:
        raise UnsupportedTypeError(
            f"{path}: tensors of {value.dtype} cannot be stored, since its elements are no whole "
            "bytes; store them unpacked, or view them as torch.uint8 first"
        )
    if value.is_meta:
        raise _no_values(path, value)
    kind, content = _KINDS[type(value)], value.detach().int_repr()
    payload = Payload(content.numel() * content.element_size())
    quantization = quantization_of(path, value)
    entry = TensorEntry(payload, name, tuple(value.shape), kind, False, quantization)
    return Leaf(path, entry, content)


def _describe_other(path: str, value: object) -> Leaf:
    np: Any = sys.modules.get("numpy")
    if np is not None and isinstance(value, (np.ndarray, np.generic)):
        return Leaf(path, *describe_numpy(path, value))
    shards = shards_of(path, value)
    if shards is not None:
        with without_torch_function():
            return describe_shards(path, shards)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor) and torch.nn.parameter.is_lazy(value):
        raise NoValuesError(f"{path}: {name} holds no values yet; run the module once first")
    if type(value).__name__ == "FakeTensor":
        raise NoValuesError(
            f"{path}: {name} holds no values; take the state outside of FakeTensorMode"
        )
    if isinstance(value, torch.Tensor) and value.is_nested:
        reason = "cannot be stored; store the list of value.unbind()"
    elif isinstance(value, torch.Tensor):
        reason = "is a tensor subclass and cannot be stored; store the plain tensors that it wraps"
        raise TensorSubclassError(f"{path}: {name} {reason}")
    else:
        reason = "is neither a tensor nor of numpy"
    raise UnsupportedTypeError(f"{path}: {name} {reason}")


def describe_shards(path: str, shards: Shards) -> Leaf:
    """Return the leaf of a sharded tensor.

    Args:
        path: Its logical path.
        shards: The shards that this rank holds.

    Raises:
        UnsupportedTypeError: The tensor cannot be stored.
    """
    value = shards.value
    name = _NAMES.get(value.dtype)
    if name is None or any(tensor.dtype != value.dtype for tensor in shards.tensors):
        dtypes = ", ".join({str(tensor.dtype) for tensor in shards.tensors}) or "nothing here"
        raise UnsupportedTypeError(
            f"{path}: a sharded tensor of {value.dtype} that holds {dtypes} cannot be stored; "
            "store it in an ordinary dtype"
        )
    contents = [describe(path, tensor).content for tensor in shards.tensors]
    carriers = tuple(content for content in contents if isinstance(content, torch.Tensor))
    kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
    if getattr(value, "_is_buffer", False):
        kind = "buffer"
    payload = Payload(prod(shards.shape) * value.dtype.itemsize)
    entry = TensorEntry(payload, name, shards.shape, kind, value.requires_grad)
    return Leaf(path, entry, replace(shards, tensors=carriers))


# --- and back ---------------------------------------------------------------------------------


def itemsize_of(entry: TensorEntry) -> int:
    """Return the bytes of one element.

    Raises:
        DamagedError: The entry's dtype does not exist.
        UnsupportedTypeError: This torch does not know the dtype.
    """
    return numpy_itemsize(entry) if is_numpy(entry) else torch_dtype(entry).itemsize


def allocate(entry: TensorEntry, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a new carrier for an entry: a plain tensor whose elements are not set yet.

    Args:
        entry: The entry. It comes from a store, so it is checked before memory is taken.
        device: The device; carriers of numpy arrays are always on the CPU.

    Raises:
        DamagedError: Shape, dtype and length contradict each other.
        UnsupportedTypeError: This torch does not know the dtype.
        StateError: There is not enough memory.
    """
    check_tensor(entry)
    try:
        if is_numpy(entry):
            return torch.empty(entry.payload.nbytes, dtype=torch.uint8)
        dtype = _CARRIERS.get(entry.dtype) or TENSOR_DTYPES[entry.dtype]
        # torch warns that complex32 is experimental, and cannot create float4 at all if algorithms
        # must be deterministic.
        if dtype in _MADE_AS:
            return torch.empty(entry.shape, dtype=_MADE_AS[dtype], device=device).view(dtype)
        return torch.empty(entry.shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as e:
        raise StateError(
            f"there is no memory for {entry.payload.nbytes} bytes of {entry.dtype} on {device}: {e}"
        ) from e


def check_tensor(entry: TensorEntry) -> None:
    """Check that the dtype, shape, length, kind and quantization of an entry agree.

    Raises:
        DamagedError: They contradict each other.
        UnsupportedTypeError: This torch does not know the dtype.
    """
    itemsize, shape = itemsize_of(entry), entry.shape
    nbytes = itemsize * prod(shape)
    # Unless the shape has a 0, the length bounds each of its numbers.
    if min(shape, default=0) < 0 or nbytes >= _MAX_BYTES or (not nbytes and not _is_shape(shape)):
        raise DamagedError(f"an entry has the impossible shape {shape[:64]}")
    if nbytes != entry.payload.nbytes:
        raise DamagedError(
            f"an entry says {entry.payload.nbytes} bytes for {entry.dtype} of shape {shape[:64]}"
        )
    if entry.kind == "numpy_scalar" and len(shape) != (entry.dtype in NUMPY_TEXTS):
        raise DamagedError(f"a numpy scalar of {entry.dtype} has the shape {shape[:64]}")
    if (entry.dtype in _CARRIERS) != (entry.quantization is not None):
        raise DamagedError(
            f"an entry of {entry.dtype} has {'a' if entry.quantization else 'no'} quantization"
        )
    if entry.quantization is not None:
        check_quantization(entry.quantization, shape)


def _is_shape(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can exist: sizes and strides must fit into 64 bits."""
    return all(0 <= n < 1 << 63 for n in shape) and prod(n or 1 for n in shape[1:]) < 1 << 63


def assemble(leaf: Leaf) -> object:
    """Return the tensor, array or scalar of a leaf: the inverse of :func:`describe`.

    Args:
        leaf: A tensor entry with its filled carrier, or with the live tensor that was filled in
            place. An ordinary or a sharded tensor is returned as the same object.

    Raises:
        DamagedError: The entry contradicts itself.
        UnsupportedTypeError: numpy is needed and not installed.
        UnsupportedFormatError: The entry is of a kind that a newer version wrote.
    """
    entry, content = leaf.entry, leaf.content
    assert isinstance(entry, TensorEntry)
    assert isinstance(content, torch.Tensor)
    kind = entry.kind
    if type(content) not in _KINDS:
        return content  # a sharded tensor
    if kind == "tensor" and entry.quantization is None and not entry.requires_grad:
        return content
    check_known("the state", [(leaf.path, entry)])
    try:
        if is_numpy(entry):
            return assemble_numpy(leaf.path, entry, content)
        if entry.quantization is not None and not content.is_quantized:
            content = quantized(entry.quantization, content)
        return _wrap(entry, content)
    except (RuntimeError, ValueError, TypeError, IndexError, OverflowError, struct.error) as e:
        if isinstance(e, UnsupportedTypeError):
            raise
        raise DamagedError(f"{leaf.path} cannot be put together: {e}", (leaf.path,)) from e


def torch_dtype(entry: TensorEntry) -> torch.dtype:
    """Return the dtype of the entry of a torch tensor, not of a numpy array.

    Raises:
        UnsupportedFormatError: A newer version wrote the entry.
        UnsupportedTypeError: This torch does not know the dtype.
    """
    dtype = TENSOR_DTYPES.get(entry.dtype)
    if dtype is not None:
        return dtype
    check_known("the state", [("an entry", entry)])
    raise UnsupportedTypeError(
        f"torch {torch.__version__} has no dtype {entry.dtype}; use a newer torch"
    )


def _wrap(entry: TensorEntry, content: torch.Tensor) -> torch.Tensor:
    if entry.kind == "parameter":
        if isinstance(content, torch.nn.Parameter):
            return content
        return torch.nn.Parameter(content, entry.requires_grad)
    if entry.requires_grad and not content.is_inference():
        differentiable = content.is_floating_point() or content.is_complex()
        content = content.requires_grad_() if differentiable else content
    if entry.kind == "buffer" and not getattr(content, "_is_buffer", False):
        # Older versions of torch have no Buffer; they use plain tensors.
        return getattr(torch.nn, "Buffer", lambda tensor: tensor)(content)  # type: ignore[no-any-return]
    return content


def carrier_dtype(entry: TensorEntry) -> torch.dtype:
    """Return the dtype of the plain tensor (the *carrier*) that holds an entry's bytes.

    It differs from the entry's own dtype for quantized tensors, numpy arrays and 4-bit floats.
    """
    if is_numpy(entry):
        return torch.uint8
    dtype = _CARRIERS.get(entry.dtype) or torch_dtype(entry)
    return torch.uint8 if dtype is _FLOAT4 else dtype


def is_float4(tensor: TensorEntry | torch.Tensor) -> bool:
    """Whether the elements are pairs of 4-bit numbers, which torch cannot cast."""
    dtype = tensor.dtype if isinstance(tensor, torch.Tensor) else TENSOR_DTYPES.get(tensor.dtype)
    return dtype is not None and dtype is _FLOAT4
