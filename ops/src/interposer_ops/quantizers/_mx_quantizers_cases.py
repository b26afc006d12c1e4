"""Test cases of the quantizers to the microscaling formats and back.

H hidden size, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.quantizers._quantizer_inputs_cases import (
    clear_of_boundaries,
    fp8_numbers,
    insert_peaks,
    midpoints,
    nearest_e2m1,
    nearest_fp8,
    rows_with_peaks,
    signed_choice,
)
from interposer_ops.quantizers._small_floats import (
    E2M1_MAX,
    decode_e2m1,
    decode_e8m0,
    shared_exponents,
)
from interposer_testing.cases import Axis, CaseSpace, Point, peak

_BLOCK, _NV_BLOCK = 32, 16
_TIES = "ties"


def _shapes(block_size: int, num_blocks: int) -> dict[str, tuple[int, ...]]:
    return {
        "many rows": (33, 256),
        "one row": (1, 64),
        "one block": (5, block_size),
        "odd number of blocks": (7, 3 * block_size),
        "no rows": (0, 64),
        "three dimensions": (2, 3, num_blocks * block_size),
        "wide": (2, 4096),
    }


_SHAPES, _NV_SHAPES = _shapes(_BLOCK, 3), _shapes(_NV_BLOCK, 5)
# Ranges of block exponents; the last two ranges need dtypes with 8 exponent bits.
_EXPONENTS = {
    "": (-6, 3),
    "equal": (0, 1),
    "below one": (-13, -8),
    "lowest": (-135, -124),
    "highest": (100, 118),
}
# Peaks in units of the block's scale. At powers of two the scale's exponent changes; peaks above
# the format's largest number saturate. All peaks are exact in bfloat16.
_E4M3_PEAKS = (256.0, 288.0, 416.0, 448.0, 472.0, 510.0)
_E2M1_PEAKS = (4.0, 4.5, 6.0, 6.5, 7.5, 7.9375)
_PEAKS = {"": slice(None), "powers of two": slice(0, 1), "saturated": slice(4, 6)}


def _quantize(
    point: Point, dtype: torch.dtype, generator: torch.Generator, *, numbers: Tensor,
    peaks: tuple[float, ...], nearest: Callable[[Tensor], Tensor],
) -> Case:  # fmt: skip
    shape, content = point["shape"], point["numbers"]
    blocks = (*shape[:-1], shape[-1] // _BLOCK, _BLOCK)
    if content == "zeros":
        x = torch.zeros(blocks, dtype=dtype)
    else:
        x = _blocks(point, blocks, dtype, generator, numbers, peaks, nearest)
    return _case(x.flatten(-2))


def _blocks(
    point: Point, blocks: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator,
    numbers: Tensor, peaks: tuple[float, ...], nearest: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    candidates = torch.tensor(peaks[point["peaks"]], dtype=torch.float64)
    block_peaks = candidates[torch.randint(0, len(candidates), blocks[:-1], generator=generator)]
    lowest, highest = point["exponents"]
    exponents = torch.randint(lowest, highest, blocks[:-1], generator=generator)
    if point["numbers"] == _TIES:
        ties = signed_choice(midpoints(numbers), blocks, generator)
        rows = insert_peaks(ties, block_peaks, generator)
    else:
        rows = rows_with_peaks(blocks, block_peaks, generator)
    if lowest < -100:
        # Scales have the smallest exponent here; keep only elements above the subnormal numbers.
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
        strided={"x": "leading"},
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
"""Blocks with peaks that are powers of two, ordinary or saturated, at all ends of exponents."""

quantize_mxfp4_cases = _space(
    partial(_quantize, numbers=_E2M1, peaks=_E2M1_PEAKS, nearest=nearest_e2m1)
)
"""Blocks with peaks that are powers of two, ordinary or saturated, at all ends of exponents."""


def _dequantize(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape = point["shape"]
    packed = _packed(shape, generator)
    lowest, highest = point["exponents"]
    scales = torch.randint(
        lowest, highest, (*shape[:-1], shape[-1] // _BLOCK), generator=generator, dtype=torch.uint8
    )
    arguments = {"packed": packed, "scales": scales, "out_dtype": dtype}
    return Case("", arguments, {"hidden_size": shape[-1]}, reduction=0)


dequantize_mxfp4_cases = CaseSpace(
    _dequantize,
    Axis("shape", _SHAPES),
    # Biased. Element * scale is exact in the dtype; float16 limits the first range.
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
    strided={"packed": "leading", "scales": "leading"},
    crossed={"shape": ("many rows", "odd number of blocks", "three dimensions")},
    alone={"shape": ("no rows",)},
    valid=lambda point, dtype: (
        point.labels["exponents"] in ("", "equal", "NaN") or dtype != torch.float16
    ),
)
"""Every pair of codes with scales of all magnitudes; element * scale is exact."""


def quantize_mxfp8_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make T rows of hidden states."""
    return _sample(dtype, dims, num_tokens, seed, 8, nearest_fp8(torch.float8_e4m3fn))


