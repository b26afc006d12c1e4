"""Dense projections and table lookup.

Dimensions: T tokens, I input features, O output features, E experts, N heads, V rows of a table,
H hidden size.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from interposer import Tolerance
from interposer_ops._declare import standard_op

_LINEAR_CASES = "interposer_ops.linear._linear_cases"
_GROUPED_LINEAR_CASES = "interposer_ops.linear._grouped_linear_cases"
_EMBEDDING_CASES = "interposer_ops.embedding._embedding_cases"


@standard_op(
    "linear",
    cases=_LINEAR_CASES,
    constants=("weight", "bias"),
    tolerance=Tolerance(roundings=2),
    batched=("x",),
)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Project ``x``: y = x weight^T + bias, accumulated in float32 or wider.

    Args:
        x: ``[..., I]``, any float dtype; rows may skip memory.
        weight: ``[O, I]``, dtype of ``x``.
        bias: ``[O]``, dtype of ``x``, or None.
    Returns: ``[..., O]``, dtype of ``x``.
    Dims: in_features, out_features; tied, where rows of ``weight`` are looked up too.
    """
    return functional.linear(x, weight, bias)


@standard_op(
    "grouped_linear",
    cases=_GROUPED_LINEAR_CASES,
    constants=("weight",),
    tolerance=Tolerance(roundings=1),
)
def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, group_starts: torch.Tensor
) -> torch.Tensor:
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


@standard_op(
    "batched_linear",
    cases=_GROUPED_LINEAR_CASES,
    constants=("weight",),
    tolerance=Tolerance(roundings=1),
)
def batched_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
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


@standard_op(
    "embedding",
    cases=_EMBEDDING_CASES,
    batch_invariant=True,
    constants=("weight",),
    tolerance=Tolerance(roundings=0),
    batched=("token_ids",),
)
def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``weight`` that ``token_ids`` name.

    Args:
        token_ids: ``[T]``, int64, each in ``[0, V)``; tokens may skip memory.
        weight: ``[V, H]``, any dtype.
    Returns: ``[T, H]``, dtype of ``weight``.
    Dims: vocab_size, hidden_size; tied: a head multiplies by the same ``weight``, so that a kernel
        may prepare one copy for both.
    """
    return functional.embedding(token_ids, weight)


@standard_op(
    "vocab_parallel_embedding",
    cases=_EMBEDDING_CASES,
    batch_invariant=True,
    constants=("weight",),
    tolerance=Tolerance(roundings=0),
    batched=("token_ids",),
)
def vocab_parallel_embedding(
    token_ids: torch.Tensor, weight: torch.Tensor, first_row: int
) -> torch.Tensor:
    """Return the rows that ``token_ids`` name in a part of a table, zeros for those elsewhere.

    The sum over all parts is what ``embedding`` returns for the whole table.

    Args:
        token_ids: ``[T]``, int64, each at least 0; tokens may skip memory.
        weight: ``[V, H]``, any dtype: rows ``first_row`` to ``first_row + V - 1`` of the table.
        first_row: at least 0.
    Returns: ``[T, H]``, dtype of ``weight``.
    Dims: vocab_size: V, hidden_size.
    """
    rows = token_ids - first_row
    is_here = (rows >= 0) & (rows < weight.shape[0])
    found = functional.embedding(rows.clamp(0, weight.shape[0] - 1), weight)
    return torch.where(is_here[:, None], found, torch.zeros_like(found))
