"""Test cases of the quantizers to int8.

H hidden size, T tokens.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops.quantizers._quantizer_inputs_cases import (
    SHAPES,
    clear_of_boundaries,
    insert_peaks,
    rows_with_peaks,
    sampled_rows,
    signed_choice,
    with_scale_bound,
)
from interposer_testing.cases import Axis, CaseSpace, Point, peak

_TIES = "ties"
# Approximate largest magnitudes of rows; float16 ends at 65504.
_NUMBERS = {"": 4.0, "small": 2.0**-10, "large": 6e3, _TIES: _TIES, "zeros": 0.0}
_SIGNS = {"": 0, "not negative": 1, "not positive": -1}
# A scale is a difference divided by a constant, or multiplied by the constant's rounded reciprocal:
# up to three roundings. The error bound of sums allows twice that.
_bounded = partial(with_scale_bound, roundings=3)
# All n + 0.5 that bfloat16 represents.
_HALVES = torch.arange(127, dtype=torch.float64) + 0.5


def _static(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape, zero_point = point["shape"], point["zero point"]
    if point["numbers"] == _TIES:
        scale = torch.tensor([0.125])
        x = (signed_choice(_HALVES, shape, generator) / 8).to(dtype)
    else:
        # Quotients reach 1.4 times the largest int8.
        scale = torch.tensor([max(point["numbers"], 1.0) / 90])
        peaks = torch.full(shape[:-1], point["numbers"], dtype=torch.float64)
        x = _cleared(rows_with_peaks(shape, peaks, generator).to(dtype), scale.double())
    arguments = {
        "x": x,
        "scale": scale,
        "zero_point": None if zero_point is None else torch.tensor([zero_point], dtype=torch.int32),
    }
    dims = {"hidden_size": shape[-1], "asymmetric": zero_point is not None}
    return Case("", arguments, dims, reduction=0)


def _per_token(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape, numbers = point["shape"], point["numbers"]
    if numbers == _TIES:
        peaks = torch.full(shape[:-1], 127.0, dtype=torch.float64)
        x = insert_peaks(signed_choice(_HALVES, shape, generator), peaks, generator)
        x = (x * _powers_of_two(shape, generator)).to(dtype)
    else:
        x = _rows(shape, numbers, dtype, generator)
        x = _cleared(x, _symmetric_scales(x))
    return _bounded(Case("", {"x": x}, {"hidden_size": shape[-1]}), peak(x) / 127)


def _per_token_asymmetric(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape, numbers, sign = point["shape"], point["numbers"], point["sign"]
    if numbers == _TIES:
        # The zero point is 0 or odd; a range of exactly 255 steps makes the scale a power of two.
        low = -128.0 + 27 * torch.randint(0, 2, shape[:-1], generator=generator)
        x = signed_choice(_HALVES[:100], shape, generator)
        x[..., 0], x[..., -1] = low, low + 255
        x = (x * _powers_of_two(shape, generator)).to(dtype)
    else:
        x = _rows(shape, numbers, dtype, generator)
        x = x.abs() * sign if sign else x
        x = _cleared_asymmetric(x)
    return _bounded(Case("", {"x": x}, {"hidden_size": shape[-1]}), peak(x) / 127)


_SHAPE = Axis("shape", SHAPES)
_CROSSED = {"numbers": ("",), "shape": ("many rows", "odd width", "three dimensions")}

quantize_int8_static_cases = CaseSpace(
    _static,
    _SHAPE,
    Axis("numbers", _NUMBERS),
    Axis("zero point", {"": None, "positive": 27, "negative": -101, "lowest": -128}),
    strided={"x": "leading", "scale": "offset", "zero_point": "offset"},
    special={"x": ("infinities", "negative zeros")},
    crossed={**_CROSSED, "zero point": ("", "negative")},
    alone={"shape": ("no rows",)},
)
"""Numbers within and beyond the range of int8 with and without a zero point, and ties."""

quantize_int8_per_token_cases = CaseSpace(
    _per_token,
    _SHAPE,
    Axis("numbers", _NUMBERS),
    strided={"x": "leading"},
    crossed={**_CROSSED, "shape": tuple(label for label in SHAPES if label != "no rows")},
    alone={"shape": ("no rows",)},
)
"""Rows of different magnitudes, the peak at any position; ties and zeros."""

quantize_int8_per_token_asymmetric_cases = CaseSpace(
    _per_token_asymmetric,
    _SHAPE,
    Axis("numbers", _NUMBERS),
    Axis("sign", _SIGNS),
    strided={"x": "leading"},
    crossed={**_CROSSED, "sign": ("", "not negative")},
    alone={"shape": ("no rows",)},
    # A row with ties has room for the ends of its range; zeros have no sign.
    valid=lambda point, _: (
        not (point["sign"] and point["numbers"] in (_TIES, 0.0))
        and not (point["numbers"] == _TIES and point["shape"] == (1, 1))
    ),
)
"""Rows around zero and on one side of zero; ties, also with odd zero points, and zeros."""


def quantize_int8_per_token_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Make T rows of hidden states."""
    x = sampled_rows(dtype, dims, num_tokens, seed)
    x = _cleared(x, _symmetric_scales(x))
    return _bounded(Case(f"{num_tokens} tokens", {"x": x}, dims), peak(x) / 127)


def quantize_int8_per_token_asymmetric_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Make T rows of hidden states."""
    x = _cleared_asymmetric(sampled_rows(dtype, dims, num_tokens, seed))
    return _bounded(Case(f"{num_tokens} tokens", {"x": x}, dims), peak(x) / 127)


def _rows(
    shape: tuple[int, ...], numbers: float, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    factors = 1 + 7 * torch.rand(shape[:-1], generator=generator, dtype=torch.float64)
    return rows_with_peaks(shape, numbers * factors, generator).to(dtype)


def _powers_of_two(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw one power of two per row."""
    exponents = torch.randint(-5, 1, (*shape[:-1], 1), generator=generator)
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float64), exponents)


def _symmetric_scales(x: Tensor) -> Tensor:
    peaks = x.double().abs().amax(-1, keepdim=True)
    return torch.where(peaks > 0, peaks / 127, 1.0)


def _cleared(x: Tensor, scales: Tensor) -> Tensor:
    return clear_of_boundaries(x, x.double() / scales, lambda q: q.round().clamp(-128, 127))


def _cleared_asymmetric(x: Tensor) -> Tensor:
    """Zero the elements where a quotient or a zero point is near a rounding boundary."""
    wide = x.double()
    low = wide.amin(-1, keepdim=True).clamp(max=0)
    high = wide.amax(-1, keepdim=True).clamp(min=0)
    scales = torch.where(high > low, (high - low) / 255, 1.0)
    offset = low / scales
    # Where the zero point is near a boundary, drop negative numbers: the zero point is then exact.
    is_near = (offset - offset.floor() - 0.5).abs() < 2.0**-8
    x = x.masked_fill(is_near & (x < 0), 0.0)
    scales = torch.where(is_near, torch.where(high > 0, high / 255, 1.0), scales)
    # The ends of the range determine the scale and the zero point and must stay.
    is_end = (x == low) | (x == high)
    cleared = clear_of_boundaries(x, x.double() / scales, torch.round)
    return torch.where(is_end, x, cleared)
