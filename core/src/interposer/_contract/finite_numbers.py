"""Search for NaN and infinity in tensors of any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

# For 8-bit dtypes, which few torch functions accept: the mask of the compared bits, and their value
# in NaN and infinity. Keys are names because not every torch version has all of these dtypes.
_EIGHT_BITS = {
    "float8_e4m3fn": (0x7F, 0x7F),
    "float8_e5m2": (0x7C, 0x7C),
    "float8_e4m3fnuz": (0xFF, 0x80),
    "float8_e5m2fnuz": (0xFF, 0x80),
    "float8_e8m0fnu": (0xFF, 0xFF),
}


def are_finite(tensor: Tensor) -> bool:
    """Tell whether a tensor has neither NaN nor infinity; integer tensors always qualify."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    if tensor.itemsize > 1:
        # aminmax returns NaN if any element is NaN, and allocates no tensor of the input's size.
        smallest, largest = tensor.aminmax()
        return bool(smallest.isfinite() & largest.isfinite())
    bits = _EIGHT_BITS.get(str(tensor.dtype).removeprefix("torch."))
    if bits is None:  # 4-bit floats have neither NaN nor infinity
        return True
    mask, non_finite = bits
    return not ((tensor.view(torch.uint8) & mask) == non_finite).any()
