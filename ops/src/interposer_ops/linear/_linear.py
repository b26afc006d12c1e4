"""Dense projections by one weight, or by one of several.

Dimensions: T tokens, I input features, O output features, E experts, N heads.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Tolerance
from interposer_ops._declare import standard_op

_op = partial(standard_op, cases="interposer_ops.linear._linear_cases")


@_op("linear", constants=("weight", "bias"), tolerance=Tolerance(roundings=2), batched=("x",))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Project ``x``: y = x weight^T + bias, accumulated in float32 or wider.

    Args:
        x: ``[..., I]``, any float dtype; rows may skip memory.
        weight: ``[O, I]``, dtype of ``x``.
        bias: ``[O]``, dtype of ``x``, or None.
    Returns: ``[..., O]``, dtype of ``x``.
    Dims: in_features, out_features, biased; tied, where rows of ``weight`` are looked up too.
    """
    # AMX multiplies what lies between rows of odd length by 0, and NaN is left of NaN.
    return functional.linear(x.contiguous(), weight, bias)


@_op("grouped_linear", constants=("weight",), tolerance=Tolerance(roundings=1))
def grouped_linear(x: Tensor, weight: Tensor, group_starts: Tensor) -> Tensor:
    """Project each row of ``x`` by the weight of its group, accumulated in float32 or wider.

    Rows of a group follow each other: those of group e are ``x[group_starts[e]:group_starts[e +
    1]]``, and y = x weight[e]^T. Rows behind the last group become zero.

    Args:
        x: ``[T, I]``, any float dtype; rows may skip memory.
        weight: ``[E, O, I]``, dtype of ``x``.
        group_starts: ``[E + 1]`` int64, ascending from 0 to at most T.
    Returns: ``[T, O]``, dtype of ``x``.
    Dims: in_features, out_features, num_experts.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = torch.arange(x.shape[0], device=x.device)
    result = torch.zeros((x.shape[0], weight.shape[1]), dtype=wide, device=x.device)
    for expert in range(weight.shape[0]):
        own = (rows >= group_starts[expert]) & (rows < group_starts[expert + 1])
        result = torch.where(own[:, None], x.to(wide) @ weight[expert].to(wide).T, result)
    return result.to(x.dtype)


@_op("batched_linear", constants=("weight",), tolerance=Tolerance(roundings=1))
def batched_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply the rows of every head by its own matrix, accumulated in float32 or wider.

    y[n] = x[n] weight[n]. With it multi-head latent attention turns queries into the latent space
    and its results back.

    Args:
        x: ``[N, T, I]``, any float dtype; heads and tokens may skip memory and stand in either
            order.
        weight: ``[N, I, O]``, dtype of ``x``.
    Returns: ``[N, T, O]``, contiguous, dtype of ``x``.
    Dims: num_heads, in_features, out_features.
    Source: arXiv:2405.04434 (absorbed projections).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    product = torch.bmm(x.to(wide), weight.to(wide))
    return product.to(x.dtype, memory_format=torch.contiguous_format)
