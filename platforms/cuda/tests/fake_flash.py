"""Stand-ins for the functions of flash-attn-3 and flash-attn that interposer-cuda calls.

Signatures: hopper/flash_attn_interface.py and flash_attn/flash_attn_interface.py of
Dao-AILab/flash-attention.
"""

# mypy: ignore-errors
import torch
from fake_attention import attend_pages, same, whole


def of_version_3(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    whole(cache_seqlens, page_table, cu_seqlens_q)
    same(q, k_cache, v_cache)
    return attend_pages(
        q, cu_seqlens_q, page_table, cache_seqlens, (k_cache, v_cache), max_seqlen_q,
        softmax_scale, window_size, causal, softcap,
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    if block_table is None:
        # As if each sequence were one page.
        counts, starts = cu_seqlens_k.diff(), cu_seqlens_k.tolist()
        most = int(counts.max())
        k, v = (torch.stack([pad(t[a : a + most], most) for a in starts[:-1]]) for t in (k, v))
        block_table = torch.arange(len(counts), dtype=torch.int32)[:, None]
    else:
        assert k.shape[1] % 256 == 0, "pages"
    whole(cu_seqlens_q, cu_seqlens_k, block_table)
    lengths = cu_seqlens_k.diff()
    assert max_seqlen_k >= int(lengths.max())
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
    return of_version_3(
        q, k, v, cache_seqlens=lengths, page_table=block_table, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap,
    )  # fmt: skip


def pad(rows, count):
    return torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, count - len(rows)))


def of_version_2(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    assert k_cache.shape[1] % 256 == 0, "pages"
    count, tokens = q.shape[:2]
    starts = torch.arange(count + 1, dtype=torch.int32) * tokens
    out = of_version_3(
        q.flatten(0, 1), k_cache, v_cache, cache_seqlens=cache_seqlens, page_table=block_table,
        cu_seqlens_q=starts, max_seqlen_q=tokens, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap,
    )  # fmt: skip
    return out.unflatten(0, (count, tokens))
