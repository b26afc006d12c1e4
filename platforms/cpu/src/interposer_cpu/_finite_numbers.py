"""The search for NaN and infinity in weights, by the compiled library."""

from __future__ import annotations

import torch

from interposer_cpu import native

# The bits that are all set in NaN and infinity, by dtype: the exponent, and in float8_e4m3fn, which
# has no infinity, all bits but the sign.
_BITS = {
    torch.float64: 0x7FF0 << 48,
    torch.float32: 0x7F80 << 16,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,
}


def _in_words(bits: int, itemsize: int) -> int:
    """Return the bits of each number in a word of 64 bits, as a signed number."""
    word = sum(bits << 8 * at for at in range(0, 8, itemsize))
    return word - (1 << 64 if word >> 63 else 0)


_SEARCHES = {
    dtype: tuple(
        _in_words(part, dtype.itemsize)
        for part in (bits, bits & -bits, 1 << 8 * dtype.itemsize - 1)
    )
    for dtype, bits in _BITS.items()
}


def are_finite(tensor: torch.Tensor) -> bool | None:
    """Say whether a tensor holds neither NaN nor infinity; None where the library cannot."""
    search = _SEARCHES.get(tensor.dtype)
    if search is None or not tensor.is_contiguous() or native.why_absent():
        return None
    found: bool = native.library().are_finite(tensor.data_ptr(), 0, tensor.nbytes, *search)
    return found


def copy_finite(target: torch.Tensor, source: torch.Tensor) -> bool | None:
    """Copy a tensor and say whether it holds neither NaN nor infinity.

    Returns: None where the library cannot, and nothing was copied.
    """
    search = _SEARCHES.get(source.dtype)
    alike = (target.dtype, target.shape) == (source.dtype, source.shape)
    is_plain = alike and target.is_contiguous() and source.is_contiguous()
    if search is None or not is_plain or source.device.type != "cpu" or native.why_absent():
        return None
    addresses = source.data_ptr(), target.data_ptr()
    found: bool = native.library().are_finite(*addresses, source.nbytes, *search)
    return found
