"""Random numbers in any amount."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_PERIOD = 1_048_583  # a prime, so that equal rows come as late as they can


def normal_numbers(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, deviation: float = 1.0
) -> Tensor:
    """Return normally distributed numbers; after the first million they repeat.

    Drawing the weights of a large layer one by one would take longer than timing its kernels.
    """
    count = math.prod(shape)
    drawn = torch.randn(min(count, _PERIOD), generator=generator).mul_(deviation).to(dtype)
    if count > _PERIOD:
        drawn = drawn.repeat(-(-count // _PERIOD))[:count]
    return drawn.view(shape)


def dtype_name(dtype: torch.dtype) -> str:
    """Return how dims name ``dtype``."""
    return str(dtype).removeprefix("torch.")


def codes_of(
    bits: int, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype | None = None
) -> Tensor:
    """Return integers that are all equally likely: uint8 of 4 bits, or int8, unless said."""
    low, high, own = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    return torch.randint(low, high, shape, dtype=dtype or own, generator=generator)
