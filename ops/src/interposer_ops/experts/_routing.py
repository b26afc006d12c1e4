"""Routing: choice of experts for each token. T tokens, E experts, K chosen experts, G groups."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Tolerance
from interposer.errors import RequestError
from interposer_ops._declare import standard_op

_op = partial(
    standard_op,
    cases="interposer_ops.experts._routing_cases",
    tolerance=Tolerance(roundings=4),
    batched=("logits",),
)

_MIN_SUM = 1e-20  # avoids a division by zero if all weights are zero


@_op("topk_softmax", differentiable=("logits",))
def topk_softmax(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose the experts with the largest logits, weighted by the softmax over all experts.

    The logits themselves are compared, so that rounding cannot change the choice; ties go to the
    lowest id. Computed in float32 or wider.

    Args:
        logits: ``[T, E]``, any float dtype; rows may be strided.
        top_k: K, from 1 to E.
        renormalize: divide the weights of a token by their sum.
    Returns: ``(weights, ids)``, both ``[T, K]`` and in descending order of the logits: float32
        (float64 for float64 ``logits``) and int32.
    Dims: num_experts, top_k, renormalize.
    Source: arXiv:2401.04088 (with ``renormalize``), arXiv:2101.03961.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ids = _best(wide, top_k)
    return _weights(wide.softmax(-1), ids, renormalize, 1.0), ids.to(torch.int32)


@_op("topk_sigmoid", constants=("bias",))
def topk_sigmoid(
    logits: Tensor, bias: Tensor | None, top_k: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose the experts with the largest biased sigmoids, weighted by the sigmoids without bias.

    The load-balancing bias decides which experts are chosen and in which order; the weights do not
    include the bias. Without a bias the logits themselves are compared. Ties go to the lowest id.
    Computed in float32 or wider.

    Args:
        logits, top_k: as in ``topk_softmax``.
        bias: ``[E]`` float32, or dtype of ``logits``.
        renormalize: divide the weights of a token by their sum plus 1e-20.
        scale: factor of the weights, applied last.
    Returns: ``(weights, ids)``, both ``[T, K]``: float32 (float64 for float64 ``logits``) and
        int32, in descending order of the compared values.
    Dims: num_experts, top_k, biased, renormalize.
    Source: arXiv:2412.19437, section 2.1.2.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.sigmoid()
    ids = _best(wide if bias is None else scores + bias, top_k)
    return _weights(scores, ids, renormalize, scale), ids.to(torch.int32)


@_op("grouped_topk", constants=("bias",))
def grouped_topk(
    logits: Tensor,
    bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Choose the best groups of experts first, then the best experts within these groups.

    Experts are compared by score plus bias, or by their logits if there is no bias. The value of a
    group is the value of the best expert in the group or, with a bias, the sum of the two best.
    Ties go to the lowest group and the lowest id. Weights are the scores without the bias.

    Args:
        logits, bias, renormalize, scale: as in ``topk_sigmoid``.
        num_groups: G, a divisor of E; with a bias at most E / 2.
        top_groups: number of groups to choose, from 1 to G.
        top_k: K, at most the number of experts in the chosen groups.
        scoring: ``"softmax"`` over all experts, or ``"sigmoid"``.
    Returns: those of ``topk_sigmoid``.
    Dims: num_experts, num_groups, top_groups, top_k, scoring, biased, renormalize.
    Raises: RequestError: ``scoring`` is neither of the two.
    Source: arXiv:2405.04434, section 2.2 (the best expert); arXiv:2412.19437, section 2.1.2, and
        the modeling code of DeepSeek-V3 (the two best).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = _scores(wide, scoring)
    compared = wide if bias is None else scores + bias
    groups = compared.unflatten(-1, (num_groups, -1))
    strength = groups.amax(-1) if bias is None else groups.topk(2, -1).values.sum(-1)
    chosen = torch.zeros_like(strength, dtype=torch.bool)
    chosen = chosen.scatter(-1, _best(strength, top_groups), True)
    ids = _best(groups.masked_fill(~chosen[..., None], float("-inf")).flatten(-2), top_k)
    return _weights(scores, ids, renormalize, scale), ids.to(torch.int32)


def _scores(logits: Tensor, scoring: str) -> Tensor:
    match scoring:
        case "softmax":
            return logits.softmax(-1)
        case "sigmoid":
            return logits.sigmoid()
    raise RequestError(f"No scoring {scoring!r} of experts; try 'softmax' or 'sigmoid'")


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values of each row; ties go to the lowest index."""
    # A stable sort rather than topk, whose order among equal values is unspecified.
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].contiguous()


def _weights(scores: Tensor, ids: Tensor, renormalize: bool, scale: float) -> Tensor:
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _MIN_SUM)
    return weights * scale
