"""Cases of projections of the formats whose small blocks share a scale.

I input features, O output features.
"""

from __future__ import annotations

import torch

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.quantized_linear._quantized_linear_cases import (
    bias_of,
    float8,
    linear_case,
    sampled_case,
)
from interposer_ops.quantizers._small_floats import decode_e2m1, decode_e8m0, unpack_nibbles
from interposer_testing.cases import Axis, CaseSpace, Point, normal

# Shape of x without its last dimension, number of blocks, O.
_SHAPES = {
    "many rows": ((33,), 8, 96),
    "one row": ((1,), 16, 48),
    "one block": ((5,), 1, 65),
    "odd sizes": ((5,), 7, 37),
    "one output": ((2,), 2, 1),
    "a row and a column after 128": ((129,), 2, 129),
    "no rows": ((0,), 2, 32),
    "three dimensions": ((2, 3), 3, 48),
    "long sum": ((3,), 64, 16),
    "many outputs": ((3,), 4, 144),
}
# Biased exponents: equal ones, such that differ a little or a lot, large and small ones.
_EXPONENTS = {
    "": (120, 126),
    "equal": (124, 125),
    "far apart": (108, 128),
    "large": (128, 132),
    "small": (100, 104),
}
# Codes of e4m3: 0x38 is 1; the smallest are subnormal.
_E4M3_CODES = {
    "": (0x28, 0x40),
    "equal": (0x38, 0x39),
    "smallest": (0x01, 0x0C),
    "largest": (0x70, 0x7F),
}
_BIAS = {"": False, "bias": True}
_CROSSED = {"shape": ("many rows", "odd sizes", "three dimensions"), "bias": ("bias",)}


