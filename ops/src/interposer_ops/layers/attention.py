"""Attention over the paged cache, and the backend made of the standard ops."""

from __future__ import annotations

import torch

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
from interposer_ops.attention import paged_attention
from interposer_ops.kv_cache import reshape_and_cache

__all__ = ["Attention", "PagedBackend"]

# The dims of ``reshape_and_cache``.
_WRITTEN = ("num_heads", "num_kv_heads", "head_size", "page_size", "windowed", "softcapped")


class Attention(PluggableLayer):
    """Write a step's keys and values to this layer's cache and attend to the sequence."""

    layer_id = "attention"

    def __init__(self, site: Site, spec: AttentionSpec) -> None:
        super().__init__(site)
        self.spec = spec
        self.backend = site.resolver.attention(spec, site)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: object,
    ) -> torch.Tensor:
        """Return ``[T, N, D]``; ``plan`` is the backend's for this step."""
        return self.backend.forward(query, key, value, cache, plan)


class PagedBackend(AttentionBackend):
    """Decoder attention from the ops ``reshape_and_cache`` and ``paged_attention``."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        facts = spec.dims()
        self.write = site.bind(reshape_and_cache, **{name: facts[name] for name in _WRITTEN})
        self.attend = site.bind(paged_attention, **facts)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders with a plain cache."""
        return spec.judge_plain_decoder()

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[2, P, S, K, D]``, keys first."""
        spec = self.spec
        page_shape = (2, spec.page_size, spec.num_kv_heads, spec.head_size)
        return KVCacheLayout(page_shape, 1, (0, 1, 2, 3, 4), spec.cache_dtype)

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch as it is."""
        return batch

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: AttentionBatch,
    ) -> torch.Tensor:
        """Write, then attend; see ``AttentionBackend.forward``."""
        keys, values = cache.unbind(0)
        self.write(key, value, keys, values, plan.slots)
        return self.attend(
            query,
            keys,
            values,
            plan.page_table,
            plan.query_starts,
            plan.seq_lens,
            plan.max_query_tokens,
            self.spec.scale,
            True,
            self.spec.window_tokens,
            self.spec.softcap,
        )