def quantize_mxfp4_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make T rows of hidden states."""
    return _sample(dtype, dims, num_tokens, seed, 2, nearest_e2m1)


def _sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int, largest_exponent: int,
    nearest: Callable[[Tensor], Tensor],
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    width = int(dims["hidden_size"])
    x = normal_numbers((num_tokens, width // _BLOCK, _BLOCK), dtype, generator)
    wide = x.double()
    peaks = wide.abs().amax(-1, keepdim=True)
    scales = decode_e8m0(shared_exponents(peaks, largest_exponent), torch.float64)
    cleared = torch.where(wide.abs() == peaks, x, clear_of_boundaries(x, wide / scales, nearest))
    return _case(cleared.flatten(-2), f"{num_tokens} tokens")


def _case(x: Tensor, label: str = "") -> Case:
    """Build a case with exact results: each scale is the exponent of the block's peak."""
    return Case(label, {"x": x}, {"hidden_size": x.shape[-1]}, reduction=0)


_EXCEEDING = "beyond the largest"  # block scales that saturate
# Ranges of e4m3 codes of block scales: 0x78 is 256, 0x7E is 448, codes below 0x08 are subnormal.
_SCALE_CODES = {
    "": (0x20, 0x60),
    "equal": (0x38, 0x39),
    "smallest": (0x02, 0x0C),
    "largest": (0x78, 0x7F),
    _EXCEEDING: (0x7E, 0x7F),
}
_GLOBAL_SCALES = {"": 1.0, "large": 37.7, "small": 0.013}


