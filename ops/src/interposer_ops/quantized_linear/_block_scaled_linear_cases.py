"""Test cases of linear layers of MXFP4, MXFP8 and NVFP4.

I input features, O output features.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.quantized_linear._quantized_linear_cases import (
    Arguments,
    LinearFormat,
    features_of,
    scaled_groups,
)
from interposer_ops.quantizers._small_floats import decode_e2m1, decode_e8m0, unpack_nibbles
from interposer_testing.cases import Axis, CaseSpace, Point

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
# Bounds of biased exponents of the scales.
_EXPONENTS = {
    "": (120, 126),
    "equal": (124, 125),
    "far apart": (108, 128),
    "large": (128, 132),
    "small": (100, 104),
}
# Bounds of e4m3 codes of the scales: 0x38 is 1.0; the smallest are subnormal.
_E4M3_CODES = {
    "": (0x28, 0x40),
    "equal": (0x38, 0x39),
    "smallest": (0x01, 0x0C),
    "largest": (0x70, 0x7F),
}
_ALPHA = 0.037
_BIAS = {"": False, "bias": True}
_CROSSED = {"shape": ("many rows", "odd sizes", "three dimensions"), "bias": ("bias",)}
_ALONE = {"shape": ("no rows",)}


def _draw_mxfp4(
    dims: Dims,
    rows: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    exponents: tuple[int, int] = _EXPONENTS[""],
) -> dict[str, Any]:
    in_features, out_features = features_of(dims)
    weight = _bytes((out_features, in_features // 2), generator)
    scales = _bytes((out_features, in_features // 32), generator, exponents)
    x = normal_numbers((*rows, in_features), dtype, generator)
    return {"x": x, "weight": weight, "weight_scales": scales, "bias": None}


def _dequantize_mxfp4(arguments: Arguments, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = decode_e8m0(arguments["weight_scales"], wide)
    return arguments["x"].to(wide), scaled_groups(_e2m1(arguments["weight"], wide), scales)


def _draw_mxfp8(
    dims: Dims,
    rows: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    exponents: tuple[int, int] = _EXPONENTS[""],
) -> dict[str, Any]:
    in_features, out_features = features_of(dims)
    weight = normal_numbers((out_features, in_features), torch.float8_e4m3fn, generator)
    scales = _bytes((out_features, in_features // 32), generator, exponents)
    x = normal_numbers((*rows, in_features), torch.float8_e4m3fn, generator)
    x_scales = _bytes((*rows, in_features // 32), generator, (122, 128))
    operands = {"x": x, "x_scales": x_scales, "weight": weight, "weight_scales": scales}
    return {**operands, "bias": None, "out_dtype": dtype}


def _dequantize_mxfp8(arguments: Arguments, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    x, weight = (
        scaled_groups(arguments[name].to(wide), decode_e8m0(arguments[f"{name}_scales"], wide))
        for name in ("x", "weight")
    )
    return x, weight


def _draw_nvfp4(
    dims: Dims, rows: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator,
    codes: tuple[int, int] = _E4M3_CODES[""], alpha: float = _ALPHA,
) -> dict[str, Any]:  # fmt: skip
    in_features, out_features = features_of(dims)
    weight = _bytes((out_features, in_features // 2), generator)
    scales = _bytes((out_features, in_features // 16), generator, codes)
    x = _bytes((*rows, in_features // 2), generator)
    x_scales = _bytes((*rows, in_features // 16), generator, (0x20, 0x40))
    return {
        "x": x,
        "x_scales": x_scales.view(torch.float8_e4m3fn),
        "weight": weight,
        "weight_scales": scales.view(torch.float8_e4m3fn),
        "alpha": torch.tensor([alpha]),
        "bias": None,
        "out_dtype": dtype,
    }


def _dequantize_nvfp4(arguments: Arguments, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    x, weight = (
        scaled_groups(_e2m1(arguments[name], wide), arguments[f"{name}_scales"].to(wide))
        for name in ("x", "weight")
    )
    return x * arguments["alpha"].to(wide), weight


_MXFP4 = LinearFormat(_draw_mxfp4, _dequantize_mxfp4, scalings=0, stored_product=True)
_MXFP8 = LinearFormat(_draw_mxfp8, _dequantize_mxfp8, scalings=0)
# The scalings of both operands, and alpha.
_NVFP4 = LinearFormat(_draw_nvfp4, _dequantize_nvfp4, scalings=4)


def _build(
    point: Point,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    weight_format: LinearFormat,
    block_size: int,
    **axes: str,
) -> Case:
    """Build the case of a test point: random operands in the format, with block scales.

    Args:
        axes: names of axes by the options of ``weight_format.draw`` that take their values.
    """
    rows, num_blocks, out_features = point["shape"]
    dims = {"in_features": block_size * num_blocks, "out_features": out_features}
    options = {name: point[axis] for name, axis in axes.items()}
    return weight_format.case(dims, rows, dtype, generator, biased=point["bias"], **options)


mxfp4_linear_cases = CaseSpace(
    partial(_build, weight_format=_MXFP4, block_size=32, exponents="exponents"),
    Axis("shape", _SHAPES),
    Axis("exponents", _EXPONENTS),
    Axis("bias", _BIAS),
    strided={"x": "leading", "weight": "offset", "weight_scales": "offset", "bias": "offset"},
    crossed={**_CROSSED, "exponents": ("", "far apart")},
    alone=_ALONE,
)
"""All codes; scales that are equal, near or far apart; the weights are exact in bfloat16."""

mxfp8_linear_cases = CaseSpace(
    partial(_build, weight_format=_MXFP8, block_size=32, exponents="exponents"),
    Axis("shape", _SHAPES),
    Axis("exponents", _EXPONENTS),
    Axis("bias", _BIAS),
    strided={
        "x": "leading",
        "x_scales": "leading",
        **dict.fromkeys(("weight", "weight_scales", "bias"), "offset"),
    },
    crossed={**_CROSSED, "exponents": ("", "far apart")},
    alone=_ALONE,
)
"""Scales of both operands that are equal, near or far apart."""

nvfp4_linear_cases = CaseSpace(
    partial(_build, weight_format=_NVFP4, block_size=16, codes="block scales", alpha="alpha"),
    Axis("shape", _SHAPES),
    Axis("block scales", _E4M3_CODES),
    Axis("alpha", {"": _ALPHA, "alpha of one": 1.0}),
    Axis("bias", _BIAS),
    strided={
        "x": "leading",
        "x_scales": "leading",
        **dict.fromkeys(("weight", "weight_scales", "alpha", "bias"), "offset"),
    },
    crossed={**_CROSSED, "block scales": ("",), "alpha": ("",)},
    alone=_ALONE,
    # Sums of 64 blocks of the largest numbers exceed float16.
    valid=lambda point, dtype: (
        not (point.labels["block scales"] == "largest" and dtype == torch.float16)
        and (point["alpha"] != 1 or not point.labels["block scales"])
    ),
)
"""Block scales from subnormal to the largest, with and without a global scale."""

mxfp4_linear_sample, mxfp8_linear_sample = _MXFP4.sample, _MXFP8.sample
nvfp4_linear_sample = _NVFP4.sample


def _bytes(
    shape: tuple[int, ...], generator: torch.Generator, bounds: tuple[int, int] = (0, 256)
) -> Tensor:
    return torch.randint(*bounds, shape, dtype=torch.uint8, generator=generator)


def _e2m1(packed: Tensor, wide: torch.dtype) -> Tensor:
    return decode_e2m1(unpack_nibbles(packed), wide)
