"""Attention with a softcap on scores and with sinks, both unsupported by sdpa.

Dimensions: B sequences, N heads, K kv heads, D size of a query and key, E size of a value, T query
tokens, U key tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the attention and the attention weights in float32 or wider.

    weights = softmax(cap(scale * q k^T) + mask) with cap(s) = softcap * tanh(s / softcap). A sink
    is one more score in the softmax, without a value.

    Args:
        mask: ``[B, 1, T, U]``, bool or added to scores. None: all keys, or with ``causal`` the keys
            up to each query.
    Returns: ``[B, T, N, E]``, dtype of ``query``; ``[B, N, T, U]``.
    """
    groups = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = key.repeat_interleave(groups, 1).to(wide)
    values = value.repeat_interleave(groups, 1).to(wide)
    scores = query.to(wide) @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(wide).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    out = (weights @ values).to(query.dtype)
    return out.transpose(1, 2).contiguous(), weights.to(query.dtype)
