"""Permutation of tokens into the order of their experts, and back.

Dimensions: T tokens, K chosen experts, E experts, H hidden size, M rows.

A slot is one choice of one token: slot t K + k is the k-th expert of token t. The expert id -1
means an expert on another rank; such slots are skipped.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op

_op = partial(standard_op, cases="interposer_ops.experts._expert_permutation_cases")


@_op("moe_permute", tolerance=Tolerance(roundings=0))
def moe_permute(x: Tensor, expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy the token row of each (token, expert) slot, with the slots sorted by expert.

    The rows of an expert are in the order of the slots. After the rows of the last expert follow
    rows of zeros, one per skipped slot.

    Args:
        x: ``[T, H]``, any float dtype; rows may be strided.
        expert_ids: ``[T, K]`` int32 or int64, from -1 to E - 1; rows may be strided.
        num_experts: E.
    Returns: ``(rows, positions, group_starts)``: ``[T K, H]`` of the dtype of ``x``; ``[T, K]``
        int32, the row of each slot, -1 for skipped slots; ``[E + 1]`` int32, the first row of each
        expert, then the end of the last.
    Dims: hidden_size, num_experts, top_k, index_dtype: dtype of ``expert_ids``.
    """
    order, experts, counts = _grouped(expert_ids, num_experts)
    is_used = experts < num_experts
    rows = torch.where(is_used[:, None], x[order // expert_ids.shape[1]], 0)
    destinations = torch.arange(len(order), device=order.device)
    destinations = torch.where(is_used, destinations, -1)
    positions = (
        torch.empty_like(destinations).scatter(0, order, destinations).view(expert_ids.shape)
    )
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    return rows, positions.to(torch.int32), starts.to(torch.int32)


@_op("moe_unpermute", tolerance=Tolerance(roundings=1))
def moe_unpermute(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """Sum the expert results of each token, weighted by the routing weights.

    y[t] = sum_k weights[t, k] * rows[positions[t, k]], in float32 or wider, rounded once.

    Args:
        rows: ``[M, H]`` with M at least 1 unless all positions are -1, any float dtype; rows may be
            strided.
        positions: ``[T, K]`` int32 or int64, as returned by ``moe_permute``; -1 contributes
            nothing.
        weights: ``[T, K]`` float32, or dtype of ``rows``.
    Returns: ``[T, H]``, dtype of ``rows``.
    Dims: hidden_size, top_k, weights_dtype.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    # An extra row of zeros, which skipped slots read.
    padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    row_indices = torch.where(positions >= 0, positions, rows.shape[0])
    factors = torch.where(positions >= 0, weights.to(wide), 0)
    return (padded[row_indices].to(wide) * factors[..., None]).sum(1).to(rows.dtype)


def _grouped(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slots sorted by expert, the expert of each slot, and the slots per expert.

    Skipped slots come last, with expert E.
    """
    flat = expert_ids.flatten().to(torch.int64)
    keys = torch.where(flat >= 0, flat, num_experts)
    experts, order = keys.sort(stable=True)
    # Not bincount, which waits for the device on GPUs.
    counts = (keys[:, None] == torch.arange(num_experts, device=keys.device)).sum(0)
    return order, experts, counts
