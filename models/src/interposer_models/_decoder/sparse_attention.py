"""Sparse latent attention: each token attends only to tokens that an indexer selects.

``Indexer`` projects queries and keys, ``IndexerBackend`` caches the keys and selects the tokens
with the best scores, and ``SparseLatentBackend`` attends to the selected tokens.

Dimensions: T tokens, H hidden size, N heads, I heads of the indexer, D size of such a head, C
latent size, Q latent size of queries, R rotary size, X selected tokens, P pages, S page size.

Source: DeepSeek-V3.2-Exp technical report. The published program multiplies queries and keys by a
Hadamard matrix, which does not change the dot products, and rounds both to 8 bits. This module does
neither.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from interposer import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capability,
    KVCacheLayout,
    PluggableLayer,
    Site,
    Verdict,
)
from interposer_models._decoder.layers import LayerNorm
from interposer_ops.attention import indexer_scores, indexer_topk
from interposer_ops.caches import write_latent_cache
from interposer_ops.latent_attention import sparse_latent_attention
from interposer_ops.layers.attention import Attention, LatentBackend
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.wide_linear import WideLinear


class IndexerBackend(AttentionBackend):
    """Backend of an indexer: caches one key per token, and selects the best-scored tokens."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        # write_latent_cache takes a vector in two parts; for a key, any split will do.
        self._part = spec.head_size // 2
        second_part = spec.head_size - self._part
        sizes = {"page_size": spec.page_size, "latent_size": self._part, "rotary_size": second_part}
        self._write = site.bind(write_latent_cache, **sizes)
        self._score = site.bind(
            indexer_scores,
            num_heads=spec.num_heads,
            head_size=spec.head_size,
            page_size=spec.page_size,
            cache_dtype=str(spec.cache_dtype).removeprefix("torch."),
            scaled=False,
        )
        # Scores are float32 or wider, which the site of the selection op must state.
        score_dtype = torch.promote_types(spec.dtype, torch.float32)
        self._choose = replace(site, dtype=score_dtype).bind(indexer_topk, top_k=spec.top_k)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept requests of indexers with one key per token, in the model's dtype."""
        if spec.type != "indexer":
            return Verdict.refuse(f"serves indexers only, got {spec.type}")
        verdict = replace(spec, type="decoder").judge_plain_decoder()
        if not verdict:
            return verdict
        if spec.window_tokens is not None or spec.softcap is not None:
            return Verdict.refuse("has neither windows nor a softcap")
        if spec.num_kv_heads != 1 or spec.head_size < 2:
            key_sizes = f"{spec.num_kv_heads} kv heads of {spec.head_size}"
            return Verdict.refuse(
                f"needs one key per token, of two elements or more, got {key_sizes}"
            )
        if spec.top_k < 1:
            return Verdict.refuse(f"needs a top_k of at least 1, got {spec.top_k}")
        return Verdict.accept()

    def kv_layout(self) -> KVCacheLayout:
        """Return the layout of the indexer's key cache, ``[P, S, D]``."""
        page_shape = (self.spec.page_size, self.spec.head_size)
        return KVCacheLayout(page_shape, 0, (0, 1, 2), self.spec.cache_dtype)

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch unchanged: the indexer needs no further plan."""
        return batch

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: AttentionBatch
    ) -> Tensor:
        """Write the new keys to the cache, then select the tokens with the largest scores.

        Args:
            query: ``[T, I, D]``.
            key: ``[T, 1, D]``.
            value: ``[T, I]`` float32 or wider, the weights of the heads.
        Returns: ``[T, X]`` int32, positions in ascending order, padded with -1; X is ``top_k``, or
            0 if no sequence has more tokens than ``top_k``, which means all tokens.
        """
        self._write(key[:, 0, : self._part], key[:, 0, self._part :], cache, plan.slots)
        # Every token is selected; an empty result tells the attention to read the whole cache.
        if plan.max_seq_tokens <= self.spec.top_k:
            return query.new_empty(len(query), 0, dtype=torch.int32)
        lookup = plan.page_table, plan.query_starts, plan.seq_lens, plan.max_seq_tokens
        return self._choose(self._score(query, cache, value, *lookup), self.spec.top_k)


class SparsePlan(NamedTuple):
    """A batch, and the index of each token's sequence, ``[T]`` int64."""

    batch: AttentionBatch
    sequences: Tensor


