"""Normalisation of each head, or of each group of elements of a row.

T tokens, N heads, K kv heads, D head size, H hidden size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops._widening import widened
from interposer_ops.norms._norms import unit_rows

_op = partial(standard_op, cases="interposer_ops.norms._head_norms_cases")
# The normalised row, its product and the result may each be rounded.
_WEIGHTED = Tolerance(roundings=3)


@_op(
    "qk_norm",
    constants=("query_weight", "key_weight"),
    tolerance=_WEIGHTED,
    batched=("query", "key"),
)
def qk_norm(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
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
    normalised = unit_rows(query, eps) * query_weight, unit_rows(key, eps) * key_weight
    return normalised[0].to(query.dtype).contiguous(), normalised[1].to(key.dtype).contiguous()


# One rounding of the result, and one more for the error of the computation before it.
@_op("l2_norm", tolerance=Tolerance(roundings=2), batched=("x",), differentiable=("x",))
def l2_norm(x: Tensor, eps: float) -> Tensor:
    """Scale each row of ``x`` to unit Euclidean length, as for the keys of linear attention.

    y = x / sqrt(sum(x^2) + eps), accumulated in float32 or wider.

    Args:
        x: ``[..., D]``, any float dtype; rows need not be adjacent.
    Returns: shape and dtype of ``x``.
    Dims: head_size.
    Source: arXiv:2412.06464 (Gated DeltaNet).
    """
    wide = widened(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


@_op("gated_rms_norm", constants=("weight",), tolerance=_WEIGHTED, batched=("x", "gate"))
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, norm_before_gate: bool
) -> Tensor:
    """Scale each group of a row to unit root mean square and gate it by SiLU.

    With n(v) = v / sqrt(mean(v^2) + eps) over each group of ``group_size`` elements:
    y = n(x) * weight * silu(gate) if ``norm_before_gate``, else n(x * silu(gate)) * weight, in
    float32 or wider.

    Args:
        x: ``[..., H]``, any float dtype; rows need not be adjacent, nor those of ``gate``.
        gate: shape and dtype of ``x``.
        weight: ``[H]``, dtype of ``x``.
        group_size: a divisor of H; equal to H for one group per row.
    Returns: shape and dtype of ``x``.
    Dims: hidden_size, group_size, norm_before_gate.
    Source: arXiv:2405.21060 (Mamba-2); arXiv:2412.06464 (Gated DeltaNet) for ``norm_before_gate``.
    """
    gate_factor = functional.silu(widened(gate))
    rows = widened(x) if norm_before_gate else widened(x) * gate_factor
    groups = rows.unflatten(-1, (rows.shape[-1] // group_size, group_size))
    y = unit_rows(groups, eps).flatten(-2) * weight
    return (y * gate_factor if norm_before_gate else y).to(x.dtype)
