"""Test cases of routing. T tokens, E experts, K chosen experts, G groups.

Ids are compared exactly, so every case must have one right answer. Logits of the clear cases are
multiples of 1/32, distinct within a row, so that rounding cannot reorder logits or softmax values;
with a bias, rows are redrawn until the compared values are clearly apart. Ties are exact: equal
logits if logits are compared, else sigmoids and softmaxes of zeros with biases that are multiples
of 1/8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops.sampling._logits_cases import clear_rows
from interposer_testing.cases import Axis, CaseSpace, Point

_STEP = 1 / 32
_MARGIN = 1e-5  # scores have rounding errors of about 1e-7

Draw = Callable[[int], Tensor]
"""Draws the given number of rows of logits."""

# T, E, K.
_SHAPES = {
    "many tokens": (33, 64, 6),
    "one token": (1, 32, 4),
    "eight experts": (9, 8, 2),
    "one choice": (17, 16, 1),
    "all chosen": (5, 8, 8),
    "odd number of experts": (7, 60, 4),
    "many experts": (4, 256, 8),
    "one expert": (3, 1, 1),
    "no tokens": (0, 16, 2),
}
# T, E, G, chosen groups, K.
_GROUPED = {
    "many tokens": (33, 64, 8, 3, 6),
    "one token": (1, 64, 8, 4, 8),
    "one group": (5, 16, 1, 1, 4),
    "all groups": (5, 32, 4, 4, 4),
    "one chosen group": (9, 32, 4, 1, 3),
    "whole groups": (5, 16, 4, 2, 8),
    "groups of two": (7, 16, 8, 3, 4),
    "odd groups": (6, 60, 5, 2, 5),
    "many experts": (4, 256, 8, 4, 8),
    "no tokens": (0, 16, 4, 2, 2),
}
_LOGITS = {"": _STEP, "far apart": 0.5, "tied": None, "ruled out": _STEP}
# Their exponentials overflow unless the largest logit is subtracted first.
_SOFTMAX_LOGITS = {**_LOGITS, "large": 1.0}
_LARGE_LOGIT = 100
_RENORMALIZE = {"": True, "not renormalised": False}
# Factors unlike 1: a kernel that forgets the scale, or applies the scale too early, fails.
_SCALES = {True: 2.5, False: 16.0}
_BIAS = {"": None, "bias": torch.float32, "bias like logits": "own"}


def _topk_softmax(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    tokens, num_experts, top_k = point["shape"]
    logits = _logits(point, num_experts, top_k, dtype, generator, tokens)
    arguments = {"logits": logits, "top_k": top_k, "renormalize": point["weights"]}
    return _softmax_case(arguments)


topk_softmax_cases = CaseSpace(
    _topk_softmax,
    Axis("shape", _SHAPES),
    Axis("logits", _SOFTMAX_LOGITS),
    Axis("weights", _RENORMALIZE),
    strided={"logits": "rows"},
    crossed={
        "shape": ("many tokens", "odd number of experts", "many experts"),
        "logits": ("", "tied"),
    },
    alone={"shape": ("no tokens", "one expert")},
)
"""Clear, widely spread, tied, large and -inf logits of few to many experts."""


def _topk_sigmoid(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    tokens, num_experts, top_k = point["shape"]
    bias = _bias(point, num_experts, dtype, generator)
    draw = partial(_logits, point, num_experts, top_k, dtype, generator)
    return _sigmoid_case(draw, tokens, bias, top_k, point["weights"], point["logits"] is None)


topk_sigmoid_cases = CaseSpace(
    _topk_sigmoid,
    Axis("shape", _SHAPES),
    Axis("logits", {"": _STEP, "tied": None}),
    Axis("bias", _BIAS),
    Axis("weights", _RENORMALIZE),
    strided={"logits": "rows", "bias": "offset"},
    varying={"bias": ("dtype",)},
    crossed={"shape": ("many tokens", "odd number of experts"), "weights": ("",)},
    alone={"shape": ("no tokens", "one expert")},
    valid=lambda point, dtype: point["bias"] != "own" or dtype != torch.float32,
)
"""Clear and tied choices, with and without a bias that changes the choice."""


def _grouped_topk(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    tokens, num_experts, *groups = point["shape"]
    bias = _bias(point, num_experts, dtype, generator)
    draw = partial(_logits, point, num_experts, groups[-1], dtype, generator)
    options = point["scoring"], point["weights"], point["logits"] is None
    return _grouped_case(draw, tokens, bias, groups, *options)


grouped_topk_cases = CaseSpace(
    _grouped_topk,
    Axis("shape", _GROUPED),
    Axis("logits", {"": _STEP, "tied": None}),
    Axis("bias", {"": None, "bias": torch.float32}),
    Axis("scoring", {"": "sigmoid", "softmax": "softmax"}),
    Axis("weights", _RENORMALIZE),
    strided={"logits": "rows", "bias": "offset"},
    crossed={"shape": ("many tokens", "odd groups"), "weights": ("",), "logits": ("",)},
    alone={"shape": ("no tokens",)},
    # A softmax of equal logits is exact only for a power of two.
    valid=lambda point, dtype: (
        not (point["logits"] is None and point["bias"] is not None and point["shape"][1] == 60)
    ),
)
"""Groups of many sizes; all or few groups are chosen, by one or by two best experts."""


def topk_softmax_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build T rows of clear logits."""
    draw, _ = _sampled(dtype, dims, seed)
    options = {"top_k": int(dims["top_k"]), "renormalize": _renormalizes(dims)}
    return _softmax_case({"logits": draw(num_tokens), **options}, f"{num_tokens} tokens")


