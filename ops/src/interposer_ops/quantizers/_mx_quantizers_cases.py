"""Cases of the quantizers to the microscaling formats. H hidden size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.quantizers._quantizer_inputs_cases import (
    clear_of_boundaries,
    fp8_numbers,
    midpoints,
    nearest_e2m1,
    nearest_fp8,
    peaked,
    signed_choice,
    with_peaks,
)
from interposer_ops.quantizers._small_floats import decode_e2m1, decode_e8m0, shared_exponents
from interposer_testing.cases import Axis, CaseSpace, Point

_BLOCK = 32
_TIES = "ties"
_SHAPES = {
    "many rows": (33, 256),
    "one row": (1, 64),
    "one block": (5, 32),
    "odd number of blocks": (7, 96),
    "no rows": (0, 64),
    "three dimensions": (2, 3, 96),
    "wide": (2, 4096),
}
# The exponents that blocks are scaled by; those of the last two need 8 bits of exponent.
_EXPONENTS = {
    "": (-6, 3),
    "equal": (0, 1),
    "below one": (-13, -8),
    "lowest": (-135, -124),
    "highest": (100, 118),
}
# Peaks relative to a block's scale. Powers of two are where its exponent changes; what lies above
# the largest number of the format saturates; all are representable in 8 bits.
_E4M3_PEAKS = (256.0, 288.0, 416.0, 448.0, 472.0, 510.0)
_E2M1_PEAKS = (4.0, 4.5, 6.0, 6.5, 7.5, 7.9375)
_PEAKS = {"": slice(None), "powers of two": slice(0, 1), "saturated": slice(4, 6)}


def _quantize(
    point: Point,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    numbers: torch.Tensor,
    peaks: tuple[float, ...],
    nearest: Callable[[torch.Tensor], torch.Tensor],
) -> Case:
    shape, content = point["shape"], point["numbers"]
    blocks = (*shape[:-1], shape[-1] // _BLOCK, _BLOCK)
    if content == "zeros":
        x = torch.zeros(blocks, dtype=dtype)
    else:
        x = _blocks(point, blocks, dtype, generator, numbers, peaks, nearest)
    return _case(x.flatten(-2))


def _blocks(
    point: Point,
    blocks: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    numbers: torch.Tensor,
    peaks: tuple[float, ...],
    nearest: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    choice = torch.tensor(peaks[point["peaks"]], dtype=torch.float64)
    tops = choice[torch.randint(0, len(choice), blocks[:-1], generator=generator)]
    lowest, highest = point["exponents"]
    exponents = torch.randint(lowest, highest, blocks[:-1], generator=generator)
    if point["numbers"] == _TIES:
        between = midpoints(numbers)
        rows = with_peaks(signed_choice(between, blocks, generator), tops, generator)
    else:
        rows = peaked(blocks, tops, generator)
    if lowest < -100:
        # Below the smallest exponent of a scale, but above the subnormal numbers.
        rows = torch.where(rows.abs() < 256, 0.0, rows) if peaks[0] == 256 else rows
    x = torch.ldexp(rows, exponents.unsqueeze(-1)).to(dtype)
    if point["numbers"] == _TIES:
        return x
    quotients = torch.ldexp(x.double(), -exponents.unsqueeze(-1))
    return clear_of_boundaries(x, quotients, nearest)


def _exists(point: Point, dtype: torch.dtype) -> bool:
    wide = point.labels["exponents"] in ("lowest", "highest")
    return not (wide and (dtype == torch.float16 or point["numbers"] == _TIES))


def _space(build: Callable[[Point, torch.dtype, torch.Generator], Case]) -> CaseSpace:
    return CaseSpace(
        build,
        Axis("shape", _SHAPES),
        Axis("exponents", _EXPONENTS),
        Axis("peaks", _PEAKS),
        Axis("numbers", {"": "", _TIES: _TIES, "zeros": "zeros"}),
        strided={"x": "rows"},
        crossed={
            "shape": ("many rows", "odd number of blocks", "three dimensions"),
            "exponents": ("",),
            "peaks": ("",),
            "numbers": ("",),
        },
        alone={"shape": ("no rows",), "numbers": ("zeros",)},
        valid=_exists,
    )


_E4M3 = fp8_numbers(torch.float8_e4m3fn)
_E2M1 = decode_e2m1(torch.arange(8, dtype=torch.uint8), torch.float64)

quantize_mxfp8_cases = _space(
    partial(_quantize, numbers=_E4M3, peaks=_E4M3_PEAKS, nearest=nearest_fp8(torch.float8_e4m3fn))
)
"""Blocks whose peaks are powers of two, ordinary or saturated, at all ends of exponents."""

quantize_mxfp4_cases = _space(
    partial(_quantize, numbers=_E2M1, peaks=_E2M1_PEAKS, nearest=nearest_e2m1)
)
"""Blocks whose peaks are powers of two, ordinary or saturated, at all ends of exponents."""


def _dequantize(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape = point["shape"]
    packed = torch.randint(
        0, 256, (*shape[:-1], shape[-1] // 2), generator=generator, dtype=torch.uint8
    )
    lowest, highest = point["exponents"]
    scales = torch.randint(
        lowest, highest, (*shape[:-1], shape[-1] // _BLOCK), generator=generator, dtype=torch.uint8
    )
    arguments = {"packed": packed, "scales": scales, "out_dtype": dtype}
    return Case("", arguments, {"hidden_size": shape[-1]}, reduction=0)


dequantize_mxfp4_cases = CaseSpace(
    _dequantize,
    Axis("shape", _SHAPES),
    # Biased. The products are exact in the dtype: 14 is the range of float16.
    Axis(
        "exponents",
        {
            "": (120, 135),
            "equal": (127, 128),
            "NaN": (255, 256),
            "some NaN": (253, 256),
            "lowest": (2, 20),
            "highest": (230, 252),
        },
    ),
    strided={"packed": "rows", "scales": "rows"},
    crossed={"shape": ("many rows", "odd number of blocks", "three dimensions")},
    alone={"shape": ("no rows",)},
    valid=lambda point, dtype: (
        point.labels["exponents"] in ("", "equal", "NaN") or dtype != torch.float16
    ),
)
"""Every pair of codes with scales of all magnitudes, whose products are exact."""


def quantize_mxfp8_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of hidden states."""
    return _sample(dtype, dims, num_tokens, seed, 8, nearest_fp8(torch.float8_e4m3fn))


def quantize_mxfp4_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of hidden states."""
    return _sample(dtype, dims, num_tokens, seed, 2, nearest_e2m1)


def _sample(
    dtype: torch.dtype,
    dims: Dims,
    num_tokens: int,
    seed: int,
    largest_exponent: int,
    nearest: Callable[[torch.Tensor], torch.Tensor],
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    width = int(dims["hidden_size"])
    x = normal_numbers((num_tokens, width // _BLOCK, _BLOCK), dtype, generator)
    wide = x.double()
    peaks = wide.abs().amax(-1, keepdim=True)
    scales = decode_e8m0(shared_exponents(peaks, largest_exponent), torch.float64)
    cleared = torch.where(wide.abs() == peaks, x, clear_of_boundaries(x, wide / scales, nearest))
    return _case(cleared.flatten(-2), f"{num_tokens} tokens")


def _case(x: torch.Tensor, label: str = "") -> Case:
    """Return a case whose results are exact: a scale is the exponent of a number."""
    return Case(label, {"x": x}, {"hidden_size": x.shape[-1]}, reduction=0)
