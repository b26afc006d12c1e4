"""Cases of projections of 8-bit floats. I input features, O output features."""

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
    "": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "e5m2 inputs": (torch.float8_e5m2, torch.float8_e4m3fn),
    "fnuz": (torch.float8_e4m3fnuz, torch.float8_e4m3fnuz),
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
# Beyond the range of the other formats, for which there is e5m2.
_DEVIATIONS = {torch.float8_e5m2: 1000.0}


def _fp8_linear(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    rows, in_features, out_features = point["shape"]
    x_dtype, weight_dtype = point["formats"]
    size = _DEVIATIONS.get(x_dtype, 1.0)
    x = float8((*rows, in_features), x_dtype, generator, size)
    weight = float8((out_features, in_features), weight_dtype, generator)
    per_token, per_output = point["x scales"], point["weight scales"]
    x_scale = _scales((*rows, 1) if per_token else (1,), 1 / size, generator)
    weight_scale = _scales((out_features,) if per_output else (1,), in_features**-0.5, generator)
    bias = bias_of(out_features, dtype, generator, point["bias"])
    arguments = {
        "x": x,
        "weight": weight,
        "x_scale": x_scale,
        "weight_scale": weight_scale,
        "bias": bias,
        "out_dtype": dtype,
    }
    dims = {
        "in_features": in_features,
        "out_features": out_features,
        "x_dtype": _name(x_dtype),
        "weight_dtype": _name(weight_dtype),
        "x_scales": "token" if per_token else "tensor",
        "weight_scales": "channel" if per_output else "tensor",
    }
    dequantized = weight.double() * weight_scale.double().unsqueeze(-1)
    return linear_case(arguments, dims, x.double() * x_scale.double(), dequantized, bias, 3)


def _fp8_block_linear(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    rows, in_features, out_features, block_rows, block_columns = point["shape"]
    x_dtype, weight_dtype = point["formats"]
    size = _DEVIATIONS.get(x_dtype, 1.0)
    x = float8((*rows, in_features), x_dtype, generator, size)
    weight = float8((out_features, in_features), weight_dtype, generator)
    num_rows, num_columns = -(-out_features // block_rows), -(-in_features // block_columns)
    x_scales = _scales((*rows, num_columns), 1 / size, generator)
    weight_scales = _scales((num_rows, num_columns), in_features**-0.5, generator)
    bias = bias_of(out_features, dtype, generator, point["bias"])
    arguments = {
        "x": x,
        "weight": weight,
        "x_scales": x_scales,
        "weight_scales": weight_scales,
        "block_rows": block_rows,
        "block_columns": block_columns,
        "bias": bias,
        "out_dtype": dtype,
    }
    dims = {
        "in_features": in_features,
        "out_features": out_features,
        "block_rows": block_rows,
        "block_columns": block_columns,
        "x_dtype": _name(x_dtype),
        "weight_dtype": _name(weight_dtype),
    }
    columns = _spread(x_scales, block_columns, in_features)
    blocks = _spread(weight_scales, block_columns, in_features)
    blocks = blocks.repeat_interleave(block_rows, 0)[:out_features]
    return linear_case(arguments, dims, x.double() * columns, weight.double() * blocks, bias, 3)


fp8_linear_cases = CaseSpace(
    _fp8_linear,
    Axis("shape", _SHAPES),
    Axis("formats", _FORMATS),
    Axis("x scales", {"": False, "token": True}),
    Axis("weight scales", {"": False, "channel": True}),
    Axis("bias", _BIAS),
    strided={
        "x": "rows",
        "weight": "offset",
        "x_scale": "offset",
        "weight_scale": "offset",
        "bias": "offset",
    },
    crossed={
        "shape": ("many rows", "odd sizes", "three dimensions"),
        "formats": ("",),
        "x scales": ("token",),
        "weight scales": ("channel",),
        "bias": ("bias",),
    },
    alone={"shape": ("no rows",)},
    # A single row or output has one scale either way.
    valid=lambda point, _: (
        point.labels["shape"] != "one element" or not (point["x scales"] or point["weight scales"])
    ),
)
"""Granularities of both scales in all combinations, with three pairs of formats."""

fp8_block_linear_cases = CaseSpace(
    _fp8_block_linear,
    Axis("shape", _BLOCKED_SHAPES),
    Axis("formats", _FORMATS),
    Axis("bias", _BIAS),
    strided={
        "x": "rows",
        "weight": "offset",
        "x_scales": "any",
        "weight_scales": "offset",
        "bias": "offset",
    },
    crossed={
        "shape": ("several blocks", "last blocks short", "three dimensions"),
        "formats": ("",),
    },
    alone={"shape": ("no rows",)},
)
"""Blocks that divide the weight or not. Kernels want scales of ``x`` in either order of memory."""


def fp8_linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of quantized hidden states and a weight without bias."""
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    weight = _sampled(out_features, in_features, dims["weight_dtype"], generator)
    per_output, per_token = dims["weight_scales"] == "channel", dims["x_scales"] == "token"
    weight_scale = _scales((out_features,) if per_output else (1,), in_features**-0.5, generator)
    x = _sampled(num_tokens, in_features, dims["x_dtype"], generator)
    x_scale = _scales((num_tokens, 1) if per_token else (1,), 1.0, generator)
    arguments = {
        "x": x,
        "weight": weight,
        "x_scale": x_scale,
        "weight_scale": weight_scale,
        "bias": None,
        "out_dtype": dtype,
    }
    scaled = weight.float() * weight_scale.unsqueeze(-1)
    return sampled_case(arguments, dims, x.float() * x_scale, scaled, 3)


def fp8_block_linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of quantized hidden states and a weight without bias."""
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    block_rows, block_columns = int(dims["block_rows"]), int(dims["block_columns"])
    num_rows, num_columns = -(-out_features // block_rows), -(-in_features // block_columns)
    weight = _sampled(out_features, in_features, dims["weight_dtype"], generator)
    weight_scales = _scales((num_rows, num_columns), in_features**-0.5, generator)
    x = _sampled(num_tokens, in_features, dims["x_dtype"], generator)
    x_scales = _scales((num_tokens, num_columns), 1.0, generator)
    arguments = {
        "x": x,
        "weight": weight,
        "x_scales": x_scales,
        "weight_scales": weight_scales,
        "block_rows": block_rows,
        "block_columns": block_columns,
        "bias": None,
        "out_dtype": dtype,
    }
    # Each scale is bounded by the largest one of its tensor.
    largest = float(x_scales.max()) * float(weight_scales.max())
    return sampled_case(arguments, dims, x.float() * largest, weight.float(), 3)


def _scales(shape: tuple[int, ...], size: float, generator: torch.Generator) -> torch.Tensor:
    """Return scales that differ by up to four times."""
    return uniform(shape, torch.float32, generator, 0.5 * size, 2.0 * size)


def _spread(scales: torch.Tensor, block_columns: int, in_features: int) -> torch.Tensor:
    return scales.double().repeat_interleave(block_columns, -1)[..., :in_features]


def _sampled(rows: int, columns: int, dtype: object, generator: torch.Generator) -> torch.Tensor:
    return normal_numbers((rows, columns), getattr(torch, str(dtype)), generator)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
