"""Decoder attention through FlashAttention 2, where it is installed.

Its functions are given pages where they lie if these hold multiples of 256 tokens: the one for
steps of one token each splits long caches over multiprocessors, the other mixes prompts and
decodes. Of smaller pages, what is read is copied. Arguments are tested on the processor against
functions of the same meaning; on a GPU it was not run.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size.
Source: ``flash_attn_with_kvcache`` and ``flash_attn_varlen_func`` in
flash_attn/flash_attn_interface.py of Dao-AILab/flash-attention: tables, lengths and starts in
int32, a causal mask that is aligned to the last query and key, a window of ``(left, right)`` tokens
besides the query's own, 0 as softcap for none; README there: GPUs from Ampere on.
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
from interposer_cuda._flash_attention.step import FlashStep, judge_flash
from interposer_cuda._providers import FLASH_ATTENTION_2
from interposer_ops.attention import GatheredBackend, GatheredStep, window_ends
from interposer_ops.caches import CacheWriter, cumulated

_PAGE_TOKENS = 256


class Flash2Plan(NamedTuple):
    """A step, and where each sequence's keys would start if they lay together.

    Attributes:
        key_starts: ``[B + 1]`` int32; None where every sequence has one query.
    """

    step: FlashStep
    key_starts: torch.Tensor | None


class FlashAttention2Backend(AttentionBackend):
    """Writes with the op's kernel, attends with the package's functions."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._write = CacheWriter(spec, site).store
        self._facts = _facts(spec)
        if not site.resolver.described:
            package = import_module("flash_attn")
            self._decode: Any = package.flash_attn_with_kvcache
            self._mixed: Any = package.flash_attn_varlen_func

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders in 16 bits with a cache of the same dtype and large pages."""
        if spec.page_size % _PAGE_TOKENS:
            return Verdict.refuse(
                f"reads pages of multiples of {_PAGE_TOKENS} tokens, got {spec.page_size}"
            )
        # What cannot be had by installing it, is said first.
        return judge_flash(spec) and FLASH_ATTENTION_2.judge()

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[2, P, S, K, D]``, keys first."""
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: AttentionBatch) -> Flash2Plan:
        """Return the batch in int32; the host waits for nothing."""
        single = batch.max_query_tokens == 1 and len(batch.slots) == len(batch.seq_lens)
        return Flash2Plan(FlashStep.of(batch), None if single else cumulated(batch.seq_lens))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: Flash2Plan,
    ) -> torch.Tensor:
        """Write, then attend; see ``AttentionBackend.forward``."""
        keys, values = cache.unbind(0)
        step, key_starts = plan
        self._write(key, value, keys, values, step.slots)
        if not len(query):
            return torch.empty_like(query)
        out: torch.Tensor
        if key_starts is None:
            out = self._decode(
                query[:, None],
                keys,
                values,
                cache_seqlens=step.seq_lens,
                block_table=step.page_table,
                **self._facts,
            )
            return out[:, 0]
        out = self._mixed(
            query,
            keys,
            values,
            cu_seqlens_q=step.query_starts,
            cu_seqlens_k=key_starts,
            max_seqlen_q=step.max_query_tokens,
            max_seqlen_k=step.max_seq_tokens,
            block_table=step.page_table,
            **self._facts,
        )
        return out


class FlashAttention2GatheredBackend(GatheredBackend):
    """The same on copies, for pages of any size; it waits for the host once per step."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._facts = _facts(spec)
        if not site.resolver.described:
            self._attend: Any = import_module("flash_attn").flash_attn_varlen_func

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept decoders in 16 bits with a cache of the same dtype."""
        return judge_flash(spec) and FLASH_ATTENTION_2.judge()

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: GatheredStep
    ) -> torch.Tensor:
        """Call the package; see ``GatheredBackend.attend``."""
        if not len(query):
            return torch.empty_like(query)
        out: torch.Tensor = self._attend(
            query,
            key,
            value,
            cu_seqlens_q=step.query_starts,
            cu_seqlens_k=step.key_starts,
            max_seqlen_q=step.max_query_tokens,
            max_seqlen_k=step.max_key_tokens,
            **self._facts,
        )
        return out


def _facts(spec: AttentionSpec) -> dict[str, Any]:
    """Return what both functions are told of a layer."""
    return {
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": window_ends(spec),
        "softcap": spec.softcap or 0.0,
    }