class SparseLatentBackend(LatentBackend):
    """Backend that caches one latent vector per token, and attends to selected tokens."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._attend_to_selected = site.bind(
            sparse_latent_attention,
            num_heads=spec.num_heads,
            latent_size=spec.latent_size,
            rotary_size=spec.head_size - spec.latent_size,
            page_size=spec.page_size,
            top_k=spec.top_k,
            cache_dtype=str(spec.cache_dtype).removeprefix("torch."),
            scaled=False,
        )

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept requests for latent attention to the tokens that an indexer selects."""
        if not spec.sparse:
            return Verdict.refuse("serves sparse attention only")
        if spec.top_k < 1:
            return Verdict.refuse(f"needs a top_k of at least 1, got {spec.top_k}")
        return super().accepts(replace(spec, sparse=False), capability)

    def plan(self, batch: AttentionBatch) -> SparsePlan:
        """Compute the index of each token's sequence."""
        last = len(batch.seq_lens) - 1
        tokens = torch.arange(len(batch.slots), device=batch.slots.device)
        # Padding tokens of a captured graph come after all sequences; assign them to the last one.
        sequences = torch.searchsorted(batch.query_starts[1:], tokens, right=True).clamp(max=last)
        return SparsePlan(batch, sequences)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: SparsePlan
    ) -> Tensor:
        """Write the latent vectors to the cache, then attend to the selected tokens.

        Args:
            query: ``[T, N, C + R]``.
            key: ``[T, 1, C + R]``.
            value: ``[T, X]`` int32, positions within the sequence, padded with -1; X = 0 selects
                all tokens up to the query token.
        Returns: ``[T, N, C]``, dtype of ``query``.
        """
        if not value.shape[1]:
            return super().forward(query, key, value, cache, plan.batch)
        self.write(key, cache, plan.batch.slots)
        lookup = plan.batch.page_table, plan.sequences, value
        return self._attend_to_selected(
            query, cache, *lookup, self.spec.latent_size, self.spec.scale
        )


_EPS = 1e-6


class Indexer(PluggableLayer):
    """Indexer of sparse attention: projections, and the backend that caches its keys.

    Args:
        spec: an attention spec of type ``indexer``.
        rotary_size: R; the first R elements of queries and keys are rotated, by halves.
    """

    def __init__(
        self, site: Site, spec: AttentionSpec, hidden: int, query_latent: int, rotary_size: int
    ) -> None:
        super().__init__(site)
        heads, size = spec.num_heads, spec.head_size
        self.num_heads = heads
        self.wq_b = Linear(site.at("wq_b"), query_latent, heads * size)
        self.wk = Linear(site.at("wk"), hidden, size)
        self.k_norm = LayerNorm(site.at("k_norm"), size, _EPS)
        self.weights_proj = WideLinear(site.at("weights_proj"), hidden, heads)
        self.rotary = RotaryEmbedding(site.at("rotary"), size, rotary_size)
        self.attn = Attention(site.at("attn"), spec)
        self.scale = (heads * size) ** -0.5

    def forward(
        self, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, plan: object
    ) -> Tensor:
        """Select token positions ``[T, X]`` int32 within each token's sequence; -1 is padding.

        Args:
            x: ``[T, H]``.
            latent: ``[T, Q]``, the latent queries of the attention that uses the selection.
            cos, sin: ``[T, R / 2]``.
        """
        # The indexer shares the latent queries with attention, but has its own up-projection.
        query = self.wq_b(latent).unflatten(-1, (self.num_heads, -1))
        key = self.k_norm(self.wk(x)).unsqueeze(1)
        query, key = self.rotary(query, key, cos, sin)
        # The score is a weighted sum of ReLUs over heads: a positive scale can be applied to the
        # weights instead of to every dot product.
        weights = self.weights_proj(x) * self.scale
        return self.attn(query, key, weights, cache, plan)  # type: ignore[no-any-return]
