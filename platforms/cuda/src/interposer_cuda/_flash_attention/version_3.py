"""Decoder attention through FlashAttention 3, if the package is installed.

Pages are read in place. Call arguments are tested on the CPU against a stand-in function; no GPU
has run this module.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, M pages of the longest
sequence, P pages, S page size.
Source: ``flash_attn_with_kvcache`` in hopper/flash_attn_interface.py of Dao-AILab/flash-attention:
any page size, page tables and lengths in int32, a causal mask that is aligned to the last query
and key, a window of ``(left, right)`` tokens in addition to the query's own; its README: sm_90.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from interposer import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capability,
    KVCacheLayout,
    Site,
    Verdict,
)
from interposer_cuda._flash_attention.step import FlashStep, judge_flash
from interposer_cuda._providers import FLASH_ATTENTION_3
from interposer_ops.attention import window_ends
from interposer_ops.caches import CacheWriter


class FlashAttention3Backend(AttentionBackend):
    """Writes the cache with interposer's kernel, then attends in place with FlashAttention 3."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._write = CacheWriter(spec, site).store
        self._window = window_ends(spec)
        if not site.resolver.described:
            self._attend: Any = import_module("flash_attn_interface").flash_attn_with_kvcache

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept 16-bit decoders with a cache of the same dtype."""
        if spec.is_quantized:
            # With an 8-bit cache FlashAttention 3 also quantizes queries: a rounding that the spec
            # does not allow.
            return Verdict.refuse(
                f"would round queries of {spec.dtype} to the cache's {spec.cache_dtype} as well"
            )
        # Limits of the package come first: installing the package would not lift the limits.
        return judge_flash(spec) and FLASH_ATTENTION_3.judge()

    def kv_layout(self) -> KVCacheLayout:
        """Return the cache layout ``[2, P, S, K, D]``, keys first."""
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: AttentionBatch) -> FlashStep:
        """Convert the batch to int32 without synchronizing with the device."""
        return FlashStep.of(batch)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: FlashStep,
    ) -> torch.Tensor:
        """Write keys and values, then compute the attention; see ``AttentionBackend.forward``."""
        keys, values = cache.unbind(0)
        self._write(key, value, keys, values, plan.slots)
        if not len(query):
            return torch.empty_like(query)
        out: torch.Tensor = self._attend(
            query,
            keys,
            values,
            cache_seqlens=plan.seq_lens,
            page_table=plan.page_table,
            cu_seqlens_q=plan.query_starts,
            max_seqlen_q=plan.max_query_tokens,
            softmax_scale=self.spec.scale,
            causal=True,
            window_size=self._window,
            softcap=self.spec.softcap or 0.0,
        )
        return out
