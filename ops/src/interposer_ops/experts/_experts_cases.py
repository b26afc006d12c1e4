"""Test cases of experts. T tokens, H hidden size, E experts, I intermediate size, K chosen experts.

Experts that no token chose have weights or scales of NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.experts._expert_bounds_cases import (
    Shape,
    Weights,
    bounded_case,
    evenly_routed,
    routed,
    sampled_case,
    shape_of,
    spread,
)
from interposer_ops.quantizers._small_floats import decode_e2m1, decode_e8m0, unpack_nibbles
from interposer_testing.cases import Axis, CaseSpace, Point, Strides

# T, H, I, E, K.
_SHAPES = {
    "many tokens": (17, 32, 16, 8, 2),
    "one token": (1, 64, 48, 4, 2),
    "all experts": (3, 32, 16, 4, 4),
    "one choice": (5, 16, 32, 6, 1),
    "odd sizes": (5, 33, 17, 5, 3),
    "one expert": (4, 16, 16, 1, 1),
    "no tokens": (0, 16, 16, 4, 2),
}
# Sizes divisible by the sizes of groups and blocks.
_EVEN_SHAPES = {
    "many tokens": (9, 64, 32, 6, 2),
    "one token": (1, 64, 64, 4, 2),
    "all experts": (3, 32, 64, 3, 3),
    "no tokens": (0, 64, 32, 4, 2),
}
# Number of different exponents among the scales of an MXFP4 matrix.
_EXPONENTS = {"": 3, "equal": 1, "far apart": 12}
_ACTIVATION = Axis("activation", {"": "silu", "gelu": "gelu", "swiglu_oai": "swiglu_oai"})
_RANKS = Axis("ranks", {"": "none", "other ranks": "some", "all on other ranks": "all"})
_BIAS = Axis("bias", {"": False, "biases": True})
# With large inputs the clamps of swiglu_oai take effect, and a sigmoid is 0 or 1.
_SCALE = Axis("scale", {"": 1.0, "large": 8.0})
_SCALED: dict[str, Strides] = {
    "x": "rows",
    **dict.fromkeys(("gate_up_scale", "down_scale"), "offset"),
}
_ALONE = {"shape": ("no tokens",), "ranks": ("all on other ranks",)}
_ORDER = ("gate_up", "gate_up_scale", "gate_up_bias", "down", "down_scale", "down_bias")

Stored = tuple[Tensor, Tensor | None, Tensor]
Store = Callable[[int, int, int], Stored]
"""Draws weights ``[E, outputs, inputs]``; returns stored form, scales, and float32 values."""


def _is_plain_if_large(point: Point) -> bool:
    return not (point["scale"] != 1.0 and (point["bias"] or point["ranks"] != "none"))


def _experts(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    return _case(point, _weights(point["shape"], _plain(dtype, generator)), {}, dtype, generator)


fused_experts_cases = CaseSpace(
    _experts,
    Axis("shape", _SHAPES),
    _ACTIVATION,
    _BIAS,
    _RANKS,
    _SCALE,
    strided={"x": "rows", "weights": "rows", "expert_ids": "rows", "down": "offset"},
    special={"x": ("NaN", "negative zeros", "subnormals")},
    crossed={
        "shape": ("many tokens", "odd sizes"),
        "activation": ("",),
        "ranks": ("",),
        "scale": ("",),
    },
    alone=_ALONE,
    valid=lambda point, _: _is_plain_if_large(point),
)
"""Each activation with ordinary and large inputs, biases, and experts of other ranks."""


def _fp8(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    granularity = point["granularity"]
    weights = _weights(point["shape"], _floats8(granularity, point["format"], generator))
    weight, scale = weights[0]["gate_up"], weights[0]["gate_up_scale"]
    dims = {"granularity": granularity, "weight_dtype": str(weight.dtype).removeprefix("torch.")}
    if granularity == "block":
        dims["block_rows"] = weight.shape[1] // scale.shape[1]
        dims["block_columns"] = weight.shape[2] // scale.shape[2]
    return _case(point, weights, dims, dtype, generator)


fused_experts_fp8_cases = CaseSpace(
    _fp8,
    Axis("shape", _EVEN_SHAPES),
    Axis("granularity", {"": "tensor", "channels": "channel", "blocks": "block"}),
    Axis("format", {"": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}),
    _ACTIVATION,
    _RANKS,
    strided=_SCALED,
    crossed={"shape": ("many tokens",), "activation": ("",), "ranks": ("",)},
    alone=_ALONE,
    valid=lambda point, _: not (point["activation"] == "gelu" and point["ranks"] != "none"),
)
"""Each granularity of the scales in both formats."""


def _w4a16(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    weights = _weights(point["shape"], _integers4(point["group"], dtype, generator))
    return _case(point, weights, {"group_size": point["group"]}, dtype, generator)


fused_experts_w4a16_cases = CaseSpace(
    _w4a16,
    Axis("shape", {**_EVEN_SHAPES, "wide": (2, 128, 128, 3, 2)}),
    Axis("group", {"": 32, "groups of 16": 16, "groups of 8": 8}),
    _ACTIVATION,
    _RANKS,
    strided=_SCALED,
    crossed={"shape": ("many tokens", "wide"), "activation": ("",), "ranks": ("",)},
    alone=_ALONE,
)
"""Several group sizes, all sixteen values, different scales per group."""


def _mxfp4(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    weights = _weights(point["shape"], _floats4(point["exponents"], generator))
    return _case(point, weights, {}, dtype, generator)


fused_experts_mxfp4_cases = CaseSpace(
    _mxfp4,
    Axis("shape", {**_EVEN_SHAPES, "wide": (2, 160, 96, 3, 2)}),
    Axis("exponents", _EXPONENTS),
    _BIAS,
    _ACTIVATION,
    _RANKS,
    _SCALE,
    strided={"x": "rows", "gate_up_scale": "offset", "down": "offset"},
    crossed={
        "shape": ("many tokens",),
        "exponents": ("",),
        "bias": ("biases",),
        "activation": ("",),
        "ranks": ("",),
        "scale": ("",),
    },
    alone=_ALONE,
    valid=lambda point, _: (
        _is_plain_if_large(point)
        and not (point.labels["exponents"] and (point["scale"] != 1.0 or point["ranks"] != "none"))
    ),
)
"""All FP4 values; scales that are equal, similar or very different; biases."""


def fused_experts_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build T rows of hidden states, spread evenly over the experts."""
    generator = torch.Generator().manual_seed(seed)
    return _sample(_plain(dtype, generator), dtype, dims, num_tokens, generator)


