"""Random inputs for cases, fast enough for the weights of large layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# A prime, so that no row length shares a factor with it: rows repeat as late as possible.
_PERIOD = 1_048_583


def normal_numbers(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, deviation: float = 1.0
) -> Tensor:
    """Draw normally distributed numbers that repeat after the first million.

    To draw every weight of a large layer would take longer than to time its kernels.
    """
    count = math.prod(shape)
    numbers = torch.randn(min(count, _PERIOD), generator=generator).mul_(deviation).to(dtype)
    if count > _PERIOD:
        numbers = numbers.repeat(-(-count // _PERIOD))[:count]
    return numbers.view(shape)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` in dims, such as ``float8_e4m3fn``."""
    return str(dtype).removeprefix("torch.")


def random_integers(
    bits: int, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype | None = None
) -> Tensor:
    """Draw uniform quantized values: 0 to 15 as uint8 for 4 bits, else -128 to 127 as int8."""
    low, high, default = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    return torch.randint(low, high, shape, dtype=dtype or default, generator=generator)
