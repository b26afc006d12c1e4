"""Latent attention by AITER's MLA decode kernel, planned once per step.

The kernel serves steps of one token per sequence. Prompts use the standard op, because the kernel
would read the cache once per query. The slots to read are listed with the host's copy of the
lengths, without synchronizing. Graphs cannot capture this backend: AITER caches an internal tensor
per number of listed tokens in 128 entries, and may evict a tensor that a graph still reads.

Argument mapping is tested with a function that computes on the CPU; no GPU has run this module.

Dimensions: T tokens, N heads, C latent size, R rotary size, P pages, S page size.
Source: ``mla_decode_fwd`` and ``get_meta_param`` in aiter/mla.py of ROCm/aiter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from interposer import AttentionBatch, AttentionSpec, Capability, Site, Verdict
from interposer_ops.caches import read_slots
from interposer_ops.layers.attention import LatentBackend
from interposer_rocm._aiter.latent import DecodeStep, run_decode
from interposer_rocm._aiter.library import MLA_DECODE, function, require
from interposer_rocm._aiter.package import judge_device, judge_latent_sizes


class AiterLatentStep(NamedTuple):
    """The cache slots ``[T]`` int64 to write, and the index tensors of the decode kernel."""

    slots: torch.Tensor
    step: DecodeStep


class AiterLatentBackend(LatentBackend):
    """Writes the cache with interposer's kernel, then attends in place with AITER."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        """Check that AITER works, unless the device is only described.

        Raises: AiterError, PluginError: AITER cannot be used.
        """
        super().__init__(spec, site)
        if not site.resolver.described:
            require(MLA_DECODE)
            self._decode: Any = function(MLA_DECODE)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept DeepSeek's latent sizes in bfloat16."""
        verdict = super().accepts(spec, capability)
        if verdict and spec.dtype != torch.bfloat16:
            return Verdict.refuse(f"computes in torch.bfloat16, got {spec.dtype}")
        rotary = spec.head_size - spec.latent_size
        verdict = verdict and judge_latent_sizes(spec.latent_size, rotary, spec.num_heads)
        # Limits of the package come first: installing the package would not lift the limits.
        return verdict and judge_device(capability.architecture)

    def plan(self, batch: AttentionBatch) -> Any:
        """List the cache slots of each sequence, or return a plan for the standard op."""
        num_tokens, lengths = len(batch.slots), batch.seq_lens
        if not num_tokens or batch.max_query_tokens > 1 or num_tokens != len(lengths):
            return super().plan(batch)
        num_read = int(batch.on_host().seq_lens.sum())
        read_list = read_slots(
            batch.page_table,
            torch.zeros_like(lengths),
            lengths,
            self.spec.page_size,
            num_tokens=num_read,
        )
        return AiterLatentStep(batch.slots, DecodeStep.of(read_list, lengths))

    def attend(self, query: torch.Tensor, cache: torch.Tensor, plan: Any) -> torch.Tensor:
        """Attend with AITER or the standard op; see ``LatentBackend.attend``."""
        if isinstance(plan, AttentionBatch):
            return super().attend(query, cache, plan)
        spec, rows = self.spec, cache.flatten(0, 1)
        return run_decode(self._decode, query, rows, plan.step, spec.latent_size, spec.scale)
