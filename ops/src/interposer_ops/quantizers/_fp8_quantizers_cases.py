"""Test cases of the quantizers to 8-bit floats.

H hidden size, B block size, T tokens.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops.quantizers._quantizer_inputs_cases import (
    FP8_FORMATS,
    SHAPES,
    clear_of_boundaries,
    fp8_numbers,
    insert_peaks,
    midpoints,
    nearest_fp8,
    rows_with_peaks,
    sampled_rows,
    signed_choice,
    with_scale_bound,
)
from interposer_testing.cases import Axis, CaseSpace, Point, peak

_TIES = "ties"
# Approximate largest magnitudes of rows; float16 ends at 65504.
_NUMBERS = {"": 4.0, "small": 2.0**-10, "large": 6e3, _TIES: _TIES, "zeros": 0.0}
_BLOCK_SHAPES = {
    "several blocks": ((9, 512), 128),
    "one block": ((3, 128), 128),
    "blocks of 64": ((2, 3, 192), 64),
    "blocks of 32": ((5, 160), 32),
    "short last block": ((7, 300), 128),
    "short only block": ((3, 70), 128),
    "one row, wide": ((1, 4096), 128),
    "no rows": ((0, 256), 128),
}
# A scale is the peak divided by a constant, or multiplied by the constant's rounded reciprocal: two
# roundings. The error bound of sums allows twice that.
_bounded = partial(with_scale_bound, roundings=2)


def _static(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape, out_dtype = point["shape"], point["format"]
    limit = torch.finfo(out_dtype).max
    if point["numbers"] == _TIES:
        scale = torch.tensor([0.125])
        x = (signed_choice(_tie_points(out_dtype), shape, generator) / 8).to(dtype)
    else:
        # Up to twice the largest number of the format, so that some elements saturate.
        scale = torch.tensor([max(point["numbers"], 1.0) / limit * (0.9 + 0.1 * point["excess"])])
        peaks = torch.full(shape[:-1], point["numbers"], dtype=torch.float64)
        x = rows_with_peaks(shape, peaks, generator).to(dtype)
        x = clear_of_boundaries(x, x.double() / scale.double(), nearest_fp8(out_dtype))
    arguments = {"x": x, "scale": scale, "out_dtype": out_dtype}
    return Case("", arguments, _dims(shape, out_dtype), reduction=0)


def _dynamic(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape, out_dtype = point["shape"], point["format"]
    flat = (math.prod(shape),)
    rows = (1, *flat) if flat[0] else (0, 1)
    x = _rows(rows, point["numbers"], out_dtype, dtype, generator).view(shape)
    case = Case("", {"x": x, "out_dtype": out_dtype}, _dims(shape, out_dtype))
    return _bounded(case, peak(x) / torch.finfo(out_dtype).max)


def _per_token(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape, out_dtype, limited = point["shape"], point["format"], point["limited"]
    largest = torch.finfo(out_dtype).max
    x = _rows(shape, point["numbers"], out_dtype, dtype, generator)
    scale_limit = None
    if limited:
        # Below the scale of some rows and above that of others.
        scale_limit = 5.0 / largest
        scales = (x.double().abs().amax(-1, keepdim=True) / largest).clamp(max=scale_limit)
        quotients = x.double() / torch.where(scales > 0, scales, 1.0)
        x = clear_of_boundaries(x, quotients, nearest_fp8(out_dtype))
    arguments = {"x": x, "out_dtype": out_dtype, "scale_limit": scale_limit}
    dims = {**_dims(shape, out_dtype), "limited": limited}
    return _bounded(Case("", arguments, dims), peak(x) / largest)


def _blocks(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape, block_size = point["shape"]
    out_dtype, rounded_up = point["format"], point["scales"]
    width = shape[-1]
    draw_blocks = _rows_with_power_of_two_scales if rounded_up else _rows
    parts = [
        draw_blocks(
            (*shape[:-1], count, size), point["numbers"], out_dtype, dtype, generator
        ).flatten(-2)
        for count, size in ((width // block_size, block_size), (1, width % block_size))
        if count * size
    ]
    x = torch.cat(parts, -1)
    arguments = {
        "x": x,
        "block_size": block_size,
        "out_dtype": out_dtype,
        "power_of_two_scales": rounded_up,
    }
    dims = {**_dims(shape, out_dtype), "block_size": block_size, "power_of_two_scales": rounded_up}
    if rounded_up:
        return Case("", arguments, dims, reduction=0)
    return _bounded(Case("", arguments, dims), peak(x) / torch.finfo(out_dtype).max)


_SHAPE = Axis("shape", SHAPES)
_FORMAT = Axis("format", FP8_FORMATS)
_CROSSED = {
    "numbers": ("",),
    "shape": ("many rows", "odd width", "three dimensions"),
    "format": ("e4m3fn",),
}
_ALONE = {"shape": ("no rows",), "numbers": ("zeros",)}

quantize_fp8_static_cases = CaseSpace(
    _static,
    _SHAPE,
    _FORMAT,
    Axis("numbers", _NUMBERS),
    Axis("excess", {"": 0.0, "saturated": -4.0}),
    strided={"x": "leading", "scale": "offset"},
    special={"x": ("infinities", "negative zeros")},
    crossed={**_CROSSED, "excess": ("",)},
    alone=_ALONE,
    valid=lambda point, _: not point["excess"] or point["numbers"] == _NUMBERS[""],
)
"""Numbers within and beyond the range of the format, and ties between its numbers."""

quantize_fp8_per_token_cases = CaseSpace(
    _per_token,
    _SHAPE,
    _FORMAT,
    Axis("numbers", _NUMBERS),
    Axis("limited", {"": False, "limited": True}),
    strided={"x": "leading"},
    crossed=_CROSSED,
    alone=_ALONE,
    valid=lambda point, _: not point["limited"] or point["numbers"] == _NUMBERS[""],
)
"""Rows of different magnitudes, some beyond the limit of scales; ties and zeros."""

quantize_fp8_blocks_cases = CaseSpace(
    _blocks,
    Axis("shape", _BLOCK_SHAPES),
    _FORMAT,
    Axis("numbers", _NUMBERS),
    Axis("scales", {"": False, "powers of two": True}),
    strided={"x": "leading"},
    crossed={
        "shape": ("several blocks", "blocks of 64", "short last block"),
        "numbers": ("",),
        "format": ("e4m3fn",),
    },
    alone={"shape": ("no rows",), "numbers": ("zeros",)},
    # Shapes differ in the lengths of blocks, which magnitudes and ties do not depend on.
    valid=lambda point, _: (
        point["numbers"] in (_NUMBERS[""], 0.0)
        or point.labels["shape"] in ("several blocks", "short last block")
    ),
)
"""Blocks of different magnitudes, with full and short last blocks; ties and zeros."""


def quantize_fp8_per_token_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Make T rows of hidden states."""
    out_dtype = getattr(torch, str(dims["out_dtype"]))
    x = sampled_rows(dtype, dims, num_tokens, seed)
    scales = x.double().abs().amax(-1, keepdim=True) / torch.finfo(out_dtype).max
    x = clear_of_boundaries(x, x.double() / scales, nearest_fp8(out_dtype))
    # Larger than any scale, so that no element saturates.
    limit = 1e3 if dims["limited"] else None
    arguments = {"x": x, "out_dtype": out_dtype, "scale_limit": limit}
    return _bounded(Case(f"{num_tokens} tokens", arguments, dims), float(scales.max()))


