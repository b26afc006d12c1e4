"""The search for NaN and infinity in tensors of any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

# Of dtypes of 8 bits, which few functions of torch take: the bits that are compared, and those of
# NaN and infinity. Names, as not every version of torch has all of them.
_EIGHT_BITS = {
    "float8_e4m3fn": (0x7F, 0x7F),
    "float8_e5m2": (0x7C, 0x7C),
    "float8_e4m3fnuz": (0xFF, 0x80),
    "float8_e5m2fnuz": (0xFF, 0x80),
    "float8_e8m0fnu": (0xFF, 0xFF),
}


def are_finite(tensor: Tensor) -> bool:
    """Say whether a tensor holds neither NaN nor infinity; whole numbers never do."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    if tensor.itemsize > 1:
        # NaN is the least and the largest of all numbers. No tensor is made in memory.
        least, largest = tensor.aminmax()
        return bool(least.isfinite() & largest.isfinite())
    bits = _EIGHT_BITS.get(str(tensor.dtype).removeprefix("torch."))
    if bits is None:  # numbers of 4 bits have none
        return True
    mask, other = bits
    return not ((tensor.view(torch.uint8) & mask) == other).any()
