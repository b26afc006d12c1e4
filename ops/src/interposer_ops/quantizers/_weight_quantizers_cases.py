"""Test cases of the quantizers of weights to integers.

O output features, I input features, G inputs per scale.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops.quantizers._quantizer_inputs_cases import (
    clear_of_boundaries,
    rows_with_peaks,
    signed_choice,
    with_scale_bound,
)
from interposer_testing.cases import Axis, CaseSpace, Point, peak

_TIES = "ties"
# Approximate largest magnitudes of groups; float16 ends at 65504.
_NUMBERS = {"": 0.1, "small": 2.0**-10, "large": 6e3, _TIES: _TIES, "zeros": 0.0}
_EVEN = {  # O, I, G
    "groups of 32": (33, 128, 32),
    "groups of 128": (5, 512, 128),
    "one scale per row": (7, 96, 96),
    "odd groups": (9, 90, 15),
    "groups of a vector and a rest": (3, 120, 24),
    "one pair": (1, 2, 2),
    "pairs": (4, 6, 2),
    "no rows": (0, 64, 32),
    "wide": (2, 4096, 4096),
}
_ANY = {**_EVEN, "odd width": (5, 127, 127), "one number": (1, 1, 1)}
_SIGNS = {"": 0, "not negative": 1, "not positive": -1}
# A scale is a difference divided by a constant, or multiplied by the constant's rounded reciprocal:
# up to three roundings. The error bound of sums allows twice that.
_bounded = partial(with_scale_bound, roundings=3)
# Larger than the error of these roundings: all kernels then round a scale to the same 16 bits.
_SCALE_MARGIN = 2.0**-20
_LARGEST = 7.5  # magnitude of a 4-bit number in units of the scale


def _int8(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    return _symmetric(point, dtype, 127.5, generator)


def _int4(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    return _symmetric(point, dtype, _LARGEST, generator)


def _symmetric(
    point: Point, dtype: torch.dtype, largest: float, generator: torch.Generator
) -> Case:
    """Build a case of symmetric quantization: each group's peak is ``largest`` * scale.

    The peak of a group is positive and saturates. A negative peak would be a tie up to the rounding
    of the scale, so that sensible kernels would differ.
    """
    rows, width, group = point["weight"]
    blocks = rows, width // group, group
    if point["numbers"] == _TIES:
        halves = torch.arange(int(largest), dtype=torch.float64) + 0.5
        groups = signed_choice(halves, blocks, generator)
        peaks = torch.full(blocks[:-1], largest, dtype=torch.float64)
        exponents = torch.randint(-9, 1, blocks[:-1], generator=generator)
        groups = torch.ldexp(_positive_peaks(groups, peaks, generator), exponents.unsqueeze(-1))
        weight = groups.to(dtype)
    else:
        factors = 1 + 7 * torch.rand(blocks[:-1], generator=generator, dtype=torch.float64)
        # The peak after the rounding to the weight's dtype determines the scale.
        peaks = (point["numbers"] * factors).to(dtype).double()
        peaks = _clear_of_midpoints(peaks, largest, point["scale dtype"])
        groups = _positive_peaks(rows_with_peaks(blocks, peaks, generator), peaks, generator)
        scale = (peaks / largest).to(point["scale dtype"]).double()
        scale = torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
        weight = groups.to(dtype)
        weight = clear_of_boundaries(
            weight,
            weight.double() / scale,
            lambda q: q.round().clamp(-largest - 0.5, largest - 0.5),
        )
    arguments = {
        "weight": weight.flatten(1),
        "group_size": group,
        "scale_dtype": point["scale dtype"],
    }
    scale_dtype = str(point["scale dtype"]).removeprefix("torch.")
    dims: Dims = {**_sizes(point), "scale_dtype": scale_dtype}
    return _bounded(Case("", arguments, dims), peak(weight) / largest)


def _int4_asymmetric(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    (rows, width, group), sign = point["weight"], point["sign"]
    blocks = rows, width // group, group
    if point["numbers"] == _TIES:
        # Even and odd zero points; a range of exactly 15 steps makes the scale a power of two.
        low = -8.0 + 3 * torch.randint(0, 2, blocks[:-1], generator=generator)
        groups = signed_choice(torch.arange(5, dtype=torch.float64) + 0.5, blocks, generator)
        groups[..., 0], groups[..., -1] = low, low + 15
        exponents = torch.randint(-9, 1, blocks[:-1], generator=generator)
        weight = torch.ldexp(groups, exponents.unsqueeze(-1)).to(dtype)
    else:
        factors = 1 + 7 * torch.rand(blocks[:-1], generator=generator, dtype=torch.float64)
        weight = rows_with_peaks(blocks, point["numbers"] * factors, generator).to(dtype)
        weight = _cleared(weight.abs() * sign if sign else weight)
    arguments = {"weight": weight.flatten(1), "group_size": group}
    return _bounded(Case("", arguments, _sizes(point)), peak(weight) / _LARGEST)


def _cleared(weight: Tensor) -> Tensor:
    """Zero the elements where a quotient or a zero point is near a rounding boundary."""
    wide = weight.double()
    low, high = wide.amin(-1, keepdim=True).clamp(max=0), wide.amax(-1, keepdim=True).clamp(min=0)
    scale = torch.where(high > low, (high - low) / 15, 1.0)
    offset = low / scale
    # Where the zero point is near a boundary, drop negative numbers: the zero point is then exact.
    is_near = (offset - offset.floor() - 0.5).abs() < 2.0**-8
    weight = weight.masked_fill(is_near & (weight < 0), 0.0)
    wide = weight.double()
    low, high = wide.amin(-1, keepdim=True).clamp(max=0), wide.amax(-1, keepdim=True).clamp(min=0)
    scale = torch.where(high > low, (high - low) / 15, 1.0)
    zero = (-8 - low / scale).round()
    # The ends of the range determine the scale and the zero point and must stay.
    is_end = (weight == low) | (weight == high)
    shifted = wide / scale + zero
    margin = 2.0**-16 * (1 + zero.abs() + (wide / scale).abs())
    changed = (shifted - margin).round() != (shifted + margin).round()
    return torch.where(is_end, weight, weight.masked_fill(changed, 0.0))


def _clear_of_midpoints(peaks: Tensor, largest: float, scale_dtype: torch.dtype) -> Tensor:
    """Replace peaks whose scales are near a rounding midpoint by peaks with power-of-two scales."""
    scale = peaks / largest
    below, above = (scale * (1 + side) for side in (-_SCALE_MARGIN, _SCALE_MARGIN))
    is_near = below.to(scale_dtype) != above.to(scale_dtype)
    if scale_dtype == torch.float32:  # the error bound of the case covers these roundings
        return peaks
    power = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
    return torch.where(is_near, largest * power, peaks)


def _positive_peaks(groups: Tensor, peaks: Tensor, generator: torch.Generator) -> Tensor:
    """Insert the positive peak at a random position; zero other numbers as large as the peak."""
    position = torch.randint(0, groups.shape[-1], peaks.shape, generator=generator).unsqueeze(-1)
    smaller = torch.where(groups.abs() < peaks.unsqueeze(-1), groups, 0.0)
    return smaller.scatter(-1, position, peaks.unsqueeze(-1))


def _sizes(point: Point) -> dict[str, int]:
    rows, width, group = point["weight"]
    return {"in_features": width, "out_features": rows, "num_groups": width // group}


_SCALE_DTYPES = Axis("scale dtype", {"": torch.float32, "bfloat16 scales": torch.bfloat16})

quantize_weight_int8_cases = CaseSpace(
    _int8,
    Axis("weight", _ANY),
    Axis("numbers", _NUMBERS),
    _SCALE_DTYPES,
    strided={"weight": "rows"},
    crossed={
        "weight": ("groups of 32", "odd groups", "odd width"),
        "numbers": ("", _TIES),
        "scale dtype": ("bfloat16 scales",),
    },
    alone={"weight": ("no rows",)},
)
"""Groups of different magnitudes, the peak at any position, scales of 32 and of 16 bits; ties."""

quantize_weight_int4_cases = CaseSpace(
    _int4,
    Axis("weight", _EVEN),
    Axis("numbers", _NUMBERS),
    _SCALE_DTYPES,
    strided={"weight": "rows"},
    crossed={
        "weight": ("groups of 32", "odd groups", "groups of a vector and a rest"),
        "numbers": ("", _TIES),
        "scale dtype": ("bfloat16 scales",),
    },
    alone={"weight": ("no rows",)},
)
"""Groups of different magnitudes, the peak at any position, scales of 32 and of 16 bits; ties."""

quantize_weight_int4_asymmetric_cases = CaseSpace(
    _int4_asymmetric,
    Axis("weight", _EVEN),
    Axis("numbers", _NUMBERS),
    Axis("sign", _SIGNS),
    strided={"weight": "rows"},
    crossed={
        "weight": ("groups of 32", "odd groups", "groups of a vector and a rest"),
        "numbers": ("", _TIES),
        "sign": ("", "not negative"),
    },
    alone={"weight": ("no rows",)},
    # Zeros have no sign, and groups with ties have both signs.
    valid=lambda point, _: not (point["sign"] and point["numbers"] in (_TIES, 0.0)),
)
"""Groups around zero and on one side of zero; ties, also with odd zero points, and zeros."""
