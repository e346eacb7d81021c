"""The parameters of quantized tensors, whose carriers (``tensors.py``) are plain integers."""

from __future__ import annotations

import struct

import torch

from casnap.errors import DamagedError, UnsupportedTypeError
from casnap.format.entries import Quantization

_PER_TENSOR = (("d", torch.float64), ("q", torch.int64))
_PER_CHANNEL = {
    "per_channel_affine": _PER_TENSOR,
    "per_channel_affine_float_qparams": (("f", torch.float32), ("f", torch.float32)),
}


def quantization_of(path: str, value: torch.Tensor) -> Quantization:
    """Return the parameters of a quantized tensor.

    Raises:
        UnsupportedTypeError: casnap cannot store its scheme.
    """
    scheme = str(value.qscheme()).removeprefix("torch.")
    if scheme == "per_tensor_affine":
        scale, zero_point = value.q_scale(), value.q_zero_point()
        return Quantization(scheme, struct.pack("<d", scale), struct.pack("<q", zero_point))
    if scheme not in _PER_CHANNEL:
        raise UnsupportedTypeError(
            f"{path}: a quantized tensor of scheme {scheme} cannot be stored; "
            "store value.int_repr() and its parameters"
        )
    scales = value.q_per_channel_scales().tolist()
    zero_points = value.q_per_channel_zero_points().tolist()
    (scale_code, _), (zero_code, _) = _PER_CHANNEL[scheme]
    return Quantization(
        scheme,
        struct.pack(f"<{len(scales)}{scale_code}", *scales),
        struct.pack(f"<{len(zero_points)}{zero_code}", *zero_points),
        value.q_per_channel_axis(),
    )


def check_quantization(q: Quantization, shape: tuple[int, ...]) -> None:
    """Check that a tensor of a shape can have these parameters.

    Args:
        q: The parameters. If this version does not know their scheme, they pass.
        shape: The shape of the tensor.

    Raises:
        DamagedError: A tensor of that shape cannot have them.
    """
    is_per_channel = q.scheme in _PER_CHANNEL
    if not is_per_channel and q.scheme != "per_tensor_affine":
        return
    if not (0 <= q.axis < len(shape) if is_per_channel else q.axis == 0):
        raise DamagedError(f"an entry has the impossible axis {q.axis} of {q.scheme[:40]}")
    channels = shape[q.axis] if is_per_channel else 1
    codes = _PER_CHANNEL.get(q.scheme, _PER_TENSOR)
    for (code, _), numbers in zip(codes, (q.scales, q.zero_points), strict=True):
        if len(numbers) != channels * struct.calcsize(code):
            raise DamagedError(
                f"an entry has {len(numbers)} bytes of scales or zero points for {channels:,} "
                f"channels of {q.scheme[:40]}"
            )


def quantized(q: Quantization, content: torch.Tensor) -> torch.Tensor:
    """Make a quantized tensor from its integers and parameters.

    Args:
        q: The parameters.
        content: The integers: the carrier of the tensor.

    Raises:
        ValueError: The parameters contradict each other.
        struct.error: There is not one scale and one zero point for each channel.
    """
    if q.scheme == "per_tensor_affine":
        (scale,), (zero_point,) = struct.unpack("<d", q.scales), struct.unpack("<q", q.zero_points)
        return torch._make_per_tensor_quantized_tensor(content, scale, zero_point)
    if q.scheme not in _PER_CHANNEL:
        raise ValueError(f"the quantization scheme {q.scheme[:40]!r} is unknown")
    channels = content.shape[q.axis]
    (scale_code, scale_dtype), (zero_code, zero_dtype) = _PER_CHANNEL[q.scheme]
    scales = struct.unpack(f"<{channels}{scale_code}", q.scales)
    zero_points = struct.unpack(f"<{channels}{zero_code}", q.zero_points)
    return torch._make_per_channel_quantized_tensor(
        content,
        torch.tensor(scales, dtype=scale_dtype, device=content.device),
        torch.tensor(zero_points, dtype=zero_dtype, device=content.device),
        q.axis,
    )
