"""Shared parts of the test cases of experts: random routing, and error bounds.

T tokens, H hidden size, E experts, I intermediate size, K chosen experts. Bounds are computed in
float64 with all terms positive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Case, Dims
from interposer_ops.experts._expert_permutation_cases import random_experts
from interposer_testing.cases import Point, peak

Shape = tuple[int, int, int, int, int]
Weights = tuple[dict[str, Any], Tensor, Tensor]


def shape_of(dims: Dims, num_tokens: int) -> Shape:
    """Return the sizes (T, H, I, E, K) that ``dims`` state."""
    names = ("hidden_size", "intermediate_size", "num_experts", "top_k")
    hidden, inner, num_experts, top_k = (int(dims[name]) for name in names)
    return num_tokens, hidden, inner, num_experts, top_k


def routed(point: Point, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random weights that do not sum to 1, and expert ids, some of them -1."""
    tokens, _, _, num_experts, top_k = point["shape"]
    ids = random_experts(tokens, num_experts, top_k, generator)
    remote_fraction = {"none": 0.0, "some": 0.5, "all": 1.0}[point["ranks"]]
    is_remote = torch.rand(tokens, top_k, generator=generator) < remote_fraction
    weights = 0.1 + torch.rand(tokens, top_k, generator=generator)
    return {"weights": weights, "expert_ids": ids.masked_fill(is_remote, -1)}


def evenly_routed(dims: Dims, num_tokens: int, generator: torch.Generator) -> dict[str, Any]:
    """Return weights that sum to 1, ids spread evenly over all experts, and the activation."""
    num_experts, top_k = int(dims["num_experts"]), int(dims["top_k"])
    return {
        "weights": torch.randn(num_tokens, top_k, generator=generator).softmax(-1),
        "expert_ids": random_experts(num_tokens, num_experts, top_k, generator),
        "activation": str(dims["activation"]),
    }


def spread(matrices: Tensor, scales: Tensor) -> Tensor:
    """Multiply matrices by block scales, which are repeated to the matrices' size."""
    rows = matrices.shape[1] // scales.shape[1]
    columns = matrices.shape[2] // scales.shape[2]
    return matrices * scales.repeat_interleave(rows, 1).repeat_interleave(columns, 2)


def bounded_case(arguments: dict[str, Any], gate_up: Tensor, down: Tensor, dims: Dims) -> Case:
    """Build a case with error bounds, and set the experts that no token chose to NaN."""
    num_experts, hidden, inner = down.shape
    bounds = _bounds(arguments, gate_up, down)
    ids = arguments["expert_ids"]
    # A kernel that reads the weights of an unchosen expert produces NaN and fails.
    unread = [e for e in range(num_experts) if not (ids == e).any()]
    for name in ("gate_up", "down"):
        if arguments[name].dtype in (torch.float32, torch.float16, torch.bfloat16):
            arguments[name][unread] = torch.nan
    for name in ("gate_up_bias", "down_bias", "gate_up_scale", "down_scale"):
        if arguments.get(name) is not None:
            # 255 is the NaN of exponents in bytes.
            is_exponent = arguments[name].dtype == torch.uint8
            arguments[name][unread] = 255 if is_exponent else torch.nan
    expert_dims = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_experts": num_experts,
        "top_k": ids.shape[1],
        "activation": arguments["activation"],
    }
    return Case("", arguments, {**expert_dims, **dims}, **bounds)


def sampled_case(
    arguments: dict[str, Any], gate_up: Tensor, down: Tensor, dims: Dims, num_tokens: int
) -> Case:
    """Build a tuning sample with error bounds."""
    return Case(f"{num_tokens} tokens", arguments, dims, **_bounds(arguments, gate_up, down))


# The largest slope of silu, of gelu, and of g sigmoid(1.702 g), are 1.10, 1.13 and 1.10.
_SLOPE = 1.13
# A sum of rounding errors stays below this many Euclidean lengths, see ``_bounds``.
_LENGTHS = 12.0**0.5


def _bounds(arguments: Mapping[str, Any], gate_up: Tensor, down: Tensor) -> dict[str, Any]:
    """Bound the error of the result from float32 sums and from rounding h and y to x's dtype.

    An error d of a gate changes h by at most slope * |u| d, an error d of u changes h by |act(g)|
    d, with u + 1 for u in swiglu_oai. In float32, d is a fraction of the sums G and U of absolute
    terms, after H additions and a bias; eight more units account for the activation, which errs by
    a few units of |g| |u|. The second sum has terms |h|, with I + K additions, a bias and a weight.
    The magnitude is the mean of both, weighted by the numbers of additions.

    In between, only h is stored in the dtype of x: one rounding has an error of at most half a
    step, u 2^floor(log2 |h|), and changes a result by at most u c, with c = 2^floor(log2 |h|) |w|
    |down|. All h of a token together change the result by at most u times the sum of the c. Errors
    of rounding to nearest are independent and uniform over a step. For one such error e, E exp(s e)
    is at most exp(s^2 u^2 c^2 / 6), so their sum exceeds u L times the Euclidean length of all c
    with a probability of at most 2 exp(-3 L^2 / 2): 3e-8 for ``_LENGTHS``. With the smaller of both
    bounds, u C, and the result's own half step u Y, an error of u (Y + C) is allowed, as two
    roundings of half a step.

    Source: Higham and Mary, SIAM Journal on Scientific Computing 41(5), 2019 (independence).
    """
    x, ids = arguments["x"].double(), arguments["expert_ids"]
    weights = arguments["weights"].double() * (ids >= 0)
    facts = torch.finfo(arguments["x"].dtype)
    totals: dict[str, Tensor] = defaultdict(lambda: x.new_zeros(len(x), down.shape[1]))
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


def _power_below(sizes: Tensor, facts: torch.finfo) -> Tensor:
    """Return the largest powers of two not above ``sizes``, at least the smallest normal number."""
    # A number is its mantissa, of at least a half, times a power of two.
    return torch.exp2(sizes.clamp(min=facts.smallest_normal).frexp().exponent.double()) / 2


def _activated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return (functional.gelu if activation == "gelu" else functional.silu)(gate) * up
