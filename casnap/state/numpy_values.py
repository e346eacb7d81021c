"""Turn numpy arrays and scalars into an entry and a carrier of flat bytes, and back."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from casnap.errors import DamagedError, UnsupportedTypeError
from casnap.format.entries import NUMPY_DTYPE, NUMPY_KINDS, Payload, TensorEntry, check_known

if TYPE_CHECKING:
    import numpy as np

    NumpyDtype = np.dtype[Any]

NUMPY_TEXTS = ("<U1", "|S1")
"""The typestrs of ``numpy.str_`` and ``numpy.bytes_``, which are stored character by character."""
_MAX_ITEMSIZE = 64 << 10  # the smallest chunk size, so that no chunk cuts an element


def is_numpy(entry: TensorEntry) -> bool:
    """Whether an entry is a numpy array or scalar, whose carrier (``tensors.py``) is flat bytes."""
    return entry.kind in NUMPY_KINDS


def numpy_itemsize(entry: TensorEntry) -> int:
    """Return the bytes of one element of a numpy entry.

    Raises:
        UnsupportedFormatError: The entry's dtype is unknown.
        DamagedError: Its elements are too long.
    """
    check_known("the state", [("an entry", entry)])
    digits = entry.dtype[2:].partition("[")[0]
    size = int(digits) * (4 if entry.dtype[1] == "U" else 1)
    if size > _MAX_ITEMSIZE:
        raise DamagedError(f"an entry has the dtype {entry.dtype!r}, whose items are too long")
    return size


def describe_numpy(path: str, value: Any) -> tuple[TensorEntry, torch.Tensor]:
    """Return the entry of an array or scalar, and its carrier: its flat bytes.

    Raises:
        UnsupportedTypeError: The value cannot be stored.
    """
    np = sys.modules["numpy"]
    if type(value) in (np.str_, np.bytes_):
        # Each character is an element: numpy drops the NULs at the end of one long element.
        text = value.encode("utf-32-le", "surrogatepass") if type(value) is np.str_ else value
        dtype = "<U1" if type(value) is np.str_ else "|S1"
        entry = TensorEntry(Payload(len(text)), dtype, (len(value),), "numpy_scalar")
        return entry, _carrier_of(bytes(text))
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
        raise UnsupportedTypeError(
            f"{path}: {type(value).__qualname__} is a subclass of numpy.ndarray; "
            "store numpy.array(value)"
        )
    dtype = _checked_typestr(path, value.dtype)
    if isinstance(value, np.ndarray):
        content, kind = _carrier_of(value), "ndarray"
    else:
        content, kind = _carrier_of(value.tobytes()), "numpy_scalar"
    return TensorEntry(Payload(value.nbytes), dtype, tuple(value.shape), kind), content


def _checked_typestr(path: str, dtype: NumpyDtype) -> str:
    np = sys.modules["numpy"]
    if dtype.hasobject or dtype.fields is not None:
        contents = "objects" if dtype.hasobject else "structures"
        raise UnsupportedTypeError(
            f"{path}: numpy arrays of {contents} cannot be stored; store plain arrays or lists"
        )
    double = {"f": "float64", "c": "complex128"}.get(dtype.kind)
    if double is not None and dtype.itemsize > np.dtype(double).itemsize:
        raise UnsupportedTypeError(
            f"{path}: numpy's {dtype} cannot be stored: its bytes are another number on other "
            f"machines; convert it to {double}"
        )
    match = NUMPY_DTYPE.fullmatch(dtype.str)
    # Types that other packages add to numpy have a typestr that means something else.
    if match is None or np.dtype(dtype.str) != dtype or dtype.itemsize > _MAX_ITEMSIZE:
        raise UnsupportedTypeError(
            f"{path}: numpy's {dtype!r} ({dtype.itemsize} bytes an item) cannot be stored; "
            "view or convert it to a built-in type of 1 to 65,536 bytes"
        )
    return str(dtype.str)


def _carrier_of(value: Any) -> torch.Tensor:
    """Return the bytes of an array or bytes object as a uint8 tensor, if possible not a copy."""
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else _no_bytes()
    np = sys.modules["numpy"]
    if not value.nbytes:
        return _no_bytes()
    if not value.flags.writeable:
        value = value.copy()  # torch knows no read-only tensors
    return torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def _no_bytes() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def assemble_numpy(path: str, entry: TensorEntry, content: torch.Tensor) -> object:
    """Return the array or scalar whose flat bytes are ``content``.

    Raises:
        UnsupportedTypeError: numpy is not installed.
        DamagedError: The entry's dtype does not exist.
    """
    dtype = numpy_dtype(path, entry)
    np = sys.modules["numpy"]
    array = content.cpu().numpy().view(dtype).reshape(entry.shape)
    if entry.kind == "ndarray":
        return array
    if entry.dtype == "<U1":
        return np.str_(array.tobytes().decode("utf-32-le", "surrogatepass"))
    if entry.dtype == "|S1":
        return np.bytes_(array.tobytes())
    return array.reshape(())[()]


def numpy_dtype(path: str, entry: TensorEntry) -> NumpyDtype:
    """Return the dtype of an array's or scalar's entry.

    Raises:
        UnsupportedTypeError: numpy is not installed.
        DamagedError: The entry's dtype does not exist.
    """
    try:
        import numpy as np
    except ImportError:
        raise UnsupportedTypeError(f"{path} is of numpy; install numpy to read it") from None
    numpy_itemsize(entry)  # refuses a dtype whose elements are pointers
    return np.dtype(entry.dtype)
