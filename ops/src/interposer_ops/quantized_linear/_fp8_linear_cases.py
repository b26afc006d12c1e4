"""Test cases of linear layers of 8-bit floats.

I input features, O output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.quantized_linear._quantized_linear_cases import (
    Arguments,
    LinearFormat,
    features_of,
)
from interposer_testing.cases import Axis, CaseSpace, Point, uniform

# Shape of x without its last dimension, I, O.
_SHAPES = {
    "many rows": ((33,), 256, 96),
    "one row": ((1,), 512, 48),
    "odd sizes": ((5,), 127, 65),
    "one element": ((1,), 1, 1),
    "a row and a column after 128": ((129,), 64, 129),
    "no rows": ((0,), 64, 32),
    "three dimensions": ((2, 3), 64, 48),
    "long sum": ((3,), 2048, 16),
}
_FORMATS = {
    "": ("float8_e4m3fn", "float8_e4m3fn"),
    "e5m2 inputs": ("float8_e5m2", "float8_e4m3fn"),
    "fnuz": ("float8_e4m3fnuz", "float8_e4m3fnuz"),
}
# Shape of x without its last dimension, I, O, rows and columns of a block.
_BLOCKED_SHAPES = {
    "several blocks": ((9,), 384, 256, 128, 128),
    "one block": ((3,), 128, 128, 128, 128),
    "one row": ((1,), 512, 128, 128, 128),
    "last blocks short": ((5,), 300, 200, 128, 128),
    "only blocks short": ((7,), 100, 48, 128, 128),
    "blocks of 64 by 32": ((6,), 160, 192, 64, 32),
    "blocks of 1 by 128": ((4,), 256, 40, 1, 128),
    "a row after 128": ((129,), 128, 32, 128, 128),
    "no rows": ((0,), 256, 128, 128, 128),
    "three dimensions": ((2, 3), 256, 128, 128, 128),
    "long sum": ((2,), 4096, 24, 128, 128),
}
_BIAS = {"": False, "bias": True}
# Standard deviations of x: that of e5m2 exceeds the range of the other formats.
_DEVIATIONS = {"float8_e5m2": 1000.0}


def _draw(
    dims: Dims, rows: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    in_features, out_features = features_of(dims)
    per_output, per_token = dims["weight_scales"] == "channel", dims["x_scales"] == "token"
    weight = _numbers((out_features, in_features), dims["weight_dtype"], generator)
    weight_scale = _scales((out_features,) if per_output else (1,), in_features**-0.5, generator)
    size = _DEVIATIONS.get(str(dims["x_dtype"]), 1.0)
    x = _numbers((*rows, in_features), dims["x_dtype"], generator, size)
    x_scale = _scales((*rows, 1) if per_token else (1,), 1 / size, generator)
    operands = {"x": x, "weight": weight, "x_scale": x_scale, "weight_scale": weight_scale}
    return {**operands, "bias": None, "out_dtype": dtype}


def _dequantize(arguments: Arguments, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    x, weight = arguments["x"].to(wide), arguments["weight"].to(wide)
    weight_scale = arguments["weight_scale"].to(wide).unsqueeze(-1)
    return x * arguments["x_scale"].to(wide), weight * weight_scale


def _draw_blocks(
    dims: Dims, rows: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    in_features, out_features = features_of(dims)
    block_rows, block_columns = int(dims["block_rows"]), int(dims["block_columns"])
    num_rows, num_columns = -(-out_features // block_rows), -(-in_features // block_columns)
    weight = _numbers((out_features, in_features), dims["weight_dtype"], generator)
    weight_scales = _scales((num_rows, num_columns), in_features**-0.5, generator)
    size = _DEVIATIONS.get(str(dims["x_dtype"]), 1.0)
    x = _numbers((*rows, in_features), dims["x_dtype"], generator, size)
    x_scales = _scales((*rows, num_columns), 1 / size, generator)
    operands = {"x": x, "weight": weight, "x_scales": x_scales, "weight_scales": weight_scales}
    block = {"block_rows": block_rows, "block_columns": block_columns}
    return {**operands, **block, "bias": None, "out_dtype": dtype}


def _dequantize_blocks(arguments: Arguments, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    out_features, in_features = arguments["weight"].shape
    columns, blocks = (
        arguments[name]
        .to(wide)
        .repeat_interleave(arguments["block_columns"], -1)[..., :in_features]
        for name in ("x_scales", "weight_scales")
    )
    blocks = blocks.repeat_interleave(arguments["block_rows"], 0)[:out_features]
    return arguments["x"].to(wide) * columns, arguments["weight"].to(wide) * blocks


_FP8 = LinearFormat(_draw, _dequantize, scalings=3)
_FP8_BLOCKS = LinearFormat(_draw_blocks, _dequantize_blocks, scalings=3)


def _fp8_linear(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    rows, in_features, out_features = point["shape"]
    x_dtype, weight_dtype = point["formats"]
    dims = {
        "in_features": in_features,
        "out_features": out_features,
        "x_dtype": x_dtype,
        "weight_dtype": weight_dtype,
        "x_scales": point["x scales"],
        "weight_scales": point["weight scales"],
    }
    return _FP8.case(dims, rows, dtype, generator, biased=point["bias"])


def _fp8_block_linear(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    rows, in_features, out_features, block_rows, block_columns = point["shape"]
    x_dtype, weight_dtype = point["formats"]
    dims = {
        "in_features": in_features,
        "out_features": out_features,
        "block_rows": block_rows,
        "block_columns": block_columns,
        "x_dtype": x_dtype,
        "weight_dtype": weight_dtype,
    }
    return _FP8_BLOCKS.case(dims, rows, dtype, generator, biased=point["bias"])


fp8_linear_cases = CaseSpace(
    _fp8_linear,
    Axis("shape", _SHAPES),
    Axis("formats", _FORMATS),
    Axis("x scales", {"": "tensor", "token": "token"}),
    Axis("weight scales", {"": "tensor", "channel": "channel"}),
    Axis("bias", _BIAS),
    strided={
        "x": "leading",
        **dict.fromkeys(("weight", "x_scale", "weight_scale", "bias"), "offset"),
    },
    varying={"x_scale": ("rank",)},
    crossed={
        "shape": ("many rows", "odd sizes", "three dimensions"),
        "formats": ("",),
        "x scales": ("token",),
        "weight scales": ("channel",),
        "bias": ("bias",),
    },
    alone={"shape": ("no rows",)},
    # A single row or output has one scale in either granularity.
    valid=lambda point, _: (
        point.labels["shape"] != "one element"
        or point["x scales"] == point["weight scales"] == "tensor"
    ),
)
"""All combinations of scale granularities of both operands, with three pairs of formats."""

fp8_block_linear_cases = CaseSpace(
    _fp8_block_linear,
    Axis("shape", _BLOCKED_SHAPES),
    Axis("formats", _FORMATS),
    Axis("bias", _BIAS),
    strided={
        "x": "leading",
        "weight": "offset",
        "x_scales": "any",
        "weight_scales": "offset",
        "bias": "offset",
    },
    varying={"x_scales": ("rank",)},
    crossed={
        "shape": ("several blocks", "last blocks short", "three dimensions"),
        "formats": ("",),
    },
    alone={"shape": ("no rows",)},
)
"""Blocks that divide the weight or not; scales of ``x`` in row-major and column-major order."""

fp8_linear_sample, fp8_block_linear_sample = _FP8.sample, _FP8_BLOCKS.sample


def _scales(shape: tuple[int, ...], size: float, generator: torch.Generator) -> Tensor:
    return uniform(shape, torch.float32, generator, 0.5 * size, 2.0 * size)


def _numbers(
    shape: tuple[int, ...], dtype: object, generator: torch.Generator, deviation: float = 1.0
) -> Tensor:
    return normal_numbers(shape, getattr(torch, str(dtype)), generator, deviation)
