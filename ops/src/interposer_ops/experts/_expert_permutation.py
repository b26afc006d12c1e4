"""Tokens put in the order of their experts, and back.

Dimensions: T tokens, K chosen experts, E experts, H hidden size.

A slot is one choice of one token: slot t K + k is the k-th expert of token t. The expert id -1
stands for one that another rank holds: its slot is left out.
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
    """Copy the row of every slot's token into the order of the experts.

    The rows of an expert stand in the order of their slots. Behind those of the last expert come
    as many rows of zeros as slots were left out.

    Args:
        x: ``[T, H]``, any float dtype; rows may lie apart.
        expert_ids: ``[T, K]`` int32 or int64, from -1 to E - 1; rows may lie apart.
        num_experts: E.
    Returns: ``(rows, positions, group_starts)``: ``[T K, H]`` of the dtype of ``x``; ``[T, K]``
        int32, the row of each slot, -1 of one that is left out; ``[E + 1]`` int32, where the rows
        of each expert begin, and the end of all.
    Dims: hidden_size, num_experts, top_k, index_dtype: of ``expert_ids``.
    """
    order, experts, counts = _grouped(expert_ids, num_experts)
    taken = experts < num_experts
    rows = torch.where(taken[:, None], x[order // expert_ids.shape[1]], 0)
    places = torch.arange(len(order), device=order.device)
    places = torch.where(taken, places, -1)
    positions = torch.empty_like(places).scatter(0, order, places).view(expert_ids.shape)
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    return rows, positions.to(torch.int32), starts.to(torch.int32)


@_op("moe_unpermute", tolerance=Tolerance(roundings=1))
def moe_unpermute(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """Add up the rows of each token's slots, each times its weight.

    y[t] = sum_k weights[t, k] * rows[positions[t, k]], in float32 or wider, and rounded once.

    Args:
        rows: ``[M, H]`` with M at least 1 where a position is not -1, any float dtype; rows may
            lie apart.
        positions: ``[T, K]`` int32 or int64, of ``moe_permute``; -1 contributes nothing.
        weights: ``[T, K]`` float32, or dtype of ``rows``.
    Returns: ``[T, H]``, dtype of ``rows``.
    Dims: hidden_size, top_k, weights_dtype.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    # A row of zeros behind the others, for the slots that have none.
    padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    places = torch.where(positions >= 0, positions, rows.shape[0])
    factors = torch.where(positions >= 0, weights.to(wide), 0)
    return (padded[places].to(wide) * factors[..., None]).sum(1).to(rows.dtype)


def _grouped(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slots in order of their experts, these experts, and each expert's slots.

    Slots that are left out come last, with E for an expert.
    """
    flat = expert_ids.flatten().to(torch.int64)
    keys = torch.where(flat >= 0, flat, num_experts)
    experts, order = keys.sort(stable=True)
    counts = (keys[:, None] == torch.arange(num_experts, device=keys.device)).sum(0)
    return order, experts, counts
