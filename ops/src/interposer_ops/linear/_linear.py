"""Dense linear layers: one weight, one weight per group of rows, or one weight per head.

T tokens, I input features, O output features, E experts, N heads.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Tolerance
from interposer_ops._declare import standard_op

_op = partial(standard_op, cases="interposer_ops.linear._linear_cases")


@_op(
    "linear",
    constants=("weight", "bias"),
    tolerance=Tolerance(roundings=2),
    batched=("x",),
    differentiable=("x", "weight", "bias"),
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Project ``x``: y = x weight^T + bias, accumulated in float32 or wider.

    Args:
        x: ``[..., I]``, any float dtype; rows need not be adjacent.
        weight: ``[O, I]``, dtype of ``x``.
        bias: ``[O]``, dtype of ``x``, or None.
    Returns: ``[..., O]``, dtype of ``x``.
    Dims: in_features, out_features, biased; tied, if ``weight`` is also an embedding table.
    """
    # AMX multiplies the memory between rows of odd length by 0, and a NaN there yields NaN.
    return functional.linear(x.contiguous(), weight, bias)


@_op("grouped_linear", constants=("weight",), tolerance=Tolerance(roundings=1))
def grouped_linear(x: Tensor, weight: Tensor, group_starts: Tensor) -> Tensor:
    """Project each row of ``x`` by the weight of its group, accumulated in float32 or wider.

    The rows of group e are ``x[group_starts[e]:group_starts[e + 1]]``, with y = x weight[e]^T. Rows
    after the last group become zero.

    Args:
        x: ``[T, I]``, any float dtype; rows need not be adjacent.
        weight: ``[E, O, I]``, dtype of ``x``.
        group_starts: ``[E + 1]`` int64, ascending from 0 to at most T.
    Returns: ``[T, O]``, dtype of ``x``.
    Dims: in_features, out_features, num_experts.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = torch.arange(x.shape[0], device=x.device)
    result = torch.zeros((x.shape[0], weight.shape[1]), dtype=wide, device=x.device)
    for expert in range(weight.shape[0]):
        is_in_group = (rows >= group_starts[expert]) & (rows < group_starts[expert + 1])
        result = torch.where(is_in_group[:, None], x.to(wide) @ weight[expert].to(wide).T, result)
    return result.to(x.dtype)


@_op(
    "batched_linear",
    constants=("weight",),
    tolerance=Tolerance(roundings=1),
    differentiable=("x", "weight"),
)
def batched_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply the rows of each head by the head's matrix, accumulated in float32 or wider.

    y[n] = x[n] weight[n]. Multi-head latent attention projects queries into the latent space and
    attention outputs back by this op.

    Args:
        x: ``[N, T, I]``, any float dtype; heads and tokens may have any strides, in either order.
        weight: ``[N, I, O]``, dtype of ``x``.
    Returns: ``[N, T, O]``, contiguous, dtype of ``x``.
    Dims: num_heads, in_features, out_features.
    Source: arXiv:2405.04434 (absorbed projections).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    wide_result = torch.bmm(x.to(wide), weight.to(wide))
    return wide_result.to(x.dtype, memory_format=torch.contiguous_format)
