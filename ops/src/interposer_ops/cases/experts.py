"""Cases of experts. T tokens, H hidden size, E experts, I intermediate size, K chosen experts.

What passes through the sums is bounded from a run in float64 with every term made positive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from interposer import Case
from interposer.cases import Axis, CaseSpace, Point, Strides, normal, peak
from interposer.op import Dims
from interposer_ops.cases.expert_permutation import random_experts
from interposer_ops.cases.numbers import normal_numbers

__all__ = [
    "fused_experts_cases",
    "fused_experts_fp8_cases",
    "fused_experts_fp8_sample",
    "fused_experts_sample",
    "fused_experts_w4a16_cases",
    "fused_experts_w4a16_sample",
]

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
# Sizes that groups and blocks divide.
_EVEN_SHAPES = {
    "many tokens": (9, 64, 32, 6, 2),
    "one token": (1, 64, 64, 4, 2),
    "all experts": (3, 32, 64, 3, 3),
    "no tokens": (0, 64, 32, 4, 2),
}
_ACTIVATIONS = {"": "silu", "gelu": "gelu", "swiglu_oai": "swiglu_oai"}
_RANKS = {"": "none", "other ranks": "some", "all on other ranks": "all"}
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
        **_routed(point, generator),
        "activation": point["activation"],
    }
    if point["bias"]:
        arguments["gate_up_bias"] = normal((num_experts, 2 * inner), dtype, generator)
        arguments["down_bias"] = normal((num_experts, hidden), dtype, generator)
    return _case(arguments, gate_up, down, {"biased": point["bias"]})


fused_experts_cases = CaseSpace(
    _experts,
    Axis("shape", _SHAPES),
    Axis("activation", _ACTIVATIONS),
    Axis("bias", {"": False, "biases": True}),
    Axis("ranks", _RANKS),
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
        **_routed(point, generator),
        "activation": point["activation"],
    }
    return _case(arguments, first, second, {"granularity": point["granularity"]})


fused_experts_fp8_cases = CaseSpace(
    _fp8,
    Axis("shape", _EVEN_SHAPES),
    Axis("granularity", {"": "tensor", "channels": "channel", "blocks": "block"}),
    Axis("format", {"": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}),
    Axis("activation", _ACTIVATIONS),
    Axis("ranks", _RANKS),
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
        **_routed(point, generator),
        "activation": point["activation"],
    }
    return _case(arguments, first, second, {"group_size": point["group"]})


fused_experts_w4a16_cases = CaseSpace(
    _w4a16,
    Axis("shape", {**_EVEN_SHAPES, "wide": (2, 128, 128, 3, 2)}),
    Axis("group", {"": 32, "groups of 16": 16, "groups of 8": 8}),
    Axis("activation", _ACTIVATIONS),
    Axis("ranks", _RANKS),
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
        **_evenly_routed(dims, num_tokens, generator),
    }
    return _sampled(arguments, first, second, dims, num_tokens)


def fused_experts_fp8_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of hidden states that spread evenly over experts in e4m3."""
    generator = torch.Generator().manual_seed(seed)
    weights, first, second = _fp8_weights(
        _shape(dims, num_tokens), str(dims["granularity"]), torch.float8_e4m3fn, generator
    )
    x = normal_numbers((num_tokens, int(dims["hidden_size"])), dtype, generator)
    arguments = {"x": x, **weights, **_evenly_routed(dims, num_tokens, generator)}
    return _sampled(arguments, first, second, dims, num_tokens)


