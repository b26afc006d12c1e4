"""Stand-ins for the functions of flash_mla that interposer-cuda calls.

Signatures: flash_mla/flash_mla_interface.py of deepseek-ai/FlashMLA; ``older_metadata`` and
``older_attention`` are those of 2025, whose parameters are the first ones of today's.
"""

# mypy: ignore-errors
import torch
from fake_attention import attend_pages, same, whole

# Queries of each sequence, of every call.
CALLS = []


class FlashMLASchedMeta:
    config = tile_scheduler_metadata = None


def get_mla_metadata(*args, **kwargs):
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
    softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None,
    extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
):  # fmt: skip
    meta = tile_scheduler_metadata
    assert isinstance(meta, FlashMLASchedMeta)
    assert num_splits is None
    config = (*q.shape[:3], *k_cache.shape[1:3], causal, is_fp8_kvcache)
    if meta.config is None:
        meta.config, meta.tile_scheduler_metadata = config, scheduled(cache_seqlens)
    assert meta.config == config
    return attended(
        q, k_cache, block_table, cache_seqlens, head_dim_v, meta.tile_scheduler_metadata,
        softmax_scale, causal,
    )  # fmt: skip


def older_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
    assert num_heads_k == 1
    return scheduled(cache_seqlens), torch.tensor(num_heads_per_head_k)


def older_attention(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits,
    softmax_scale=None, causal=False,
):  # fmt: skip
    assert num_splits == q.shape[1] * q.shape[2]
    return attended(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,
        softmax_scale, causal,
    )  # fmt: skip


def scheduled(lengths):
    whole(lengths)
    return lengths.clone()


def attended(q, cache, block_table, lengths, head_dim_v, schedule, scale, causal):
    same(q, cache)
    whole(lengths)
    count, tokens, heads, width = q.shape
    assert count > 0
    assert (width, head_dim_v) == (576, 512)
    assert cache.shape[1:] == (64, 1, 576)
    assert block_table.dtype == torch.int32
    assert block_table.stride(-1) == 1
    assert len(block_table) == len(lengths) == count
    CALLS.append(tokens)
    starts = torch.arange(count + 1, dtype=torch.int32) * tokens
    # By the lengths of the schedule, so that one of another step is seen.
    out = attend_pages(
        q.flatten(0, 1), starts, block_table, schedule, (cache, cache[..., :512]), tokens, scale,
        (-1, -1), causal, 0.0,
    )  # fmt: skip
    return out.unflatten(0, (count, tokens)), torch.zeros(count, heads, tokens)


def flash_mla_sparse_fwd(
    q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, indexer_topk=0,
):  # fmt: skip
    same(q, kv)
    assert q.dtype == torch.bfloat16
    assert q.shape[1] in (64, 128)
    assert q.shape[2] == kv.shape[2] == 576
    assert kv.shape[1] == indices.shape[1] == 1
    assert indices.dtype == torch.int32
    assert indices.shape[2] % 128 == 0
    assert kv.stride(-1) == indices.stride(-1) == 1
    named = indices[:, 0]
    valid = (named >= 0) & (named < len(kv))
    keys = torch.where(valid[..., None], kv[torch.where(valid, named, 0).long(), 0].float(), 0.0)
    scores = torch.einsum("tnd,txd->tnx", q.float(), keys) * sm_scale
    scores = scores.masked_fill(~valid[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None])
    out = torch.einsum("tnx,txc->tnc", weights, keys[..., :d_v])
    return out.to(q.dtype), scores.amax(-1), lse
