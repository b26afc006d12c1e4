"""Decoder attention through FlashAttention 2, if the package is installed.

Caches whose page size is a multiple of 256 tokens are read in place: decode steps use the function
that splits long caches over multiprocessors (split-KV), and steps that mix prompts and decodes use
the variable-length function. Caches with smaller pages are gathered into contiguous copies first.
Call arguments are tested on the CPU against stand-in functions; no GPU has run this module.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size.
Source: ``flash_attn_with_kvcache`` and ``flash_attn_varlen_func`` in
flash_attn/flash_attn_interface.py of Dao-AILab/flash-attention: tables, lengths and starts in
int32, a causal mask that is aligned to the last query and key, a window of ``(left, right)`` tokens
in addition to the query's own, softcap 0 for none; its README: GPUs from Ampere on.
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

# FlashAttention 2 reads only pages of a multiple of this size.
_PAGE_TOKENS = 256


class Flash2Plan(NamedTuple):
    """A planned step, with the key offsets that the variable-length function takes.

    Attributes:
        key_starts: ``[B + 1]`` int32; None if every sequence has one query.
    """

    step: FlashStep
    key_starts: torch.Tensor | None


class FlashAttention2Backend(AttentionBackend):
    """Writes the cache with interposer's kernel, then attends in place with FlashAttention 2."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._write = CacheWriter(spec, site).store
        self._layer_arguments = _layer_arguments(spec)
        if not site.resolver.described:
            package = import_module("flash_attn")
            self._decode: Any = package.flash_attn_with_kvcache
            self._mixed: Any = package.flash_attn_varlen_func

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept 16-bit decoders with a cache of the same dtype and pages of n x 256 tokens."""
        if spec.page_size % _PAGE_TOKENS:
            return Verdict.refuse(
                f"reads pages of multiples of {_PAGE_TOKENS} tokens, got {spec.page_size}"
            )
        # Limits of the package come first: installing the package would not lift the limits.
        return judge_flash(spec) and FLASH_ATTENTION_2.judge()

    def kv_layout(self) -> KVCacheLayout:
        """Return the cache layout ``[2, P, S, K, D]``, keys first."""
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: AttentionBatch) -> Flash2Plan:
        """Convert the batch to int32 without synchronizing with the device."""
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
        """Write keys and values, then compute the attention; see ``AttentionBackend.forward``."""
        keys, values = cache.unbind(0)
        step, key_starts = plan
        self._write(key, value, keys, values, step.slots)
        if not len(query):
            return torch.empty_like(query)
        out: torch.Tensor
        if key_starts is None:
            # One query per sequence: add the query dimension that split-KV expects.
            out = self._decode(
                query[:, None],
                keys,
                values,
                cache_seqlens=step.seq_lens,
                block_table=step.page_table,
                **self._layer_arguments,
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
            **self._layer_arguments,
        )
        return out


class FlashAttention2GatheredBackend(GatheredBackend):
    """Attends to gathered copies of the cache, for any page size; synchronizes once per step."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._layer_arguments = _layer_arguments(spec)
        if not site.resolver.described:
            self._attend: Any = import_module("flash_attn").flash_attn_varlen_func

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept 16-bit decoders with a cache of the same dtype."""
        return judge_flash(spec) and FLASH_ATTENTION_2.judge()

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: GatheredStep
    ) -> torch.Tensor:
        """Attend with FlashAttention 2; see ``GatheredBackend.attend``."""
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
            **self._layer_arguments,
        )
        return out


def _layer_arguments(spec: AttentionSpec) -> dict[str, Any]:
    """Return the layer's keyword arguments, which both functions of FlashAttention 2 take."""
    return {
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": window_ends(spec),
        "softcap": spec.softcap or 0.0,
    }