def fused_experts_fp8_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build T rows of hidden states, spread evenly over experts in 8-bit floats."""
    generator = torch.Generator().manual_seed(seed)
    stored = getattr(torch, str(dims.get("weight_dtype", "float8_e4m3fn")))
    store = _floats8(str(dims["granularity"]), stored, generator)
    return _sample(store, dtype, dims, num_tokens, generator)


def fused_experts_w4a16_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build T rows of hidden states, spread evenly over experts in int4."""
    generator = torch.Generator().manual_seed(seed)
    store = _integers4(int(dims["group_size"]), dtype, generator)
    return _sample(store, dtype, dims, num_tokens, generator)


def fused_experts_mxfp4_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build T rows of hidden states, spread evenly over experts in MXFP4."""
    generator = torch.Generator().manual_seed(seed)
    return _sample(_floats4(_EXPONENTS[""], generator), dtype, dims, num_tokens, generator)


def _case(
    point: Point, weights: Weights, dims: Dims, dtype: torch.dtype, generator: torch.Generator
) -> Case:
    arguments, first, second = weights
    if "bias" in point.values:
        arguments = _biased(arguments, point["bias"], dtype, generator)
        dims = {**dims, "biased": point["bias"]}
    shape, deviation = (point["shape"][0], first.shape[2]), point.values.get("scale", 1.0)
    arguments = {
        "x": normal_numbers(shape, dtype, generator, deviation),
        **arguments,
        **routed(point, generator),
        "activation": point["activation"],
    }
    return bounded_case(arguments, first, second, dims)


def _sample(
    store: Store, dtype: torch.dtype, dims: Dims, num_tokens: int, generator: torch.Generator
) -> Case:
    arguments, first, second = _weights(shape_of(dims, num_tokens), store)
    if "biased" in dims:
        arguments = _biased(arguments, bool(dims["biased"]), dtype, generator)
    x = normal_numbers((num_tokens, first.shape[2]), dtype, generator)
    arguments = {"x": x, **arguments, **evenly_routed(dims, num_tokens, generator)}
    return sampled_case(arguments, first, second, dims, num_tokens)


def _biased(
    arguments: dict[str, Any], biased: bool, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    """Insert both biases, or None, into the arguments in the op's order."""
    for name in ("gate_up", "down"):
        shape = tuple(arguments[name].shape[:2])
        bias = normal_numbers(shape, dtype, generator) if biased else None
        arguments[f"{name}_bias"] = bias
    return {name: arguments[name] for name in _ORDER if name in arguments}


