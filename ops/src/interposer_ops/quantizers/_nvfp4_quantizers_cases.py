"""Cases of the quantizers to NVFP4. H hidden size."""

from __future__ import annotations

import torch

from interposer import Case, Dims
from interposer_ops.quantizers._quantizer_inputs_cases import (
    clear_of_boundaries,
    midpoints,
    nearest_e2m1,
    peaked,
    signed_choice,
    with_peaks,
)
from interposer_ops.quantizers._small_floats import E2M1_MAX, decode_e2m1
from interposer_testing.cases import Axis, CaseSpace, Point, peak

_BLOCK = 16
_TIES = "ties"
_SHAPES = {
    "many rows": (33, 256),
    "one row": (1, 64),
    "one block": (5, 16),
    "odd number of blocks": (7, 48),
    "no rows": (0, 64),
    "three dimensions": (2, 3, 80),
    "wide": (2, 4096),
}
_EXCEEDING = "beyond the largest"  # what a quantizer has to saturate
# Codes of e4m3 that block scales come to: 0x78 is 256, 0x7E 448, below 0x08 are subnormals.
_SCALE_CODES = {
    "": (0x20, 0x60),
    "equal": (0x38, 0x39),
    "smallest": (0x02, 0x0C),
    "largest": (0x78, 0x7F),
    _EXCEEDING: (0x7E, 0x7F),
}
_GLOBAL_SCALES = {"": 1.0, "large": 37.7, "small": 0.013}


def _quantize(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape = point["shape"]
    blocks = (*shape[:-1], shape[-1] // _BLOCK, _BLOCK)
    global_scale = torch.tensor([point["global scale"]])
    if point["numbers"] == "zeros":
        x = torch.zeros(blocks, dtype=dtype)
    elif point["numbers"] == _TIES:
        x = _tied(blocks, point["block scales"], dtype, generator)
    else:
        excess = 1.5 if point.labels["block scales"] == _EXCEEDING else 1.0
        x = _ordinary(blocks, point["block scales"], excess, global_scale, dtype, generator)
    return _case(x.flatten(-2), global_scale)


def _ordinary(
    blocks: tuple[int, ...],
    codes: tuple[int, int],
    excess: float,
    global_scale: torch.Tensor,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return blocks whose peaks bring block scales close to numbers of e4m3."""
    scales = _scales(blocks[:-1], codes, generator)
    near = 0.98 + 0.04 * torch.rand(blocks[:-1], generator=generator, dtype=torch.float64)
    unit = (scales / global_scale.double()).unsqueeze(-1)
    x = (peaked(blocks, E2M1_MAX * excess * near, generator) * unit).to(dtype)
    return clear_of_boundaries(x, x.double() / unit, nearest_e2m1)


def _tied(
    blocks: tuple[int, ...], codes: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Return blocks of ties, whose block scales are powers of two and the global scale is 1."""
    drawn = _scales(blocks[:-1], codes, generator)
    scales = torch.ldexp(torch.ones_like(drawn), torch.frexp(drawn).exponent - 1)
    between = midpoints(decode_e2m1(torch.arange(8, dtype=torch.uint8), torch.float64))
    rows = signed_choice(between, blocks, generator)
    peaks = torch.full(blocks[:-1], E2M1_MAX, dtype=torch.float64)
    return (with_peaks(rows, peaks, generator) * scales.unsqueeze(-1)).to(dtype)


def _scales(
    shape: tuple[int, ...], codes: tuple[int, int], generator: torch.Generator
) -> torch.Tensor:
    drawn = torch.randint(*codes, shape, generator=generator, dtype=torch.uint8)
    return drawn.view(torch.float8_e4m3fn).double()


def _fits(point: Point, dtype: torch.dtype) -> bool:
    beyond = point.labels["block scales"] == _EXCEEDING
    if point["numbers"] == _TIES:
        return point["global scale"] == 1 and not beyond
    return dtype != torch.float16 or not _exceeds_float16(point)


def _exceeds_float16(point: Point) -> bool:
    return bool(point["block scales"][1] > 0x78 and point["global scale"] < 1)


quantize_nvfp4_cases = CaseSpace(
    _quantize,
    Axis("shape", _SHAPES),
    Axis("block scales", _SCALE_CODES),
    Axis("global scale", _GLOBAL_SCALES),
    Axis("numbers", {"": "", _TIES: _TIES, "zeros": "zeros"}),
    strided={"x": "rows", "global_scale": "offset"},
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
    """Return T rows of hidden states, each block with a number that fixes its scale."""
    generator = torch.Generator().manual_seed(seed)
    global_scale = torch.tensor([37.7])
    blocks = (num_tokens, int(dims["hidden_size"]) // _BLOCK, _BLOCK)
    x = _ordinary(blocks, _SCALE_CODES[""], 1.0, global_scale, dtype, generator)
    return _case(x.flatten(-2), global_scale, f"{num_tokens} tokens")


def _case(x: torch.Tensor, global_scale: torch.Tensor, label: str = "") -> Case:
    """Return a case whose results are exact."""
    arguments = {"x": x, "global_scale": global_scale}
    return Case(label, arguments, {"hidden_size": x.shape[-1]}, reduction=0)


def _dequantize(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape = point["shape"]
    packed = torch.randint(
        0, 256, (*shape[:-1], shape[-1] // 2), generator=generator, dtype=torch.uint8
    )
    scales = _scales((*shape[:-1], shape[-1] // _BLOCK), point["block scales"], generator)
    arguments = {
        "packed": packed,
        "scales": scales.to(torch.float8_e4m3fn),
        "global_scale": torch.tensor([point["global scale"]]),
        "out_dtype": dtype,
    }
    # A quotient and a product, in either order, or a product with the reciprocal.
    largest = E2M1_MAX * peak(scales) / point["global scale"]
    return Case("", arguments, {"hidden_size": shape[-1]}, reduction=2, magnitude=largest)


dequantize_nvfp4_cases = CaseSpace(
    _dequantize,
    Axis("shape", _SHAPES),
    Axis("block scales", {n: c for n, c in _SCALE_CODES.items() if n != _EXCEEDING}),
    Axis("global scale", _GLOBAL_SCALES),
    strided={"packed": "rows", "scales": "rows", "global_scale": "offset"},
    crossed={
        "shape": ("many rows", "odd number of blocks", "three dimensions"),
        "block scales": ("",),
    },
    alone={"shape": ("no rows",)},
    valid=lambda point, dtype: dtype != torch.float16 or not _exceeds_float16(point),
)
"""Every pair of codes with block scales from subnormal to the largest."""
