"""Rows of keys and values in 4 bits, in groups with one step and one base each.

Dimensions: D numbers per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_SIZE = 32
"""Adjacent numbers of a row that share one step and one base."""
_MAX_CODE = 15
_BASE_AND_STEP_BYTES = 4
_LOWER_HALF = 0xFFFF


def grouped_bytes(head_size: int) -> int:
    """Return the bytes of a row of ``head_size`` numbers, 5 bits per number."""
    return head_size // 2 + head_size // GROUP_SIZE * _BASE_AND_STEP_BYTES


def round_groups(x: Tensor) -> Tensor:
    """Quantize rows to 4 bits in groups: base + step * q, with q from 0 to 15.

    The base is the smallest number, rounded down to bfloat16; the step is a fifteenth of the
    distance from the base to the largest number, rounded up. So no q is clamped, and the error is
    at most half a step, |x - base - step * q| <= step / 2, with step <= (1 + 2^-7) (largest -
    smallest + 2^-7 |smallest|) / 15.

    Args:
        x: ``[..., D]``, any float dtype of up to 32 bits; D is a multiple of 32.
    Returns: ``[..., 5 D / 8]`` uint8: two values q per byte, the first in the low half, then base
        and step of each group as bfloat16. A group that contains NaN or infinity reads as NaN.
    """
    # NaN and infinity reach base or step through amin and amax, which marks the whole group.
    groups = x.float().unflatten(-1, (-1, GROUP_SIZE))
    bits = groups.amin(-1).view(torch.int32)
    # Round down: away from zero for negative numbers, towards zero otherwise.
    base = _upper_half(torch.where(bits < 0, bits + _LOWER_HALF, bits))
    exact = (groups.amax(-1) - base) / _MAX_CODE
    step = _upper_half(exact.view(torch.int32) + _LOWER_HALF)
    quotients = (groups - base[..., None]) / step[..., None]
    quantized = torch.where(step[..., None] > 0, quotients, 0).round().clamp(0, _MAX_CODE)
    first, second = quantized.to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
    both = torch.stack((base, step), -1).bfloat16().view(torch.uint8).flatten(-2)
    return torch.cat((first | second << 4, both), -1)


def read_groups(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize rows that ``round_groups`` returned.

    Args:
        rows: ``[..., 5 D / 8]`` uint8.
    Returns: ``[..., D]`` of ``dtype``, computed in float32.
    """
    num_groups = rows.shape[-1] // grouped_bytes(GROUP_SIZE)
    packed, both = rows.split((num_groups * GROUP_SIZE // 2, num_groups * 4), -1)
    quantized = (
        torch.stack((packed & 15, packed >> 4), -1).flatten(-2).unflatten(-1, (num_groups, -1))
    )
    scales = both.contiguous().view(torch.bfloat16).float().unflatten(-1, (num_groups, 2))
    base, step = scales[..., None].unbind(-2)
    numbers: Tensor = base + step * quantized
    return numbers.flatten(-2).to(dtype)


def _upper_half(bits: Tensor) -> Tensor:
    """Clear the low half of float32 bits; bfloat16 represents the rounded numbers exactly."""
    return (bits & ~_LOWER_HALF).view(torch.float32)