def _weights(shape: Shape, store: Store) -> Weights:
    """Return the weight arguments of both projections, and their float32 values."""
    _, hidden, inner, num_experts, _ = shape
    arguments, matrices = dict[str, Any](), []
    for name, outputs, inputs in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        arguments[name], scale, matrix = store(num_experts, outputs, inputs)
        if scale is not None:
            arguments[f"{name}_scale"] = scale
        matrices.append(matrix)
    return arguments, matrices[0], matrices[1]


def _plain(dtype: torch.dtype, generator: torch.Generator) -> Store:
    def store(num_experts: int, outputs: int, inputs: int) -> Stored:
        matrices = normal_numbers((num_experts, outputs, inputs), dtype, generator, inputs**-0.5)
        return matrices, None, matrices

    return store


def _floats8(granularity: str, dtype: torch.dtype, generator: torch.Generator) -> Store:
    def store(num_experts: int, outputs: int, inputs: int) -> Stored:
        scale_shape = {
            "tensor": (num_experts, 1, 1),
            "channel": (num_experts, outputs, 1),
            # Four blocks of rows and 16 inputs per block, so that blocks are not square.
            "block": (num_experts, 4, inputs // 16),
        }[granularity]
        scales = inputs**-0.5 * (0.5 + torch.rand(scale_shape, generator=generator))
        numbers = normal_numbers((num_experts, outputs, inputs), torch.float32, generator)
        stored = numbers.to(dtype)
        return stored, scales, spread(stored.float(), scales)

    return store


def _integers4(group_size: int, dtype: torch.dtype, generator: torch.Generator) -> Store:
    def store(num_experts: int, outputs: int, inputs: int) -> Stored:
        integers = torch.randint(16, (num_experts, outputs, inputs), generator=generator)
        # The standard deviation of sixteen equally likely integers is 4.6.
        groups = (num_experts, outputs, inputs // group_size)
        scales = inputs**-0.5 / 4.6 * (0.5 + torch.rand(groups, generator=generator))
        stored = scales.to(dtype)
        packed = (integers[..., ::2] | integers[..., 1::2] << 4).to(torch.uint8)
        return packed, stored, spread(integers.float() - 8, stored.float())

    return store


def _floats4(num_exponents: int, generator: torch.Generator) -> Store:
    def store(num_experts: int, outputs: int, inputs: int) -> Stored:
        shape = (num_experts, outputs, inputs // 2)
        packed = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        # FP4 values have a standard deviation of 2.9; sums then have one of about 1 with the
        # largest scales.
        largest = 127 - 2 - (inputs - 1).bit_length() // 2
        smallest = largest - num_exponents + 1
        blocks = (num_experts, outputs, inputs // 32)
        scales = torch.randint(
            smallest, largest + 1, blocks, dtype=torch.uint8, generator=generator
        )
        quantized = decode_e2m1(unpack_nibbles(packed), torch.float32)
        return packed, scales, spread(quantized, decode_e8m0(scales, torch.float32))

    return store
