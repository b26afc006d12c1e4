"""Inputs of quantizers whose results do not hang on the last bit of a scale.

A quantizer rounds x / scale, where scale was itself rounded to float32 and may have been used as a
reciprocal. What is drawn here stays clear of every boundary between two results, so that each
sensible kernel gives the same ones. Ties are another matter: they are built around scales that are
powers of two, which all kernels compute exactly, and are decided by the definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.quantizers._small_floats import E2M1_MAX, decode_e2m1, encode_e2m1

# More than a scale of float32 and a quotient can be wrong by, even with an approximate reciprocal.
_MARGIN = 2.0**-16

FP8_FORMATS = {
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
SHAPES = {
    "many rows": (33, 256),
    "one row": (1, 64),
    "odd width": (5, 127),
    "one element": (1, 1),
    "no rows": (0, 64),
    "three dimensions": (2, 3, 96),
    "wide": (2, 4096),
    "width after a power of two": (3, 1025),
}
"""Shapes of activations that no block constrains."""

Nearest = Callable[[Tensor], Tensor]


def peaked(shape: tuple[int, ...], peaks: Tensor, generator: torch.Generator) -> Tensor:
    """Return float64 numbers of many magnitudes, in each row one of its peak and none larger.

    Some are zeros of either sign.

    Args:
        peaks: shape without the last dimension.
    """
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * 1.9 - 0.95
    exponents = torch.randint(0, 8, shape, generator=generator)
    drawn = torch.ldexp(drawn, -exponents)
    kind = torch.randint(0, 24, shape, generator=generator)
    drawn = drawn.masked_fill(kind == 0, 0.0).masked_fill(kind == 1, -0.0)
    return with_peaks(drawn * peaks.unsqueeze(-1), peaks, generator)


def with_peaks(rows: Tensor, peaks: Tensor, generator: torch.Generator) -> Tensor:
    """Return ``rows`` with the peak of each, of either sign, put anywhere in it."""
    place = torch.randint(0, rows.shape[-1], peaks.shape, generator=generator).unsqueeze(-1)
    signs = torch.randint(0, 2, peaks.shape, generator=generator) * 2.0 - 1
    return rows.scatter(-1, place, (peaks * signs).unsqueeze(-1))


def clear_of_boundaries(x: Tensor, quotients: Tensor, nearest: Nearest) -> Tensor:
    """Return ``x`` with zeros where a small relative error of the quotient changes its result."""
    changed = nearest(quotients * (1 - _MARGIN)) != nearest(quotients * (1 + _MARGIN))
    return x.masked_fill(changed, 0.0)


def nearest_fp8(dtype: torch.dtype) -> Nearest:
    """Return the function that rounds float64 numbers to an 8-bit float, saturating."""
    limit = torch.finfo(dtype).max
    return lambda quotients: quotients.clamp(-limit, limit).to(dtype).double()


def nearest_e2m1(quotients: Tensor) -> Tensor:
    """Return float64 numbers rounded to e2m1, saturating at 6."""
    return decode_e2m1(encode_e2m1(quotients.clamp(-E2M1_MAX, E2M1_MAX)), torch.float64)


def fp8_numbers(dtype: torch.dtype) -> Tensor:
    """Return all numbers of an 8-bit float that are finite and not negative, in float64."""
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    return numbers[numbers.isfinite()]


def midpoints(numbers: Tensor) -> Tensor:
    """Return what lies halfway between neighbours of ``numbers``, which ascend."""
    return (numbers[1:] + numbers[:-1]) / 2


def signed_choice(values: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return ``values`` in any order and of either sign, all of them if there is room."""
    count = math.prod(shape)
    order = torch.randperm(len(values), generator=generator)
    chosen = values[order.repeat(-(-count // len(values)))[:count]]
    signs = torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1
    return (chosen * signs).view(shape)


def sampled_rows(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Tensor:
    """Return T rows of hidden states."""
    generator = torch.Generator().manual_seed(seed)
    return normal_numbers((num_tokens, int(dims["hidden_size"])), dtype, generator)


def bounded(case: Case, largest_scale: float, roundings: int) -> Case:
    """Return the case with the bound of its scales, far below a step of the quantized numbers."""
    return replace(case, reduction=roundings, magnitude=largest_scale)