def quantize_fp8_blocks_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make T rows of full blocks, each block with a peak that determines the scale."""
    generator = torch.Generator().manual_seed(seed)
    out_dtype = getattr(torch, str(dims["out_dtype"]))
    width, block_size = int(dims["hidden_size"]), int(dims["block_size"])
    shape = (num_tokens, width // block_size, block_size)
    draw_blocks = _rows_with_power_of_two_scales if dims["power_of_two_scales"] else _rows
    x = draw_blocks(shape, 4.0, out_dtype, dtype, generator).flatten(-2)
    arguments = {
        "x": x,
        "block_size": block_size,
        "out_dtype": out_dtype,
        "power_of_two_scales": bool(dims["power_of_two_scales"]),
    }
    case = Case(f"{num_tokens} tokens", arguments, dims)
    return _bounded(case, 2 * peak(x) / torch.finfo(out_dtype).max)


def _dims(shape: tuple[int, ...], out_dtype: torch.dtype) -> dict[str, int | str]:
    return {"hidden_size": shape[-1], "out_dtype": str(out_dtype).removeprefix("torch.")}


def _tie_points(out_dtype: torch.dtype) -> Tensor:
    return midpoints(fp8_numbers(out_dtype))


def _peaks(
    shape: tuple[int, ...], numbers: float, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Draw the largest magnitude of each row, between 1 and 8 times ``numbers``."""
    factors = torch.ldexp(
        1 + torch.rand(shape, generator=generator, dtype=torch.float64),
        torch.randint(0, 3, shape, generator=generator),
    )
    return (numbers * factors).to(dtype).double()