def _quantize_nvfp4(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape = point["shape"]
    blocks = (*shape[:-1], shape[-1] // _NV_BLOCK, _NV_BLOCK)
    global_scale = torch.tensor([point["global scale"]])
    if point["numbers"] == "zeros":
        x = torch.zeros(blocks, dtype=dtype)
    elif point["numbers"] == _TIES:
        x = _draw_ties(blocks, point["block scales"], dtype, generator)
    else:
        excess = 1.5 if point.labels["block scales"] == _EXCEEDING else 1.0
        x = _draw_blocks(blocks, point["block scales"], excess, global_scale, dtype, generator)
    return _nvfp4_case(x.flatten(-2), global_scale)


def _draw_blocks(
    blocks: tuple[int, ...], codes: tuple[int, int], excess: float, global_scale: Tensor,
    dtype: torch.dtype, generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """Draw blocks whose peaks make block scales close to numbers of e4m3."""
    scales = _scales(blocks[:-1], codes, generator)
    near = 0.98 + 0.04 * torch.rand(blocks[:-1], generator=generator, dtype=torch.float64)
    unit = (scales / global_scale.double()).unsqueeze(-1)
    x = (rows_with_peaks(blocks, E2M1_MAX * excess * near, generator) * unit).to(dtype)
    return clear_of_boundaries(x, x.double() / unit, nearest_e2m1)


def _draw_ties(
    blocks: tuple[int, ...], codes: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Draw blocks of ties with power-of-two block scales, for a global scale of 1."""
    random_scales = _scales(blocks[:-1], codes, generator)
    scales = torch.ldexp(torch.ones_like(random_scales), torch.frexp(random_scales).exponent - 1)
    rows = signed_choice(midpoints(_E2M1), blocks, generator)
    peaks = torch.full(blocks[:-1], E2M1_MAX, dtype=torch.float64)
    return (insert_peaks(rows, peaks, generator) * scales.unsqueeze(-1)).to(dtype)


def _scales(shape: tuple[int, ...], codes: tuple[int, int], generator: torch.Generator) -> Tensor:
    random_codes = torch.randint(*codes, shape, generator=generator, dtype=torch.uint8)
    return random_codes.view(torch.float8_e4m3fn).double()


def _fits(point: Point, dtype: torch.dtype) -> bool:
    saturates = point.labels["block scales"] == _EXCEEDING
    if point["numbers"] == _TIES:
        return point["global scale"] == 1 and not saturates
    return dtype != torch.float16 or not _exceeds_float16(point)


def _exceeds_float16(point: Point) -> bool:
    return bool(point["block scales"][1] > 0x78 and point["global scale"] < 1)


quantize_nvfp4_cases = CaseSpace(
    _quantize_nvfp4,
    Axis("shape", _NV_SHAPES),
    Axis("block scales", _SCALE_CODES),
    Axis("global scale", _GLOBAL_SCALES),
    Axis("numbers", {"": "", _TIES: _TIES, "zeros": "zeros"}),
    strided={"x": "leading", "global_scale": "offset"},
    crossed={
        "shape": ("many rows", "odd number of blocks", "three dimensions"),
        "block scales": ("",),
        "global scale": ("large",),
        "numbers": ("",),
    },
    alone={"shape": ("no rows",), "numbers": ("zeros",)},
    valid=_fits,
)
"""Block scales from subnormal to saturated, with global scales of several magnitudes; ties."""


def quantize_nvfp4_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make T rows of hidden states, each block with a peak that determines the scale."""
    generator = torch.Generator().manual_seed(seed)
    global_scale = torch.tensor([37.7])
    blocks = (num_tokens, int(dims["hidden_size"]) // _NV_BLOCK, _NV_BLOCK)
    x = _draw_blocks(blocks, _SCALE_CODES[""], 1.0, global_scale, dtype, generator)
    return _nvfp4_case(x.flatten(-2), global_scale, f"{num_tokens} tokens")


def _nvfp4_case(x: Tensor, global_scale: Tensor, label: str = "") -> Case:
    """Build a case of ``quantize_nvfp4`` from inputs that all kernels round alike."""
    arguments = {"x": x, "global_scale": global_scale}
    return Case(label, arguments, {"hidden_size": x.shape[-1]}, reduction=0)


def _dequantize_nvfp4(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape = point["shape"]
    packed = _packed(shape, generator)
    scales = _scales((*shape[:-1], shape[-1] // _NV_BLOCK), point["block scales"], generator)
    arguments = {
        "packed": packed,
        "scales": scales.to(torch.float8_e4m3fn),
        "global_scale": torch.tensor([point["global scale"]]),
        "out_dtype": dtype,
    }
    # Kernels divide and multiply in either order, or multiply by the rounded reciprocal.
    largest = E2M1_MAX * peak(scales) / point["global scale"]
    return Case("", arguments, {"hidden_size": shape[-1]}, reduction=2, magnitude=largest)


dequantize_nvfp4_cases = CaseSpace(
    _dequantize_nvfp4,
    Axis("shape", _NV_SHAPES),
    Axis("block scales", {n: c for n, c in _SCALE_CODES.items() if n != _EXCEEDING}),
    Axis("global scale", _GLOBAL_SCALES),
    strided={"packed": "leading", "scales": "leading", "global_scale": "offset"},
    crossed={
        "shape": ("many rows", "odd number of blocks", "three dimensions"),
        "block scales": ("",),
    },
    alone={"shape": ("no rows",)},
    valid=lambda point, dtype: dtype != torch.float16 or not _exceeds_float16(point),
)
"""Every pair of codes with block scales from subnormal to the largest."""


def _packed(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw packed pairs of codes for elements of ``shape``."""
    pairs = (*shape[:-1], shape[-1] // 2)
    return torch.randint(0, 256, pairs, generator=generator, dtype=torch.uint8)
