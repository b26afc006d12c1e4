"""MoE routing of the compiled library. T tokens, E experts, K experts per token, G groups."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from interposer.errors import RequestError
from interposer_cpu._kernels.fusion import fused
from interposer_cpu._kernels.interface import FLOAT32, TYPES
from interposer_cpu.native import library

SCORINGS = {"softmax": 0, "sigmoid": 1}
"""Kinds of scores, as in the library."""

# Bits of the library's op: has a bias, scores are sigmoids, weights sum to 1.
_BIASED, _SIGMOIDS, _RENORMALISED = 1, 2, 4

Pair = tuple[torch.Tensor, torch.Tensor]


@fused("topk_softmax")
def topk_softmax(logits: torch.Tensor, top_k: int, renormalize: bool) -> Pair:
    """Compute the op ``topk_softmax``: top-k experts, weighted by softmax."""
    # Without groups: one group, which is selected.
    return _route(logits, None, 1, 1, top_k, 0, renormalize, 1.0)


def topk_sigmoid(
    logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, renormalize: bool, scale: float
) -> Pair:
    """Compute the op ``topk_sigmoid``: top-k experts by biased sigmoids."""
    return _route(logits, bias, 1, 1, top_k, 1, renormalize, scale)


@fused("grouped_topk")
def grouped_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_groups: int,
    top_groups: int,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
) -> Pair:
    """Compute the op ``grouped_topk``: the best groups of experts, then experts in these groups."""
    number = SCORINGS.get(scoring)
    if number is None:
        raise RequestError(f"No scoring {scoring!r} of experts; try 'softmax' or 'sigmoid'")
    return _route(logits, bias, num_groups, top_groups, top_k, number, renormalize, scale)


def prepare(bias: torch.Tensor | None) -> dict[str, Any]:
    """Convert the bias of ``topk_sigmoid`` and ``grouped_topk`` to contiguous float32."""
    return {"bias": None if bias is None else bias.to(FLOAT32).contiguous()}


def _route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    groups: int,
    top_groups: int,
    top_k: int,
    scoring: int,
    renormalize: bool,
    scale: float,
) -> Pair:
    """Choose the experts of each token: return weights and ids, ``[T, K]``."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count, width = logits.shape
    weights = torch.empty(count, top_k, dtype=FLOAT32)
    ids = torch.empty(count, top_k, dtype=torch.int32)
    if is_compiling():
        parts = (_SIGMOIDS if scoring else 0) | (_RENORMALISED if renormalize else 0)
        if bias is not None:
            parts |= _BIASED
        torch.ops.interposer_cpu.route_out(
            weights, ids, logits, weights if bias is None else bias, groups, top_groups, parts,
            scale,
        )  # fmt: skip
        return weights, ids
    library().route(
        logits.data_ptr(),
        TYPES[logits.dtype],
        scoring,
        renormalize,
        count,
        width,
        logits.stride(0),
        0 if bias is None else bias.data_ptr(),
        groups,
        top_groups,
        top_k,
        weights.data_ptr(),
        ids.data_ptr(),
        scale,
    )
    return weights, ids