def topk_sigmoid_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build T rows of clear logits, with a bias if the dims request one."""
    draw, bias = _sampled(dtype, dims, seed)
    top_k, label = int(dims["top_k"]), f"{num_tokens} tokens"
    return _sigmoid_case(draw, num_tokens, bias, top_k, _renormalizes(dims), False, label)


def grouped_topk_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build T rows of clear logits, with a bias if the dims request one."""
    draw, bias = _sampled(dtype, dims, seed)
    groups = [int(dims[name]) for name in ("num_groups", "top_groups", "top_k")]
    scoring, label = str(dims["scoring"]), f"{num_tokens} tokens"
    options = scoring, _renormalizes(dims), False
    return _grouped_case(draw, num_tokens, bias, groups, *options, label)


def _renormalizes(dims: Dims) -> bool:
    return bool(dims.get("renormalize", True))


def _sampled(dtype: torch.dtype, dims: Dims, seed: int) -> tuple[Draw, Tensor | None]:
    """Return a function that draws rows of clear logits, and the bias or None."""
    generator, num_experts = torch.Generator().manual_seed(seed), int(dims["num_experts"])
    bias = 0.1 * torch.randn(num_experts, generator=generator) if dims.get("biased") else None
    return lambda rows: _distinct(rows, num_experts, _STEP, generator).to(dtype), bias


