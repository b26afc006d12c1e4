"""Decoder attention through FlashAttention 3, where it is installed.

Its function is given pages where they lie. Arguments are tested on the processor against a
function of the same meaning; on a GPU it was not run.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, M pages of the longest
sequence, P pages, S page size.
Source: ``flash_attn_with_kvcache`` in hopper/flash_attn_interface.py of Dao-AILab/flash-attention:
any page size, page tables and lengths in int32, a causal mask that is aligned to the last query
and key, a window of ``(left, right)`` tokens besides the query's own; README there: GPUs of sm_90.
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
    """Writes with the op's kernel, attends with the package's function."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._write = CacheWriter(spec, site).store
        self._window = window_ends(spec)
        if not site.resolver.described:
            self._attend: Any = import_module("flash_attn_interface").flash_attn_with_kvcache

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders in 16 bits with a cache of the same dtype."""
        if spec.is_quantized:
            # Its descales are those of queries too: one rounding more than the spec asks for.
            return Verdict.refuse(
                f"would round queries of {spec.dtype} to the cache's {spec.cache_dtype} as well"
            )
        # What cannot be had by installing it, is said first.
        return judge_flash(spec) and FLASH_ATTENTION_3.judge()

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[2, P, S, K, D]``, keys first."""
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: AttentionBatch) -> FlashStep:
        """Return the batch in int32; the host waits for nothing."""
        return FlashStep.of(batch)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: FlashStep,
    ) -> torch.Tensor:
        """Write, then attend; see ``AttentionBackend.forward``."""
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
