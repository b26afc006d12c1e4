"""Search for NaN and infinity in weights with the compiled library."""

from __future__ import annotations

import torch

from interposer_cpu import native

# A number is NaN or infinite if all of these bits are set: the exponent; in float8_e4m3fn, which
# has no infinity, all bits but the sign.
_NONFINITE_BITS = {
    torch.float64: 0x7FF0 << 48,
    torch.float32: 0x7F80 << 16,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,
}


def _repeat_in_int64(bits: int, itemsize: int) -> int:
    """Repeat the bit pattern of one number to fill 64 bits, as a signed integer."""
    word = sum(bits << 8 * byte for byte in range(0, 8, itemsize))
    return word - (1 << 64 if word >> 63 else 0)


# Masks of the library's test: all bits, the lowest bit, and the sign bit. Adding the lowest bit to
# the masked bits carries into the sign exactly if all of the bits are set.
_MASKS = {
    dtype: tuple(
        _repeat_in_int64(mask, dtype.itemsize)
        for mask in (bits, bits & -bits, 1 << 8 * dtype.itemsize - 1)
    )
    for dtype, bits in _NONFINITE_BITS.items()
}


def are_finite(tensor: torch.Tensor) -> bool | None:
    """Return whether all elements are finite; None if the library cannot check the tensor."""
    masks = _MASKS.get(tensor.dtype)
    if masks is None or not tensor.is_contiguous() or native.why_absent():
        return None
    is_finite: bool = native.library().are_finite(tensor.data_ptr(), 0, tensor.nbytes, *masks)
    return is_finite


def copy_finite(target: torch.Tensor, source: torch.Tensor) -> bool | None:
    """Copy ``source`` to ``target``, and check that no element is NaN or infinite.

    Returns: None if the library cannot do it; then nothing was copied.
    """
    masks = _MASKS.get(source.dtype)
    is_same_form = (target.dtype, target.shape) == (source.dtype, source.shape)
    is_plain = is_same_form and target.is_contiguous() and source.is_contiguous()
    if masks is None or not is_plain or source.device.type != "cpu" or native.why_absent():
        return None
    addresses = source.data_ptr(), target.data_ptr()
    is_finite: bool = native.library().are_finite(*addresses, source.nbytes, *masks)
    return is_finite
