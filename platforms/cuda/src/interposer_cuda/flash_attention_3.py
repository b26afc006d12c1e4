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
from typing import Any, NamedTuple

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
from interposer_cuda.providers import FLASH_ATTENTION_3
from interposer_ops.kv_cache import reshape_and_cache

__all__ = ["FlashAttention3Backend", "FlashPlan"]

_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
_WRITTEN = ("num_heads", "num_kv_heads", "head_size", "page_size", "windowed", "softcapped")


class FlashPlan(NamedTuple):
    """What is the same for all layers: int32, but for the slots.

    Attributes:
        slots: ``[T]`` int64.
        page_table: ``[B, M]``.
        seq_lens: ``[B]``.
        query_starts: ``[B + 1]``.
    """

    slots: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    max_query_tokens: int


class FlashAttention3Backend(AttentionBackend):
    """Writes with the op's kernel, attends with the package's function."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        facts = spec.dims()
        self._write = site.bind(reshape_and_cache, **{name: facts[name] for name in _WRITTEN})
        self._attend: Any = import_module("flash_attn_interface").flash_attn_with_kvcache
        window = spec.window_tokens
        # It counts the tokens before the query's own.
        self._window = (-1, -1) if window is None else (window - 1, 0)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders in 16 bits with a cache of the same dtype."""
        verdict = FLASH_ATTENTION_3.judge()
        if not verdict:
            return verdict
        if spec.dtype not in _DTYPES:
            return Verdict.refuse(f"computes in 16 bit floats, got {spec.dtype}")
        if spec.head_size % 8 or spec.head_size > _LARGEST_HEAD:
            return Verdict.refuse(
                f"takes heads of multiples of 8 up to {_LARGEST_HEAD}, got {spec.head_size}"
            )
        if spec.is_quantized:
            return Verdict.refuse(
                f"wants queries in the cache's dtype, got {spec.dtype} and {spec.cache_dtype}"
            )
        return spec.judge_plain_decoder()

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[2, P, S, K, D]``, keys first."""
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: AttentionBatch) -> FlashPlan:
        """Return the batch in int32; the host waits for nothing."""
        return FlashPlan(
            batch.slots,
            batch.page_table.to(torch.int32),
            batch.seq_lens.to(torch.int32),
            batch.query_starts.to(torch.int32),
            batch.max_query_tokens,
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: FlashPlan,
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
