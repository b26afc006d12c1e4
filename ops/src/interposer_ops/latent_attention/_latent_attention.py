"""Attention of several heads to one latent vector per token (MLA), with projections absorbed.

The backend is made of the ops.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, M pages of the longest
sequence, P pages, S page size, Q longest query, L = M S cached tokens, X attended tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from interposer import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capability,
    KVCacheLayout,
    Site,
    Tolerance,
    Verdict,
)
from interposer_ops._declare import standard_op
from interposer_ops.attention._padded_attention import cached, masked_attention, softmax_attention
from interposer_ops.caches import write_latent_cache

_op = partial(standard_op, cases="interposer_ops.latent_attention._latent_attention_cases")


@_op(
    "latent_attention_decode",
    tolerance=Tolerance(roundings=6),
    batched=("page_table", "seq_lens"),
    ragged={"query": "query_starts"},
)
def latent_attention_decode(
    query: Tensor,
    cache: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    max_query_tokens: int,
    latent_size: int,
    scale: float,
    cache_scale: Tensor | None = None,
) -> Tensor:
    """Attend causally from each sequence's newest tokens to its latent vectors in the cache.

    out = softmax(scale * q c^T + mask) c[:, :C], in float32 or wider: all heads share the cached
    vectors, whose first C elements are also the values. The query of sequence b stands at positions
    seq_lens[b] - query length .. seq_lens[b] - 1, its vectors are already in the cache. Tokens of
    ``query``, pages of the cache and rows of ``page_table`` may lie apart in memory.

    Args:
        query: ``[T, N, C + R]``, any float dtype.
        cache: ``[P, S, C + R]``, dtype of ``query`` or a narrower one.
        page_table, query_starts, seq_lens, max_query_tokens: as in ``paged_attention``.
        latent_size: C.
        scale: factor of the scores.
        cache_scale: ``[1]`` float32: what stored elements are multiplied by; None leaves them.
    Returns: ``[T, N, C]``, dtype of ``query``.
    Dims: num_heads, latent_size, rotary_size, page_size, cache_dtype (the name of a torch dtype),
        scaled: there is a ``cache_scale``.
    Source: arXiv:2405.04434.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = cached(cache, page_table, seq_lens, wide, cache_scale)[:, :, None]  # [B, L, 1, C + R]
    values = keys[..., :latent_size]
    out, _ = masked_attention(query, keys, values, query_starts, seq_lens, max_query_tokens, scale)
    return out


@_op("sparse_latent_attention", tolerance=Tolerance(roundings=6))
def sparse_latent_attention(
    query: Tensor,
    cache: Tensor,
    page_table: Tensor,
    sequences: Tensor,
    indices: Tensor,
    latent_size: int,
    scale: float,
    cache_scale: Tensor | None = None,
) -> Tensor:
    """Attend from each token to those latent vectors of its sequence that ``indices`` names.

    out = softmax(scale * q c^T) c[:, :C] over the named vectors, in float32 or wider. A token that
    names none gives zeros. Tokens of ``query`` and ``indices``, pages of the cache and rows of
    ``page_table`` may lie apart in memory.

    Args:
        query, cache, latent_size, scale, cache_scale: as in ``latent_attention_decode``.
        page_table: ``[B, M]`` int64.
        sequences: ``[T]`` int64; which sequence a token is of.
        indices: ``[T, X]`` int32: positions in the sequence, each at most once and in the cache;
            -1 names nothing and may stand anywhere.
    Returns: ``[T, N, C]``, dtype of ``query``.
    Dims: num_heads, latent_size, rotary_size, page_size, top_k, cache_dtype (the name of a torch
        dtype), scaled: there is a ``cache_scale``.
    Source: DeepSeek-V3.2-Exp technical report, DeepSeek sparse attention.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    page_size = cache.shape[1]
    named = indices >= 0  # [T, X]
    positions = indices.clamp(min=0).long()
    pages = page_table[sequences[:, None], positions // page_size]
    keys = cache[pages, positions % page_size].to(wide)  # [T, X, C + R]
    keys = torch.where(named[..., None], keys, 0)[:, :, None]
    if cache_scale is not None:
        keys = keys * cache_scale.to(wide)
    queries, values = query[:, None].to(wide), keys[..., :latent_size]
    out, _ = softmax_attention(queries, keys, values, named[:, None], scale)
    return out[:, 0].to(query.dtype)


class LatentBackend(AttentionBackend):
    """Store one vector per token, and attend to these by the op ``latent_attention_decode``.

    Prompts, chunks of them and decode steps are one call, as the op takes queries of any length.
    Where a platform has a function for some of the steps, a subclass plans these with ``slots`` and
    whatever its ``attend`` needs, and gives the others to this.
    """

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        sizes = {
            "latent_size": spec.latent_size,
            "rotary_size": spec.head_size - spec.latent_size,
            "page_size": spec.page_size,
        }
        stored = str(spec.cache_dtype).removeprefix("torch.")
        self._write = site.bind(write_latent_cache, **sizes)
        self._attend = site.bind(
            latent_attention_decode,
            **sizes,
            num_heads=spec.num_heads,
            cache_dtype=stored,
            scaled=False,
        )

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders whose heads share one vector per token, of the model's dtype."""
        if not spec.latent:
            return Verdict.refuse("serves latent attention only")
        verdict = replace(spec, latent=False).judge_plain_decoder()
        if not verdict:
            return verdict
        if spec.window_tokens is not None or spec.softcap is not None:
            return Verdict.refuse("has neither windows nor a softcap")
        if spec.num_kv_heads != 1:
            return Verdict.refuse(f"needs one vector per token, got {spec.num_kv_heads} kv heads")
        if not 0 < spec.latent_size <= spec.head_size:
            sizes = f"{spec.latent_size} of {spec.head_size}"
            return Verdict.refuse(f"needs values that are a part of the vector, got {sizes}")
        return Verdict.accept()

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[P, S, C + R]``."""
        page_shape = (self.spec.page_size, self.spec.head_size)
        return KVCacheLayout(page_shape, 0, (0, 1, 2), self.spec.cache_dtype)

    def plan(self, batch: AttentionBatch) -> Any:
        """Return the batch as it is."""
        return batch

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        """Write the vectors, then attend to them.

        Args:
            query: ``[T, N, C + R]``.
            key: ``[T, 1, C + R]``; its first C elements are ``value``, which is not read.
        Returns: ``[T, N, C]``, dtype of ``query``.
        """
        self.write(key, cache, plan.slots)
        return self.attend(query, cache, plan)

    def attend(self, query: Tensor, cache: Tensor, plan: Any) -> Tensor:
        """Return ``[T, N, C]`` of queries ``[T, N, C + R]`` to what is in the cache."""
        places = plan.page_table, plan.query_starts, plan.seq_lens, plan.max_query_tokens
        return self._attend(query, cache, *places, self.spec.latent_size, self.spec.scale)

    def write(self, vectors: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Store vectors ``[T, 1, C + R]`` at ``slots`` ``[T]`` int64."""
        size = self.spec.latent_size
        self._write(vectors[:, 0, :size], vectors[:, 0, size:], cache, slots)