def fused_experts_w4a16_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of hidden states that spread evenly over experts in int4."""
    generator = torch.Generator().manual_seed(seed)
    weights, first, second = _int4_weights(
        _shape(dims, num_tokens), int(dims["group_size"]), dtype, generator
    )
    x = normal_numbers((num_tokens, int(dims["hidden_size"])), dtype, generator)
    arguments = {"x": x, **weights, **_evenly_routed(dims, num_tokens, generator)}
    return _sampled(arguments, first, second, dims, num_tokens)


_Shape = tuple[int, int, int, int, int]
_Weights = tuple[dict[str, Any], torch.Tensor, torch.Tensor]


def _shape(dims: Dims, num_tokens: int) -> _Shape:
    names = ("hidden_size", "intermediate_size", "num_experts", "top_k")
    hidden, inner, num_experts, top_k = (int(dims[name]) for name in names)
    return num_tokens, hidden, inner, num_experts, top_k


def _routed(point: Point, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return weights, which don't add up to 1, and ids, of which some may be -1."""
    tokens, _, _, num_experts, top_k = point["shape"]
    ids = random_experts(tokens, num_experts, top_k, generator)
    share = {"none": 0.0, "some": 0.5, "all": 1.0}[point["ranks"]]
    elsewhere = torch.rand(tokens, top_k, generator=generator) < share
    weights = 0.1 + torch.rand(tokens, top_k, generator=generator)
    return {"weights": weights, "expert_ids": ids.masked_fill(elsewhere, -1)}


def _evenly_routed(dims: Dims, num_tokens: int, generator: torch.Generator) -> dict[str, Any]:
    num_experts, top_k = int(dims["num_experts"]), int(dims["top_k"])
    return {
        "weights": torch.randn(num_tokens, top_k, generator=generator).softmax(-1),
        "expert_ids": random_experts(num_tokens, num_experts, top_k, generator),
        "activation": str(dims["activation"]),
    }


def _fp8_weights(
    shape: _Shape, granularity: str, dtype: torch.dtype, generator: torch.Generator
) -> _Weights:
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
    matrices = (_spread(first.float(), first_scale), _spread(second.float(), second_scale))
    return arguments, *matrices