def _rows(
    shape: tuple[int, ...],
    numbers: float | str,
    out_dtype: torch.dtype,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    """Draw rows for quantizers whose scale is peak / max."""
    limit = torch.finfo(out_dtype).max
    if numbers == _TIES:
        exponents = -torch.randint(2, 5, shape[:-1], generator=generator)
        rows = signed_choice(_tie_points(out_dtype), shape, generator)
        peaks = torch.full(shape[:-1], limit, dtype=torch.float64)
        return torch.ldexp(insert_peaks(rows, peaks, generator), exponents.unsqueeze(-1)).to(dtype)
    assert isinstance(numbers, float)
    peaks = _peaks(shape[:-1], numbers, dtype, generator)
    x = rows_with_peaks(shape, peaks, generator).to(dtype)
    scales = torch.where(peaks > 0, peaks / limit, 1.0).unsqueeze(-1)
    return clear_of_boundaries(x, x.double() / scales, nearest_fp8(out_dtype))


def _rows_with_power_of_two_scales(
    shape: tuple[int, ...],
    numbers: float | str,
    out_dtype: torch.dtype,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    """Draw rows for quantizers whose scale is rounded up to a power of two.

    Peaks are numbers of the format between 0.55 and 0.97 times the largest number, so that neither
    a peak nor the logarithm of a peak is near a rounding boundary.
    """
    ties = numbers == _TIES
    limit = torch.finfo(out_dtype).max
    codes = fp8_numbers(out_dtype)
    candidates = codes[(codes > 0.55 * limit) & (codes < 0.97 * limit)]
    peaks = candidates[torch.randint(0, len(candidates), shape[:-1], generator=generator)]
    size = (
        0.0
        if numbers == 0
        else 2.0 ** math.floor(math.log2((4.0 if ties else float(numbers)) / limit))
    )
    scales = torch.ldexp(
        torch.full(shape[:-1], size, dtype=torch.float64),
        torch.randint(0, 3, shape[:-1], generator=generator),
    )
    if ties:
        below = _tie_points(out_dtype)
        rows = signed_choice(below[below < 0.55 * limit], shape, generator)
        return (insert_peaks(rows, peaks, generator) * scales.unsqueeze(-1)).to(dtype)
    x = (rows_with_peaks(shape, peaks, generator) * scales.unsqueeze(-1)).to(dtype)
    divisors = torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    return clear_of_boundaries(x, x.double() / divisors, nearest_fp8(out_dtype))