def _mxfp4(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    rows, num_blocks, out_features = point["shape"]
    x = normal((*rows, 32 * num_blocks), dtype, generator)
    weight = _bytes((out_features, 16 * num_blocks), generator)
    scales = _exponents((out_features, num_blocks), point["exponents"], generator)
    bias = bias_of(out_features, dtype, generator, point["bias"])
    arguments = {"x": x, "weight": weight, "weight_scales": scales, "bias": bias}
    dims = _dims(32 * num_blocks, out_features)
    dequantized = _spread(_e2m1(weight), decode_e8m0(scales, torch.float64))
    return linear_case(arguments, dims, x.double(), dequantized, bias, 0, stored_product=True)


def _mxfp8(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    rows, num_blocks, out_features = point["shape"]
    x = float8((*rows, 32 * num_blocks), torch.float8_e4m3fn, generator)
    x_scales = _exponents((*rows, num_blocks), (122, 128), generator)
    weight = float8((out_features, 32 * num_blocks), torch.float8_e4m3fn, generator)
    scales = _exponents((out_features, num_blocks), point["exponents"], generator)
    bias = bias_of(out_features, dtype, generator, point["bias"])
    arguments = {
        "x": x,
        "x_scales": x_scales,
        "weight": weight,
        "weight_scales": scales,
        "bias": bias,
        "out_dtype": dtype,
    }
    dims = _dims(32 * num_blocks, out_features)
    return linear_case(
        arguments,
        dims,
        _spread(x.double(), decode_e8m0(x_scales, torch.float64)),
        _spread(weight.double(), decode_e8m0(scales, torch.float64)),
        bias,
        0,
    )


def _nvfp4(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    rows, num_blocks, out_features = point["shape"]
    x = _bytes((*rows, 8 * num_blocks), generator)
    x_scales = _e4m3((*rows, num_blocks), (0x20, 0x40), generator)
    weight = _bytes((out_features, 8 * num_blocks), generator)
    scales = _e4m3((out_features, num_blocks), point["block scales"], generator)
    alpha = torch.tensor([point["alpha"]])
    bias = bias_of(out_features, dtype, generator, point["bias"])
    arguments = {
        "x": x,
        "x_scales": x_scales,
        "weight": weight,
        "weight_scales": scales,
        "alpha": alpha,
        "bias": bias,
        "out_dtype": dtype,
    }
    dims = _dims(16 * num_blocks, out_features)
    scaled = _spread(_e2m1(x), x_scales.double()) * alpha.double()
    dequantized = _spread(_e2m1(weight), scales.double())
    # The scalings of both operands and that of the sum.
    return linear_case(arguments, dims, scaled, dequantized, bias, 4)


mxfp4_linear_cases = CaseSpace(
    _mxfp4,
    Axis("shape", _SHAPES),
    Axis("exponents", _EXPONENTS),
    Axis("bias", _BIAS),
    strided={
        "x": "rows",
        "weight": "offset",
        "weight_scales": "offset",
        "bias": "offset",
    },
    crossed={**_CROSSED, "exponents": ("", "far apart")},
    alone={"shape": ("no rows",)},
)
"""All codes with scales that are equal, near or far apart; the weights are exact in bfloat16."""

mxfp8_linear_cases = CaseSpace(
    _mxfp8,
    Axis("shape", _SHAPES),
    Axis("exponents", _EXPONENTS),
    Axis("bias", _BIAS),
    strided={
        "x": "rows",
        "x_scales": "rows",
        "weight": "offset",
        "weight_scales": "offset",
        "bias": "offset",
    },
    crossed={**_CROSSED, "exponents": ("", "far apart")},
    alone={"shape": ("no rows",)},
)
"""Scales of both operands that are equal, near or far apart."""

nvfp4_linear_cases = CaseSpace(
    _nvfp4,
    Axis("shape", _SHAPES),
    Axis("block scales", _E4M3_CODES),
    Axis("alpha", {"": 0.037, "alpha of one": 1.0}),
    Axis("bias", _BIAS),
    strided={
        "x": "rows",
        "x_scales": "rows",
        "weight": "offset",
        "weight_scales": "offset",
        "alpha": "offset",
        "bias": "offset",
    },
    crossed={**_CROSSED, "block scales": ("",), "alpha": ("",)},
    alone={"shape": ("no rows",)},
    # 64 blocks of the largest numbers are beyond float16.
    valid=lambda point, dtype: (
        not (point.labels["block scales"] == "largest" and dtype == torch.float16)
        and (point["alpha"] != 1 or not point.labels["block scales"])
    ),
)
"""Block scales from subnormal to the largest, with and without a scale of the whole."""


def mxfp4_linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of hidden states and a weight without bias, which the dims do not tell."""
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    weight = _bytes((out_features, in_features // 2), generator)
    scales = _exponents((out_features, in_features // 32), _EXPONENTS[""], generator)
    x = normal_numbers((num_tokens, in_features), dtype, generator)
    arguments = {"x": x, "weight": weight, "weight_scales": scales, "bias": None}
    dequantized = _spread(_e2m1(weight), decode_e8m0(scales, torch.float64))
    return sampled_case(arguments, dims, x, dequantized, 0)


def mxfp8_linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of quantized hidden states and a weight without bias."""
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    shape = (out_features, in_features)
    weight = normal_numbers(shape, torch.float8_e4m3fn, generator)
    scales = _exponents((out_features, in_features // 32), _EXPONENTS[""], generator)
    x = normal_numbers((num_tokens, in_features), torch.float8_e4m3fn, generator)
    x_scales = _exponents((num_tokens, in_features // 32), (122, 128), generator)
    arguments = {
        "x": x,
        "x_scales": x_scales,
        "weight": weight,
        "weight_scales": scales,
        "bias": None,
        "out_dtype": dtype,
    }
    scaled = _spread(x.double(), decode_e8m0(x_scales, torch.float64))
    dequantized = _spread(weight.double(), decode_e8m0(scales, torch.float64))
    return sampled_case(arguments, dims, scaled, dequantized, 0)


def nvfp4_linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of quantized hidden states and a weight without bias."""
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    weight = _bytes((out_features, in_features // 2), generator)
    scales = _e4m3((out_features, in_features // 16), _E4M3_CODES[""], generator)
    alpha = torch.tensor([0.037])
    x = _bytes((num_tokens, in_features // 2), generator)
    x_scales = _e4m3((num_tokens, in_features // 16), (0x20, 0x40), generator)
    arguments = {
        "x": x,
        "x_scales": x_scales,
        "weight": weight,
        "weight_scales": scales,
        "alpha": alpha,
        "bias": None,
        "out_dtype": dtype,
    }
    scaled = _spread(_e2m1(x), x_scales.double()) * alpha.double()
    return sampled_case(arguments, dims, scaled, _spread(_e2m1(weight), scales.double()), 4)


def _bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def _exponents(
    shape: tuple[int, ...], bounds: tuple[int, int], generator: torch.Generator
) -> torch.Tensor:
    return torch.randint(*bounds, shape, dtype=torch.uint8, generator=generator)


def _e4m3(
    shape: tuple[int, ...], codes: tuple[int, int], generator: torch.Generator
) -> torch.Tensor:
    return _exponents(shape, codes, generator).view(torch.float8_e4m3fn)


def _e2m1(packed: torch.Tensor) -> torch.Tensor:
    return decode_e2m1(unpack_nibbles(packed), torch.float64)


def _spread(elements: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return elements ``[..., I]`` times the scales ``[..., I / B]`` of their blocks."""
    num_blocks = scales.shape[-1]
    blocks = elements.unflatten(-1, (num_blocks, elements.shape[-1] // num_blocks))
    result: torch.Tensor = (blocks * scales.unsqueeze(-1)).flatten(-2)
    return result


def _dims(in_features: int, out_features: int) -> Dims:
    return {"in_features": in_features, "out_features": out_features}
