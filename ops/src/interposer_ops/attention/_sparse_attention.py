"""Indexer of sparse attention: scores all tokens and chooses the tokens that attention reads.

Dimensions: T tokens, I indexer heads, D size of an indexer head, B sequences, M pages of the
longest sequence, P pages, S page size, L tokens of the longest sequence.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops.attention._padded_attention import cached, positions_of

_op = partial(standard_op, cases="interposer_ops.attention._sparse_attention_cases")


@_op("indexer_scores", tolerance=Tolerance(roundings=1))
def indexer_scores(
    query: Tensor,
    keys: Tensor,
    weights: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    max_seq_tokens: int,
    key_scales: Tensor | None = None,
) -> Tensor:
    """Score every earlier token for each query token, with the heads of an indexer.

    score = sum over heads of weight * max(q k, 0) * key scale, in float32 or wider, for keys up to
    the token itself; -inf for later keys. The queries of sequence b have positions seq_lens[b] -
    query length .. seq_lens[b] - 1; their keys are already in the cache. Tokens of ``query`` and
    ``weights``, pages of the cache and rows of ``page_table`` may be strided in memory.

    Args:
        query: ``[T, I, D]``, any float dtype.
        keys: ``[P, S, D]``, dtype of ``query`` or a narrower one; all heads share one key.
        weights: ``[T, I]`` float32, of any sign.
        page_table, query_starts, seq_lens: as in ``paged_attention``.
        max_seq_tokens: L, at least the longest of ``seq_lens``.
        key_scales: ``[P, S]`` float32, at least 0: factor of each stored key; None: 1.
    Returns: ``[T, L]``, float32 or wider.
    Dims: num_heads (I), head_size, page_size, cache_dtype (the name of a torch dtype), scaled:
    there are ``key_scales``.
    Source: DeepSeek-V3.2-Exp technical report, lightning indexer.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    cached_keys = cached(keys, page_table, seq_lens, wide)  # [B, M S, D]
    if key_scales is not None:
        cached_keys = cached_keys * cached(key_scales, page_table, seq_lens, wide)[..., None]
    cached_keys = functional.pad(
        cached_keys, (0, 0, 0, max_seq_tokens - cached_keys.shape[1])
    )  # [B, L, D]
    sequence, offset = positions_of(query_starts, query.shape[0])
    raw_scores = torch.einsum("tid,tld->til", query.to(wide), cached_keys[sequence])
    scores = torch.einsum("til,ti->tl", raw_scores.relu(), weights.to(wide))
    positions = (seq_lens - query_starts.diff())[sequence] + offset  # [T]
    visible = torch.arange(max_seq_tokens, device=query.device) <= positions[:, None]
    return scores.masked_fill(~visible, -torch.inf)


@_op("indexer_topk", batched=("scores",))
def indexer_topk(scores: Tensor, top_k: int) -> Tensor:
    """Return the positions of the ``top_k`` largest scores of each row, in ascending order.

    Scores of -inf are never chosen; rows with fewer finite scores are filled up with -1 at the end.
    Among scores equal to the smallest chosen score, the choice is unspecified. Rows of ``scores``
    may be strided in memory.

    Args:
        scores: ``[T, L]``, any float dtype, no NaN.
        top_k: at least 1; may exceed L.
    Returns: ``[T, top_k]`` int32.
    Dims: top_k.
    Source: DeepSeek-V3.2-Exp technical report, fine-grained token selection.
    """
    length = scores.shape[1]
    values, indices = scores.topk(min(top_k, length), dim=-1)
    # ``length`` marks missing choices, so that sorting puts them last.
    chosen = torch.where(values > -torch.inf, indices, length).sort(-1).values
    chosen = functional.pad(chosen, (0, top_k - chosen.shape[1]), value=length)
    return torch.where(chosen < length, chosen, -1).int()
