"""Cases of experts. T tokens, H hidden size, E experts, I intermediate size, K chosen experts."""

from __future__ import annotations

from typing import Any

import torch

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.experts._expert_bounds_cases import (
    ACTIVATIONS,
    EVEN_SHAPES,
    RANKS,
    Shape,
    Weights,
    bounded_case,
    evenly_routed,
    routed,
    sampled_case,
    shape_of,
    spread,
)
from interposer_testing.cases import Axis, CaseSpace, Point, Strides, normal

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
_STRIDED: dict[str, Strides] = {"x": "rows"}


def _experts(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    tokens, hidden, inner, num_experts, _ = point["shape"]
    gate_up = normal((num_experts, 2 * inner, hidden), dtype, generator, hidden**-0.5)
    down = normal((num_experts, hidden, inner), dtype, generator, inner**-0.5)
    arguments = {
        # Far from 0 the clamps of swiglu_oai act, and a sigmoid is 0 or 1.
        "x": normal((tokens, hidden), dtype, generator, point["scale"]),
        "gate_up": gate_up,
        "gate_up_bias": None,
        "down": down,
        "down_bias": None,
        **routed(point, generator),
        "activation": point["activation"],
    }
    if point["bias"]:
        arguments["gate_up_bias"] = normal((num_experts, 2 * inner), dtype, generator)
        arguments["down_bias"] = normal((num_experts, hidden), dtype, generator)
    return bounded_case(arguments, gate_up, down, {"biased": point["bias"]})


fused_experts_cases = CaseSpace(
    _experts,
    Axis("shape", _SHAPES),
    Axis("activation", ACTIVATIONS),
    Axis("bias", {"": False, "biases": True}),
    Axis("ranks", RANKS),
    Axis("scale", {"": 1.0, "large": 8.0}),
    strided={**_STRIDED, "weights": "rows", "expert_ids": "rows", "down": "offset"},
    special={"x": ("NaN", "negative zeros", "subnormals")},
    crossed={
        "shape": ("many tokens", "odd sizes"),
        "activation": ("",),
        "ranks": ("",),
        "scale": ("",),
    },
    alone={"shape": ("no tokens",), "ranks": ("all on other ranks",)},
    valid=lambda point, _: (
        not (point["scale"] != 1.0 and (point["bias"] or point["ranks"] != "none"))
    ),
)
"""Each activation at ordinary and large numbers, biases, and experts of other ranks.

Experts that no token chose are NaN.
"""


def _fp8(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    tokens, hidden, _, _, _ = point["shape"]
    arguments, first, second = _fp8_weights(
        point["shape"], point["granularity"], point["format"], generator
    )
    arguments = {
        "x": normal((tokens, hidden), dtype, generator),
        **arguments,
        **routed(point, generator),
        "activation": point["activation"],
    }
    return bounded_case(arguments, first, second, _fp8_dims(point["granularity"], arguments))


def _fp8_dims(granularity: str, arguments: dict[str, Any]) -> dict[str, Any]:
    weight, scale = arguments["gate_up"], arguments["gate_up_scale"]
    dims = {
        "granularity": granularity,
        "weight_dtype": str(weight.dtype).removeprefix("torch."),
    }
    if granularity != "block":
        return dims
    rows, columns = weight.shape[1] // scale.shape[1], weight.shape[2] // scale.shape[2]
    return {**dims, "block_rows": rows, "block_columns": columns}


fused_experts_fp8_cases = CaseSpace(
    _fp8,
    Axis("shape", EVEN_SHAPES),
    Axis("granularity", {"": "tensor", "channels": "channel", "blocks": "block"}),
    Axis("format", {"": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}),
    Axis("activation", ACTIVATIONS),
    Axis("ranks", RANKS),
    strided={**_STRIDED, "gate_up_scale": "offset", "down_scale": "offset"},
    crossed={"shape": ("many tokens",), "activation": ("",), "ranks": ("",)},
    alone={"shape": ("no tokens",), "ranks": ("all on other ranks",)},
    valid=lambda point, _: not (point["activation"] == "gelu" and point["ranks"] != "none"),
)
"""Each granularity of the scales, which differ by powers of two and more, in both formats."""


def _w4a16(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    tokens, hidden, _, _, _ = point["shape"]
    arguments, first, second = _int4_weights(point["shape"], point["group"], dtype, generator)
    arguments = {
        "x": normal((tokens, hidden), dtype, generator),
        **arguments,
        **routed(point, generator),
        "activation": point["activation"],
    }
    return bounded_case(arguments, first, second, {"group_size": point["group"]})


fused_experts_w4a16_cases = CaseSpace(
    _w4a16,
    Axis("shape", {**EVEN_SHAPES, "wide": (2, 128, 128, 3, 2)}),
    Axis("group", {"": 32, "groups of 16": 16, "groups of 8": 8}),
    Axis("activation", ACTIVATIONS),
    Axis("ranks", RANKS),
    strided={**_STRIDED, "gate_up_scale": "offset", "down_scale": "offset"},
    crossed={"shape": ("many tokens", "wide"), "activation": ("",), "ranks": ("",)},
    alone={"shape": ("no tokens",), "ranks": ("all on other ranks",)},
)
"""Groups of several sizes, all sixteen values, scales that differ from group to group."""


def fused_experts_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of hidden states that spread evenly over the experts."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = int(dims["hidden_size"]), int(dims["intermediate_size"])
    num_experts = int(dims["num_experts"])
    first = normal_numbers((num_experts, 2 * inner, hidden), dtype, generator, hidden**-0.5)
    second = normal_numbers((num_experts, hidden, inner), dtype, generator, inner**-0.5)
    biases: dict[str, torch.Tensor | None] = {"gate_up": None, "down": None}
    if dims["biased"]:
        biases["gate_up"] = normal_numbers((num_experts, 2 * inner), dtype, generator)
        biases["down"] = normal_numbers((num_experts, hidden), dtype, generator)
    arguments = {
        "x": normal_numbers((num_tokens, hidden), dtype, generator),
        "gate_up": first,
        "gate_up_bias": biases["gate_up"],
        "down": second,
        "down_bias": biases["down"],
        **evenly_routed(dims, num_tokens, generator),
    }
    return sampled_case(arguments, first, second, dims, num_tokens)


def fused_experts_fp8_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of hidden states that spread evenly over experts in e4m3."""
    generator = torch.Generator().manual_seed(seed)
    weights, first, second = _fp8_weights(
        shape_of(dims, num_tokens), str(dims["granularity"]), torch.float8_e4m3fn, generator
    )
    x = normal_numbers((num_tokens, int(dims["hidden_size"])), dtype, generator)
    arguments = {"x": x, **weights, **evenly_routed(dims, num_tokens, generator)}
    return sampled_case(arguments, first, second, dims, num_tokens)


def fused_experts_w4a16_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of hidden states that spread evenly over experts in int4."""
    generator = torch.Generator().manual_seed(seed)
    weights, first, second = _int4_weights(
        shape_of(dims, num_tokens), int(dims["group_size"]), dtype, generator
    )
    x = normal_numbers((num_tokens, int(dims["hidden_size"])), dtype, generator)
    arguments = {"x": x, **weights, **evenly_routed(dims, num_tokens, generator)}
    return sampled_case(arguments, first, second, dims, num_tokens)


def _fp8_weights(
    shape: Shape, granularity: str, dtype: torch.dtype, generator: torch.Generator
) -> Weights:
    """Return the arguments of 8-bit weights, and the matrices that they stand for, in float32."""

    def quantized(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale_shape = {
            "tensor": (num_experts, 1, 1),
            "channel": (num_experts, rows, 1),
            # A quarter of the rows, so that blocks are no squares.
            "block": (num_experts, 4, columns // 16),
        }[granularity]
        scales = columns**-0.5 * (0.5 + torch.rand(scale_shape, generator=generator))
        numbers = normal_numbers((num_experts, rows, columns), torch.float32, generator)
        return numbers.to(dtype), scales

    _, hidden, inner, num_experts, _ = shape
    first, first_scale = quantized(2 * inner, hidden)
    second, second_scale = quantized(hidden, inner)
    arguments = {
        "gate_up": first,
        "gate_up_scale": first_scale,
        "down": second,
        "down_scale": second_scale,
    }
    matrices = (spread(first.float(), first_scale), spread(second.float(), second_scale))
    return arguments, *matrices


def _int4_weights(
    shape: Shape, group_size: int, dtype: torch.dtype, generator: torch.Generator
) -> Weights:
    """Return the arguments of 4-bit weights, and the matrices that they stand for, in float32."""

    def quantized(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        integers = torch.randint(16, (num_experts, rows, columns), generator=generator)
        # The deviation of sixteen even steps is 4.6.
        groups = (num_experts, rows, columns // group_size)
        scales = columns**-0.5 / 4.6 * (0.5 + torch.rand(groups, generator=generator))
        stored = scales.to(dtype)
        low, high = integers[..., ::2], integers[..., 1::2]
        packed = (low | high << 4).to(torch.uint8)
        return packed, stored, spread(integers.float() - 8, stored.float())

    _, hidden, inner, num_experts, _ = shape
    first, first_scale, gate_up = quantized(2 * inner, hidden)
    second, second_scale, down = quantized(hidden, inner)
    arguments = {
        "gate_up": first,
        "gate_up_scale": first_scale,
        "down": second,
        "down_scale": second_scale,
    }
    return arguments, gate_up, down
