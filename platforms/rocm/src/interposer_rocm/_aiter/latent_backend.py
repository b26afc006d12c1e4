"""Latent attention by AITER's decode kernel, planned once per step.

It serves steps of one token per sequence; prompts go to the standard op, as to this kernel every
query would be a sequence of its own. What each sequence reads is listed by the lengths that the
host has, so that nothing is waited for. It is not for graphs: the function keeps a tensor of each
number of listed tokens in a cache of 128 entries, from which one that a graph reads may be dropped.

Argument mapping is tested with a function that computes on the processor; on a GPU it was not run.

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
    """The slots ``[T]`` int64 that are written, and what is read."""

    slots: torch.Tensor
    step: DecodeStep


class AiterLatentBackend(LatentBackend):
    """Writes with the op's kernel, attends with the package's function."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        """Examine AITER, unless the device is only described.

        Raises: AiterError, PluginError: it cannot be used.
        """
        super().__init__(spec, site)
        if not site.resolver.described:
            require(MLA_DECODE)
            self._decode: Any = function(MLA_DECODE)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept the sizes of DeepSeek's models in bfloat16."""
        verdict = super().accepts(spec, capability)
        if verdict and spec.dtype != torch.bfloat16:
            return Verdict.refuse(f"computes in torch.bfloat16, got {spec.dtype}")
        rotary = spec.head_size - spec.latent_size
        verdict = verdict and judge_latent_sizes(spec.latent_size, rotary, spec.num_heads)
        # What cannot be had by installing it, is said first.
        return verdict and judge_device(capability.architecture)

    def plan(self, batch: AttentionBatch) -> Any:
        """Return where each sequence's tokens lie, or the step as it is, for the standard op."""
        num_tokens, lengths = len(batch.slots), batch.seq_lens
        if not num_tokens or batch.max_query_tokens > 1 or num_tokens != len(lengths):
            return super().plan(batch)
        total = int(batch.on_host().seq_lens.sum())
        read = read_slots(
            batch.page_table,
            torch.zeros_like(lengths),
            lengths,
            self.spec.page_size,
            num_tokens=total,
        )
        return AiterLatentStep(batch.slots, DecodeStep.of(read, lengths))

    def attend(self, query: torch.Tensor, cache: torch.Tensor, plan: Any) -> torch.Tensor:
        """Call the package, or the op; see ``LatentBackend.attend``."""
        if isinstance(plan, AttentionBatch):
            return super().attend(query, cache, plan)
        spec, rows = self.spec, cache.flatten(0, 1)
        return run_decode(self._decode, query, rows, plan.step, spec.latent_size, spec.scale)
