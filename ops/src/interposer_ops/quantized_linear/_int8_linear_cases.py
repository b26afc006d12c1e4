"""Cases of projections of int8. I input features, O output features."""

from __future__ import annotations

import torch

from interposer import Case, Dims
from interposer_ops.quantized_linear._quantized_linear_cases import (
    bias_of,
    linear_case,
    sampled_case,
)
from interposer_testing.cases import Axis, CaseSpace, Point, peak, uniform

# Shape of x without its last dimension, I, O.
_SHAPES = {
    "many rows": ((33,), 256, 96),
    "one row": ((1,), 512, 48),
    "odd sizes": ((5,), 127, 65),
    "one element": ((1,), 1, 1),
    "a row and a column after 128": ((129,), 64, 129),
    "no rows": ((0,), 64, 32),
    "three dimensions": ((2, 3), 64, 48),
    "long sum": ((3,), 4096, 16),
}
# Rows of -128 and 127 make every sum of two products exceed 16 bits; -128 has no negative.
_CODES = {"": "", "ends of int8": "ends"}
# 74 is the standard deviation of int8 that are all equally likely.
_DEVIATION = 74.0


def _int8_linear(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    rows, in_features, out_features = point["shape"]
    x = _drawn((*rows, in_features), point["codes"], generator)
    weight = _drawn((out_features, in_features), point["codes"], generator)
    per_token, per_output = point["x scales"], point["weight scales"]
    of_tokens = (*rows, 1) if per_token else (1,)
    x_scale = _scales(of_tokens, generator)
    weight_scale = _scales((out_features,) if per_output else (1,), generator) * in_features**-0.5
    zero_point = None
    if point["zero point"]:
        zero_point = torch.randint(-128, 128, of_tokens, generator=generator, dtype=torch.int32)
    bias = bias_of(out_features, dtype, generator, point["bias"])
    arguments = {
        "x": x,
        "weight": weight,
        "x_scale": x_scale,
        "weight_scale": weight_scale,
        "x_zero_point": zero_point,
        "bias": bias,
        "out_dtype": dtype,
    }
    dims = _dims(in_features, out_features, per_token, per_output, zero_point is not None)
    dequantized = weight.double() * weight_scale.double().unsqueeze(-1)
    shifted = x.double() - (0 if zero_point is None else zero_point.double())
    # The sum is exact: only its conversion and the scalings round. A kernel may subtract the
    # zero point's share only after it has scaled the sum.
    case = linear_case(
        arguments,
        dims,
        shifted * x_scale.double(),
        dequantized,
        bias,
        3,
        _shares(zero_point, x_scale, dequantized),
    )
    return Case(
        case.label,
        case.arguments,
        case.dims,
        reduction=6,
        magnitude=case.magnitude,
        rounded=case.rounded,
    )


int8_linear_cases = CaseSpace(
    _int8_linear,
    Axis("shape", _SHAPES),
    Axis("codes", _CODES),
    Axis("x scales", {"": False, "token": True}),
    Axis("weight scales", {"": False, "channel": True}),
    Axis("zero point", {"": False, "zero point": True}),
    Axis("bias", {"": False, "bias": True}),
    strided={
        "x": "rows",
        "weight": "offset",
        "x_scale": "offset",
        "weight_scale": "offset",
        "x_zero_point": "offset",
        "bias": "offset",
    },
    crossed={
        "shape": ("many rows", "odd sizes", "three dimensions"),
        "codes": ("",),
        "x scales": ("token",),
        "weight scales": ("channel",),
        "bias": ("bias",),
    },
    alone={"shape": ("no rows",)},
    # One element has one scale either way; where codes are at their ends, scales matter no more.
    valid=lambda point, _: (
        not (
            (point.labels["shape"] == "one element" or point["codes"])
            and (point["x scales"] or point["weight scales"])
        )
    ),
)
"""Granularities of both scales in all combinations, zero points, and the ends of int8."""


def int8_linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of quantized hidden states and a weight without bias."""
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    per_output, per_token = dims["weight_scales"] == "channel", dims["x_scales"] == "token"
    weight = _drawn((out_features, in_features), "", generator)
    weight_scale = _scales((out_features,) if per_output else (1,), generator) * in_features**-0.5
    x = _drawn((num_tokens, in_features), "", generator)
    of_tokens = (num_tokens, 1) if per_token else (1,)
    x_scale = _scales(of_tokens, generator)
    zero_point = None
    if dims["asymmetric"]:
        zero_point = torch.randint(-128, 128, of_tokens, generator=generator, dtype=torch.int32)
    arguments = {
        "x": x,
        "weight": weight,
        "x_scale": x_scale,
        "weight_scale": weight_scale,
        "x_zero_point": zero_point,
        "bias": None,
        "out_dtype": dtype,
    }
    dequantized = weight.float() * weight_scale.unsqueeze(-1)
    shifted = x.float() - (0 if zero_point is None else zero_point.float())
    beside = _shares(zero_point, x_scale, dequantized)
    return sampled_case(arguments, dims, shifted * x_scale, dequantized, 3, beside)


def _shares(
    zero_point: torch.Tensor | None, x_scale: torch.Tensor, dequantized: torch.Tensor
) -> float:
    """Return a bound of what a zero point adds to a sum, 0 without one."""
    if zero_point is None:
        return 0.0
    return peak(zero_point.double() * x_scale.double()) * peak(dequantized.sum(-1))


def _drawn(shape: tuple[int, ...], codes: str, generator: torch.Generator) -> torch.Tensor:
    """Return int8, all equally likely or, in rows, one end of the range and the other."""
    if codes == "ends":
        ends = torch.tensor([-128, 127], dtype=torch.int8)
        return (
            ends[torch.randint(0, 2, (*shape[:-1], 1), generator=generator)].expand(shape).clone()
        )
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def _scales(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return scales that differ by up to four times and bring int8 to around one."""
    return uniform(shape, torch.float32, generator, 0.5 / _DEVIATION, 2.0 / _DEVIATION)


def _dims(
    in_features: int, out_features: int, per_token: bool, per_output: bool, asymmetric: bool
) -> Dims:
    return {
        "in_features": in_features,
        "out_features": out_features,
        "x_scales": "token" if per_token else "tensor",
        "weight_scales": "channel" if per_output else "tensor",
        "asymmetric": asymmetric,
    }