def _logits(
    point: Point, num_experts: int, top_k: int, dtype: torch.dtype, generator: torch.Generator,
    tokens: int,
) -> Tensor:  # fmt: skip
    """Draw logits ``[T, E]`` of the kind that ``point`` names: clear, tied or partly masked."""
    step = point["logits"]
    if step is None:
        if point.values.get("bias") is not None:
            return torch.zeros(tokens, num_experts, dtype=dtype)
        drawn = torch.randint(-3, 3, (tokens, num_experts), generator=generator)
        return (drawn / 2).to(dtype)
    logits = _distinct(tokens, num_experts, step, generator)
    if point.labels["logits"] == "large":
        logits = logits + _LARGE_LOGIT
    if point.labels["logits"] == "ruled out":
        # Mask the lowest logits, half of the experts if K experts remain.
        rank = logits.argsort(-1, descending=True).argsort(-1)
        logits = logits.masked_fill(rank >= max(top_k, num_experts // 2), float("-inf"))
    return logits.to(dtype)


def _distinct(tokens: int, num_experts: int, step: float, generator: torch.Generator) -> Tensor:
    """Return rows of distinct multiples of ``step`` around 0, exact in every float dtype."""
    order = torch.rand(tokens, num_experts, generator=generator).argsort(-1)
    return (order - num_experts // 2) * step


def _bias(
    point: Point, num_experts: int, dtype: torch.dtype, generator: torch.Generator
) -> Tensor | None:
    """Return a routing bias that changes the chosen experts, or one that makes ties."""
    if point["bias"] is None:
        return None
    bias_dtype = dtype if point["bias"] == "own" else torch.float32
    if point["logits"] is None:
        return (torch.randint(-2, 3, (num_experts,), generator=generator) / 8).to(bias_dtype)
    return (0.1 * torch.randn(num_experts, generator=generator)).to(bias_dtype)


def _is_clear(compared: Tensor, top_k: int) -> Tensor:
    """Check for each row that the K + 1 largest values are at least the margin apart."""
    best = compared.topk(min(top_k + 1, compared.shape[-1]), -1).values
    return (best[:, :-1] - best[:, 1:] > _MARGIN).all(-1)


def _is_clear_grouped(
    logits: Tensor, bias: Tensor, num_groups: int, top_groups: int, top_k: int, scoring: str
) -> Tensor:
    """Check for each row that groups, and experts in the chosen groups, differ clearly."""
    wide = logits.double()
    scores = wide.sigmoid() if scoring == "sigmoid" else wide.softmax(-1)
    groups = (scores + bias).unflatten(-1, (num_groups, -1))
    strength = groups.topk(2, -1).values.sum(-1)
    lowest_chosen = strength.topk(top_groups, -1).values[:, -1:]
    values_in_chosen = groups.masked_fill((strength < lowest_chosen)[..., None], -9.0).flatten(-2)
    return _is_clear(strength, top_groups) & _is_clear(values_in_chosen, top_k)


# Error bounds. exp(x) has a relative error of |x| roundings, so results of at most 1 have an
# absolute error below one rounding of 1; then the sum over E follows, whose largest term is 1
# before the division. A sigmoid at |x| <= 8 has about ten roundings; sum and quotient double these
# and add K.


def _softmax_case(arguments: dict[str, Any], label: str = "") -> Case:
    num_experts = arguments["logits"].shape[1]
    options = {name: arguments[name] for name in ("top_k", "renormalize")}
    return Case(label, arguments, {"num_experts": num_experts, **options}, reduction=num_experts)


def _sigmoid_case(
    draw: Draw, num_tokens: int, bias: Tensor | None, top_k: int, renormalize: bool, is_tied: bool,
    label: str = "",
) -> Case:  # fmt: skip
    def is_clear(logits: Tensor) -> Tensor:
        if bias is None or is_tied:
            return torch.ones(len(logits), dtype=torch.bool)
        return _is_clear(logits.double().sigmoid() + bias, top_k)

    logits, scale = clear_rows(draw, is_clear, num_tokens), _SCALES[renormalize]
    weights = {"top_k": top_k, "renormalize": renormalize, "scale": scale}
    flags = {"biased": bias is not None, "renormalize": renormalize}
    dims: Dims = {"num_experts": logits.shape[1], "top_k": top_k, **flags}
    arguments = {"logits": logits, "bias": bias, **weights}
    return Case(label, arguments, dims, reduction=10 + top_k, magnitude=scale)


def _grouped_case(
    draw: Draw, num_tokens: int, bias: Tensor | None, groups: list[int], scoring: str,
    renormalize: bool, is_tied: bool, label: str = "",
) -> Case:  # fmt: skip
    num_groups, top_groups, top_k = groups
    sizes = {"num_groups": num_groups, "top_groups": top_groups, "top_k": top_k}
    options: dict[str, Any] = {**sizes, "scoring": scoring}

    def is_clear(logits: Tensor) -> Tensor:
        if bias is None or is_tied:
            return torch.ones(len(logits), dtype=torch.bool)
        return _is_clear_grouped(logits, bias, num_groups, top_groups, top_k, scoring)

    logits, scale = clear_rows(draw, is_clear, num_tokens), _SCALES[renormalize]
    weights = {"renormalize": renormalize, "scale": scale}
    arguments = {"logits": logits, "bias": bias, **options, **weights}
    flags = {"biased": bias is not None, "renormalize": renormalize}
    dims: Dims = {**options, "num_experts": logits.shape[1], **flags}
    summed = logits.shape[1] if scoring == "softmax" else 10 + top_k
    return Case(label, arguments, dims, reduction=summed, magnitude=scale)
