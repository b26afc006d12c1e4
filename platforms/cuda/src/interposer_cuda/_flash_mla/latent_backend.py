"""Latent attention by FlashMLA for steps of equal query lengths, if the package is installed.

Pages are read in place. FlashMLA needs the same number of queries from every sequence, as in
decode steps; other steps use the standard op. Call arguments are tested on the CPU against a
stand-in function; no GPU has run this module.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, Q queries of a sequence,
M pages of the longest sequence, P pages, S page size.
Source: ``get_mla_metadata`` and ``flash_mla_with_kvcache`` in flash_mla/flash_mla_interface.py of
deepseek-ai/FlashMLA, and the checks of ``dense_decode_fwd`` in its csrc/api: queries ``[B, Q, N,
576]``, the cache ``[P, 64, 1, 576]``, tables and lengths in int32, values of 512 elements, a causal
mask that is aligned to the last query and key, sm_90. All releases are numbered 1.0.0, although
parameters were renamed and optional ones appended: this module therefore passes the first ones by
position. The first result of ``get_mla_metadata`` was a tensor at first, and later an object that
the first layer of a step fills.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch

from interposer import AttentionBatch, AttentionSpec, Capability, Site, Verdict
from interposer_cuda._latent_sizes import judge_sizes
from interposer_cuda._providers import FLASH_MLA
from interposer_ops.layers.attention import LatentBackend

_PAGE_TOKENS = 64
# Partial results take 2 KiB per query, head and split, so long prompts would need too much memory.
_MAX_QUERIES = 128


class FlashMLAStep(NamedTuple):
    """Arguments of FlashMLA that all layers of a step share.

    Attributes:
        slots: ``[T]`` int64.
        page_table: ``[B, M]`` int32.
        seq_lens: ``[B]`` int32.
        schedule: the two results of ``get_mla_metadata``.
    """

    slots: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    schedule: tuple[Any, Any]


class FlashMLABackend(LatentBackend):
    """Writes the cache with interposer's kernel, then attends in place with FlashMLA."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        if not site.resolver.described:
            package = import_module("flash_mla")
            self._schedule: Any = package.get_mla_metadata
            self._decode: Any = package.flash_mla_with_kvcache

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept DeepSeek's latent sizes in 16 bits with pages of 64 tokens."""
        verdict = super().accepts(spec, capability) and judge_sizes(spec)
        if verdict and spec.page_size != _PAGE_TOKENS:
            return Verdict.refuse(f"reads pages of {_PAGE_TOKENS} tokens, got {spec.page_size}")
        # Limits of the package come first: installing the package would not lift the limits.
        return verdict and FLASH_MLA.judge()

    def plan(self, batch: AttentionBatch) -> Any:
        """Plan the step for FlashMLA, or return a plan for the standard op.

        Does not synchronize: shapes alone show whether all query lengths equal the longest one.
        """
        num_tokens, longest = len(batch.slots), batch.max_query_tokens
        are_equal = num_tokens == len(batch.seq_lens) * longest
        if not num_tokens or not are_equal or longest > _MAX_QUERIES:
            return super().plan(batch)
        seq_lens = batch.seq_lens.to(torch.int32)
        schedule = self._schedule(seq_lens, longest * self.spec.num_heads, 1)
        return FlashMLAStep(batch.slots, batch.page_table.to(torch.int32), seq_lens, schedule)

    def attend(self, query: torch.Tensor, cache: torch.Tensor, plan: Any) -> torch.Tensor:
        """Attend with FlashMLA or the standard op; see ``LatentBackend.attend``."""
        if isinstance(plan, AttentionBatch):
            return super().attend(query, cache, plan)
        out: torch.Tensor = self._decode(
            query.contiguous().unflatten(0, (len(plan.seq_lens), -1)),
            cache[:, :, None],
            plan.page_table,
            plan.seq_lens,
            self.spec.latent_size,
            *plan.schedule,
            softmax_scale=self.spec.scale,
            causal=True,
        )[0]
        return out.flatten(0, 1)
