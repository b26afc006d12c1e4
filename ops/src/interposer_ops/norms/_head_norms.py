"""Normalisation of every head by itself. T tokens, N heads, K kv heads, D head size."""

from __future__ import annotations

import torch

from interposer import Tolerance
from interposer_ops._declare import standard_op

_CASES = "interposer_ops.norms._head_norms_cases"


# As rms_norm: the normalised row, its product and the result may each be rounded.
@standard_op(
    "qk_norm",
    cases=_CASES,
    constants=("query_weight", "key_weight"),
    tolerance=Tolerance(roundings=3),
    batched=("query", "key"),
)
def qk_norm(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each head of query and key to unit root mean square, then by its weight.

    y = x / sqrt(mean(x^2) + eps) * weight over the D elements of a head, accumulated in float32 or
    wider. Query and key may be slices of one projection.

    Args:
        query: ``[T, N, D]``, any float dtype.
        key: ``[T, K, D]``, dtype of ``query``.
        query_weight: ``[D]``, dtype of ``query``, the same for all heads.
        key_weight: ``[D]``, dtype of ``query``, the same for all heads.
    Returns: ``(query, key)`` normalised, dense, in their shapes and dtype.
    Dims: num_heads, num_kv_heads, head_size.
    Source: arXiv:2010.04245, with the root mean square as in Qwen 3 (arXiv:2505.09388).
    """
    return _normalise(query, query_weight, eps), _normalise(key, key_weight, eps)


# The norm is applied to the element before it is rounded; one more is allowed.
@standard_op("l2_norm", cases=_CASES, tolerance=Tolerance(roundings=2), batched=("x",))
def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of ``x`` to unit Euclidean length, as linear attention does its keys.

    y = x / sqrt(sum(x^2) + eps), accumulated in float32 or wider.

    Args:
        x: ``[..., D]``, any float dtype; rows may lie apart.
    Returns: shape and dtype of ``x``.
    Dims: head_size.
    Source: arXiv:2412.06464 (Gated DeltaNet).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit * weight).to(x.dtype).contiguous()