def _int4_weights(
    shape: _Shape, group_size: int, dtype: torch.dtype, generator: torch.Generator
) -> _Weights:
    """Return the arguments of 4-bit weights, and the matrices that they stand for, in float32."""

    def quantized(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        integers = torch.randint(16, (num_experts, rows, columns), generator=generator)
        # The deviation of sixteen even steps is 4.6.
        groups = (num_experts, rows, columns // group_size)
        scales = columns**-0.5 / 4.6 * (0.5 + torch.rand(groups, generator=generator))
        stored = scales.to(dtype)
        low, high = integers[..., ::2], integers[..., 1::2]
        packed = (low | high << 4).to(torch.uint8)
        return packed, stored, _spread(integers.float() - 8, stored.float())

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


def _spread(matrices: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return matrices times scales that are repeated to their size."""
    rows = matrices.shape[1] // scales.shape[1]
    columns = matrices.shape[2] // scales.shape[2]
    return matrices * scales.repeat_interleave(rows, 1).repeat_interleave(columns, 2)


def _case(arguments: dict[str, Any], gate_up: torch.Tensor, down: torch.Tensor, dims: Dims) -> Case:
    """Return the case with its bounds; experts that no token chose become NaN after that."""
    num_experts, hidden, inner = down.shape
    bounds = _bounds(arguments, gate_up, down)
    ids = arguments["expert_ids"]
    unread = [e for e in range(num_experts) if not (ids == e).any()]
    for name in ("gate_up", "down"):
        if arguments[name].dtype in (torch.float32, torch.float16, torch.bfloat16):
            arguments[name][unread] = torch.nan
    for name in ("gate_up_bias", "down_bias", "gate_up_scale", "down_scale"):
        if arguments.get(name) is not None:
            arguments[name][unread] = torch.nan
    stated = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_experts": num_experts,
        "top_k": ids.shape[1],
        "activation": arguments["activation"],
    }
    return Case("", arguments, {**stated, **dims}, **bounds)


def _sampled(
    arguments: dict[str, Any],
    gate_up: torch.Tensor,
    down: torch.Tensor,
    dims: Dims,
    num_tokens: int,
) -> Case:
    return Case(f"{num_tokens} tokens", arguments, dims, **_bounds(arguments, gate_up, down))


# The largest slope of silu, of gelu, and of g sigmoid(1.702 g), are 1.10, 1.13 and 1.10.
_SLOPE = 1.13
# How many Euclidean lengths a sum of rounding errors stays below, see ``_bounds``.
_LENGTHS = 12.0**0.5


def _bounds(
    arguments: Mapping[str, Any], gate_up: torch.Tensor, down: torch.Tensor
) -> dict[str, Any]:
    """Return how far float32 sums, and h and y in the dtype of x, may move the result.

    A gate that is off by d moves h by at most slope * |u| d, and an u by d moves it by |act(g)| d,
    with u + 1 for u in swiglu_oai. In float32, d is a share of the sums G and U of absolute terms,
    which H additions and a bias make up; the activation is off by few units of |g| |u|, for which
    eight more are counted. Of the terms |h| of the second sum, I + K additions, a bias and a
    weight are made. The magnitude is the mean of both, each times its additions.

    In between, only h is stored in the dtype of x: rounded once, it is off by at most half a step,
    u 2^floor(log2 |h|), and moves a result by at most u c, where c is 2^floor(log2 |h|) |w| |down|.
    All of a token's h move it by at most u times the sum of their c. Errors of rounding to nearest
    are independent and spread evenly over a step. Of such a one, E exp(s e) is at most
    exp(s^2 u^2 c^2 / 6), so that their sum exceeds u L times the Euclidean length of all c with a
    probability of at most 2 exp(-3 L^2 / 2): 3e-8 for ``_LENGTHS``. With the smaller of both
    bounds, u C, and the result's own half step u Y, u (Y + C) is allowed, as two roundings of half.

    Source: Higham and Mary, SIAM Journal on Scientific Computing 41(5), 2019 (independence).
    """
    x, ids = arguments["x"].double(), arguments["expert_ids"]
    weights = arguments["weights"].double() * (ids >= 0)
    facts = torch.finfo(arguments["x"].dtype)
    totals: dict[str, torch.Tensor] = defaultdict(lambda: x.new_zeros(len(x), down.shape[1]))
    for expert in ids[ids >= 0].unique().tolist():
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        first, second = gate_up[expert].double(), down[expert].double()
        sums, projected = x[tokens].abs() @ first.abs().T, x[tokens] @ first.T
        bias, down_bias = arguments.get("gate_up_bias"), arguments.get("down_bias")
        if bias is not None:
            sums, projected = sums + bias[expert].double().abs(), projected + bias[expert].double()
        gate, up = projected.chunk(2, -1)
        inner = _activated(gate, up, arguments["activation"])
        up_size, act_size = up.abs(), gate.abs()
        if arguments["activation"] == "swiglu_oai":
            up_size, act_size = up_size.clamp(max=7.0) + 1, act_size.clamp(max=7.0)
        gate_sum, up_sum = sums.chunk(2, -1)
        halves = _power_below(inner.abs(), facts)
        factor = weights[tokens, choices][:, None]
        added = {
            "first sum": (_SLOPE * gate_sum * up_size + act_size * up_sum) @ second.abs().T,
            "second sum": inner.abs() @ second.abs().T,
            "largest": halves @ second.abs().T,
            "squares": factor * (halves.square() @ second.square().T),
            "result": inner @ second.T,
        }
        if down_bias is not None:
            added["second sum"] += down_bias[expert].double().abs()
            added["result"] += down_bias[expert].double()
        for name, values in added.items():
            totals[name].index_add_(0, tokens, factor * values)
    moved = torch.minimum(totals["largest"], _LENGTHS * totals["squares"].sqrt())
    result = totals["result"].abs() + facts.eps / 2 * moved
    early, late = x.shape[1] + 9, down.shape[2] + ids.shape[1] + 2
    terms = early * totals["first sum"] + late * totals["second sum"]
    return {
        "reduction": early + late,
        "magnitude": peak(terms) / (early + late),
        "rounded": peak(_power_below(result, facts) + moved) / 2,
    }


def _power_below(sizes: torch.Tensor, facts: torch.finfo) -> torch.Tensor:
    """Return the largest powers of two not above ``sizes``, or where subnormal numbers end."""
    # A number is its mantissa, of at least a half, times a power of two.
    return torch.exp2(sizes.clamp(min=facts.smallest_normal).frexp().exponent.double()) / 2


def _activated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return (functional.gelu if activation == "gelu" else functional.silu)(gate) * up
