"""Attention to latent vectors, made of the standard ops.

Dimensions: T tokens, N heads, C latent size, R rotary size, P pages, S page size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from interposer_ops.caches import write_latent_cache
from interposer_ops.latent_attention._latent_attention import latent_attention_decode


class LatentBackend(AttentionBackend):
    """Store one vector per token, and attend to these by the op ``latent_attention_decode``.

    Prompts, chunks of them and decode steps are one call, as the op takes queries of any length. A
    platform that has a function for some of the steps gives the others to this.
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
        places = plan.page_table, plan.query_starts, plan.seq_lens, plan.max_query_tokens
        return self._attend(query, cache, *places, self.spec.latent_size, self.spec.scale)

    def write(self, vectors: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Store vectors ``[T, 1, C + R]`` at ``slots`` ``[T]`` int64."""
        size = self.spec.latent_size
        self._write(vectors[:, 0, :size], vectors[:, 0, size:], cache, slots)
