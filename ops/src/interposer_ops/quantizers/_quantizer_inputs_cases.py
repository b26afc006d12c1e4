"""Inputs of quantizers for which a rounding error of the scale changes no result.

A quantizer rounds x / scale, where scale was itself rounded to float32 and may have been used as a
reciprocal. The inputs here are not near a boundary between two results, so that every sensible
kernel gives the same results. Ties are built around scales that are powers of two, which all
kernels compute exactly; the op's definition decides a tie.
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

# More than the relative error of a float32 scale and quotient, even by an approximate reciprocal.
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
"""Shapes of activations for quantizers without blocks."""

Nearest = Callable[[Tensor], Tensor]


def rows_with_peaks(shape: tuple[int, ...], peaks: Tensor, generator: torch.Generator) -> Tensor:
    """Draw float64 rows of many magnitudes and some signed zeros, with prescribed peaks.

    Args:
        peaks: the largest magnitude of each row; shape without the last dimension.
    """
    numbers = torch.rand(shape, generator=generator, dtype=torch.float64) * 1.9 - 0.95
    exponents = torch.randint(0, 8, shape, generator=generator)
    numbers = torch.ldexp(numbers, -exponents)
    kind = torch.randint(0, 24, shape, generator=generator)
    numbers = numbers.masked_fill(kind == 0, 0.0).masked_fill(kind == 1, -0.0)
    return insert_peaks(numbers * peaks.unsqueeze(-1), peaks, generator)


def insert_peaks(rows: Tensor, peaks: Tensor, generator: torch.Generator) -> Tensor:
    """Overwrite a random element of each row with the peak of the row, of random sign."""
    position = torch.randint(0, rows.shape[-1], peaks.shape, generator=generator).unsqueeze(-1)
    signs = torch.randint(0, 2, peaks.shape, generator=generator) * 2.0 - 1
    return rows.scatter(-1, position, (peaks * signs).unsqueeze(-1))


def clear_of_boundaries(x: Tensor, quotients: Tensor, nearest: Nearest) -> Tensor:
    """Zero the elements of ``x`` that a small error could round to a different quantized value."""
    changed = nearest(quotients * (1 - _MARGIN)) != nearest(quotients * (1 + _MARGIN))
    return x.masked_fill(changed, 0.0)


def nearest_fp8(dtype: torch.dtype) -> Nearest:
    """Return a function that rounds float64 numbers to an 8-bit float, saturating."""
    limit = torch.finfo(dtype).max
    return lambda quotients: quotients.clamp(-limit, limit).to(dtype).double()


def nearest_e2m1(quotients: Tensor) -> Tensor:
    """Round float64 numbers to e2m1, saturating at 6."""
    return decode_e2m1(encode_e2m1(quotients.clamp(-E2M1_MAX, E2M1_MAX)), torch.float64)


def fp8_numbers(dtype: torch.dtype) -> Tensor:
    """Return all finite numbers >= 0 of an 8-bit float, in float64."""
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    return numbers[numbers.isfinite()]


def midpoints(numbers: Tensor) -> Tensor:
    """Return the midpoints of adjacent ``numbers``, which must ascend."""
    return (numbers[1:] + numbers[:-1]) / 2


def signed_choice(values: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Fill a tensor with shuffled ``values`` of random sign, repeated or cut off to ``shape``."""
    count = math.prod(shape)
    order = torch.randperm(len(values), generator=generator)
    choice = values[order.repeat(-(-count // len(values)))[:count]]
    signs = torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1
    return (choice * signs).view(shape)


def sampled_rows(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Tensor:
    """Draw T rows of hidden states."""
    generator = torch.Generator().manual_seed(seed)
    return normal_numbers((num_tokens, int(dims["hidden_size"])), dtype, generator)


def with_scale_bound(case: Case, largest_scale: float, roundings: int) -> Case:
    """Add an error bound for the scales, far below a step of the quantized numbers."""
    return replace(case, reduction=roundings, magnitude=largest_scale)
