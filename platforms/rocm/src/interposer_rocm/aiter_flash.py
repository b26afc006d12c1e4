"""Decoder attention by AITER's flash attention for sequences of any length.

Its own way to read pages ends the process on some GPUs (ROCm/aiter, issues 4455 and 4456), so
that what is read is copied out of the cache first. Argument mapping is tested with functions that
compute on the processor; on a GPU it was not run.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size,
L cached tokens that are read.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from interposer_ops.paged_slots import cumulated, read_slots
from interposer_rocm.aiter_library import FLASH, function, require
from interposer_rocm.aiter_package import judge_flash

__all__ = ["AiterFlashBackend", "Plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, as AITER wants it.

    Attributes:
        written: ``[T]`` slots that the step's own tokens go to.
        read: ``[L]`` slots that are read; None where the step's own keys are all there are.
        query_starts, key_starts: ``[B + 1]`` int32.
    """

    written: torch.Tensor
    read: torch.Tensor | None
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    max_query_tokens: int
    max_key_tokens: int


class AiterFlashBackend(AttentionBackend):
    """Whole prompts attend to the step's own keys, everything else to copies from the cache."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        """Examine AITER, unless the device is only described.

        Raises: AiterError, PluginError: it cannot be used.
        """
        super().__init__(spec, site)
        if not site.resolver.described:
            require(FLASH)
            self._attend = function(FLASH)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept what ``judge_flash`` accepts."""
        return judge_flash(spec, capability)

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[2, P, S, K, D]``, keys first."""
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: AttentionBatch) -> Plan:
        """Return what is read, which is no more than the window where there is one."""
        lengths = batch.seq_lens
        queries = batch.query_starts.diff()
        if self.spec.window_tokens is not None:
            lengths = torch.minimum(lengths, queries + (self.spec.window_tokens - 1))
        firsts = batch.seq_lens - lengths
        read: torch.Tensor | None = None
        if bool((batch.seq_lens == queries).all()):
            lengths = queries
        else:
            read = read_slots(batch.page_table, firsts, lengths, self.spec.page_size)
        most = max(batch.max_seq_tokens, batch.max_query_tokens)
        return Plan(
            batch.slots,
            read,
            batch.query_starts.to(torch.int32),
            cumulated(lengths),
            batch.max_query_tokens,
            most,
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor:
        """Write, then attend; see ``AttentionBackend.forward``."""
        keys, values = cache.flatten(1, 2).unbind(0)  # each [P S, K, D]
        keys[plan.written] = key
        values[plan.written] = value
        if plan.read is not None:
            key, value = keys[plan.read], values[plan.read]
        spec = self.spec
        # Masks are aligned at the newest tokens. Counts of tokens to the left and right.
        window = (-1, -1) if spec.window_tokens is None else (spec.window_tokens - 1, 0)
        out: torch.Tensor = self._attend(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            cu_seqlens_q=plan.query_starts,
            cu_seqlens_k=plan.key_starts,
            max_seqlen_q=plan.max_query_tokens,
            max_seqlen_k=plan.max_key_tokens,
            softmax_scale=spec.scale,
            logits_soft_cap=spec.softcap or 0.0,
            causal=True,
            window_size=window,
        )
        return out
