"""Attention over a paged cache through torch's SDPA, without waiting for the device.

The visible cached tokens are copied and padded to one length; torch has an attention kernel for
padded tensors on every device.

Dimensions: T tokens, N heads, K kv heads, G = N / K, D head size, B sequences, M pages of the
longest sequence, P pages, S page size, Q longest query, L tokens that a sequence may see.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Dim
from interposer_ops._declare import torch_kernel
from interposer_ops.attention._padded_attention import padded, unpadded

_NEVER = Dim(one_of=(False,))


@torch_kernel(
    "paged_attention",
    "sdpa",
    dims={"softcapped": _NEVER, "sinks": _NEVER},
)
def paged_attention_sdpa(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    max_query_tokens: int,
    scale: float,
    causal: bool,
    window_tokens: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    prefix_lens: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Compute ``paged_attention`` without softcap and sinks."""
    num_tokens, page_size = query.shape[0], key_cache.shape[1]
    # In a pure decode step no padding is needed, and each query sees all tokens that are read.
    single = max_query_tokens == 1 and num_tokens == page_table.shape[0]
    width = page_table.shape[1] * page_size
    if window_tokens is not None:
        width = min(width, max_query_tokens + window_tokens - 1)
    lengths = seq_lens[:, None]
    key_positions = (lengths - width).clamp(min=0) + torch.arange(width, device=query.device)
    visible = (key_positions < lengths)[:, None]  # [B, 1, L]
    # Positions after the end repeat the last token. Slots that were never written may hold NaN,
    # and a masked NaN times a weight of zero would still be NaN.
    read_positions = key_positions.minimum(lengths - 1).clamp(min=0)  # [B, L]
    slots = page_table.gather(1, read_positions // page_size) * page_size
    slots = slots + read_positions % page_size
    keys, values = _read(key_cache, slots), _read(value_cache, slots)

    wide, slopes = query.dtype, alibi_slopes
    # torch requires a mask in the dtype of the scores, and 16 bits cannot represent distances.
    is_exact = slopes is None and key_scale is None and value_scale is None
    if wide != keys.dtype or not is_exact:
        wide = torch.promote_types(query.dtype, torch.float32)
        keys, values = _multiplied(keys, key_scale, wide), _multiplied(values, value_scale, wide)
    rows = query[:, None] if single else padded(query, query_starts, max_query_tokens)
    firsts = lengths - (1 if single else query_starts.diff()[:, None])
    positions = firsts + torch.arange(max_query_tokens, device=query.device)  # [B, Q]
    if not single:
        distance = positions[:, :, None] - key_positions[:, None]
        if causal:
            # Same definition as ``masked_attention``.
            causally_visible = distance >= 0
            if prefix_lens is not None:
                last = torch.maximum(positions[:, :, None], key_positions[:, None])
                causally_visible = causally_visible | (last < prefix_lens[:, None, None])
            visible = visible & causally_visible
        if window_tokens is not None:
            visible = visible & (distance < window_tokens)

    # The heads of a GQA group become rows of one matmul, so that keys are not repeated.
    num_kv_heads = key_cache.shape[2]
    folded = rows.to(wide).unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    group, longest = folded.shape[2:4]
    mask = visible.expand(-1, longest, -1).repeat(1, group, 1)[:, None]  # [B, 1, G Q, L]
    if slopes is not None:
        distance = (positions[:, :, None] - key_positions[:, None]).abs()  # [B, Q, L]
        bias = slopes.to(wide).view(num_kv_heads, group, 1, 1) * -distance[:, None, None]
        mask = bias.flatten(2, 3).masked_fill(~mask, -torch.inf)  # [B, K, G Q, L]
    out = functional.scaled_dot_product_attention(
        folded.flatten(2, 3),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask,
        scale=scale,
    )
    heads = out.unflatten(2, (group, longest)).permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype)
    return heads[:, 0] if single else unpadded(heads, query_starts, num_tokens)


def _read(cache: Tensor, slots: Tensor) -> Tensor:
    """Gather the cache rows at ``slots`` ``[B, L]``, ``[B, L, K, D]``."""
    # index_select on a flat view is faster, but needs contiguous pages.
    if cache.is_contiguous():
        rows = cache.flatten(0, 1).index_select(0, slots.flatten())
        return rows.view(*slots.shape, *cache.shape[2:])
    page_size = cache.shape[1]
    return cache[slots // page_size, slots % page_size]


def _multiplied(cache_rows: Tensor, scale: Tensor | None, wide: torch.dtype) -> Tensor:
    """Convert ``[B, L, K, D]`` to dtype ``wide``, and multiply by a scale ``[1]`` or ``[K]``."""
    rows = cache_rows.to(wide)
    return rows if scale is None else rows * scale.to(wide)[:, None]
