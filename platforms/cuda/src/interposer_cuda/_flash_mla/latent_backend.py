"""Latent attention by FlashMLA in steps of equal query lengths, where it is installed.

Its function is given pages where they lie. It wants as many queries of each sequence, which decode
steps have; other steps go to the standard op. Arguments are tested on the processor against a
function of the same meaning; on a GPU it was not run.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, Q queries of a sequence,
M pages of the longest sequence, P pages, S page size.
Source: ``get_mla_metadata`` and ``flash_mla_with_kvcache`` in flash_mla/flash_mla_interface.py of
deepseek-ai/FlashMLA, and the checks of ``dense_decode_fwd`` in its csrc/api: queries ``[B, Q, N,
576]``, the cache ``[P, 64, 1, 576]``, tables and lengths in int32, values of 512 elements, a causal
mask that is aligned to the last query and key, sm_90. Its version is 1.0.0 ever since, in which the
arguments got other names and defaults behind those that are passed here, in their order; what
``get_mla_metadata`` returns went from a tensor to an object that the first layer of a step fills.
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
# Partial results take 2 KiB for each query and head, and as much again for each split.
_MOST_QUERIES = 128


class FlashMLAStep(NamedTuple):
    """Arguments that all layers of a step share.

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
    """Writes with the op's kernel, attends with the package's function."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        if not site.resolver.described:
            package = import_module("flash_mla")
            self._schedule: Any = package.get_mla_metadata
            self._decode: Any = package.flash_mla_with_kvcache

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept the sizes of DeepSeek's models in 16 bits, in pages of 64 tokens."""
        verdict = super().accepts(spec, capability) and judge_sizes(spec)
        if verdict and spec.page_size != _PAGE_TOKENS:
            return Verdict.refuse(f"reads pages of {_PAGE_TOKENS} tokens, got {spec.page_size}")
        # What cannot be had by installing it, is said first.
        return verdict and FLASH_MLA.judge()

    def plan(self, batch: AttentionBatch) -> Any:
        """Return what its function wants of a step, or the step as it is, for the standard op.

        The host waits for nothing: that all queries are as long as the longest follows from shapes.
        """
        num_tokens, longest = len(batch.slots), batch.max_query_tokens
        are_equal = num_tokens == len(batch.seq_lens) * longest
        if not num_tokens or not are_equal or longest > _MOST_QUERIES:
            return super().plan(batch)
        seq_lens = batch.seq_lens.to(torch.int32)
        schedule = self._schedule(seq_lens, longest * self.spec.num_heads, 1)
        return FlashMLAStep(batch.slots, batch.page_table.to(torch.int32), seq_lens, schedule)

    def attend(self, query: torch.Tensor, cache: torch.Tensor, plan: Any) -> torch.Tensor:
        """Call the package, or the op; see ``LatentBackend.attend``."""
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
