"""Sparse attention to latent vectors, made of the standard ops: who names tokens, who attends.

Dimensions: T tokens, N heads, I heads of an indexer, D size of such a head, C latent size, R rotary
size, X named tokens, P pages, S page size.
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
    Site,
    Verdict,
)
from interposer_ops.attention import indexer_scores, indexer_topk
from interposer_ops.caches import write_latent_cache
from interposer_ops.latent_attention import sparse_latent_attention
from interposer_ops.layers.attention import LatentBackend


class IndexerBackend(AttentionBackend):
    """Keep one key per token, and name the tokens whose keys score best."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        # The op that stores a vector takes it in two parts, wherever it is parted.
        self._part = spec.head_size // 2
        rest = spec.head_size - self._part
        sizes = {"page_size": spec.page_size, "latent_size": self._part, "rotary_size": rest}
        self._write = site.bind(write_latent_cache, **sizes)
        self._score = site.bind(
            indexer_scores,
            num_heads=spec.num_heads,
            head_size=spec.head_size,
            page_size=spec.page_size,
            cache_dtype=str(spec.cache_dtype).removeprefix("torch."),
            scaled=False,
        )
        wide = torch.promote_types(spec.dtype, torch.float32)
        self._choose = replace(site, dtype=wide).bind(indexer_topk, top_k=spec.top_k)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept indexers with one key per token, of the model's dtype."""
        if spec.type != "indexer":
            return Verdict.refuse(f"serves indexers only, got {spec.type}")
        verdict = replace(spec, type="decoder").judge_plain_decoder()
        if not verdict:
            return verdict
        if spec.window_tokens is not None or spec.softcap is not None:
            return Verdict.refuse("has neither windows nor a softcap")
        if spec.num_kv_heads != 1 or spec.head_size < 2:
            got = f"{spec.num_kv_heads} kv heads of {spec.head_size}"
            return Verdict.refuse(f"needs one key per token, of two elements or more, got {got}")
        if spec.top_k < 1:
            return Verdict.refuse(f"needs a top_k of at least 1, got {spec.top_k}")
        return Verdict.accept()

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[P, S, D]``."""
        page_shape = (self.spec.page_size, self.spec.head_size)
        return KVCacheLayout(page_shape, 0, (0, 1, 2), self.spec.cache_dtype)

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch as it is."""
        return batch

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: AttentionBatch
    ) -> Tensor:
        """Write the keys, then name the tokens of the largest scores.

        Args:
            query: ``[T, I, D]``.
            key: ``[T, 1, D]``.
            value: ``[T, I]`` float32 or wider, the weights of the heads.
        Returns: ``[T, X]`` int32, positions in ascending order that end in -1; X is ``top_k``, or 0
            where no sequence has more tokens than that.
        """
        self._write(key[:, 0, : self._part], key[:, 0, self._part :], cache, plan.slots)
        if plan.max_seq_tokens <= self.spec.top_k:
            return query.new_empty(len(query), 0, dtype=torch.int32)
        places = plan.page_table, plan.query_starts, plan.seq_lens, plan.max_seq_tokens
        return self._choose(self._score(query, cache, value, *places), self.spec.top_k)


class SparsePlan(NamedTuple):
    """A batch, and of which of its sequences each token is, ``[T]`` int64."""

    batch: AttentionBatch
    sequences: Tensor


class SparseLatentBackend(LatentBackend):
    """Store one vector per token, and attend to those that an indexer named."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._attend_to_named = site.bind(
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
        """Accept what latent attention does, for tokens that an indexer names."""
        if not spec.sparse:
            return Verdict.refuse("serves sparse attention only")
        if spec.top_k < 1:
            return Verdict.refuse(f"needs a top_k of at least 1, got {spec.top_k}")
        return super().accepts(replace(spec, sparse=False), capability)

    def plan(self, batch: AttentionBatch) -> SparsePlan:
        """Return the batch with the sequence of each token."""
        last = len(batch.seq_lens) - 1
        tokens = torch.arange(len(batch.slots), device=batch.slots.device)
        # What pads a batch for a graph lies behind all sequences.
        sequences = torch.searchsorted(batch.query_starts[1:], tokens, right=True).clamp(max=last)
        return SparsePlan(batch, sequences)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: SparsePlan
    ) -> Tensor:
        """Write the vectors, then attend to those that are named.

        Args:
            query: ``[T, N, C + R]``.
            key: ``[T, 1, C + R]``.
            value: ``[T, X]`` int32, positions within the sequence, -1 names nothing; X of 0 names
                all, up to the token itself.
        Returns: ``[T, N, C]``, dtype of ``query``.
        """
        if not value.shape[1]:
            return super().forward(query, key, value, cache, plan.batch)
        self.write(key, cache, plan.batch.slots)
        places = plan.batch.page_table, plan.sequences, value
        return self._attend_to_named(query, cache, *places, self.spec.latent_size, self.spec.scale)
