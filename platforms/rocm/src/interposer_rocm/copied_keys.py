"""Decoder attention by functions for sequences of any length, on copies of what is read.

Such functions take keys and values one sequence after the other, so that what lies in pages is
copied out of the cache first. Argument mapping is tested with functions that compute on the
processor; on a GPU it was not run.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size,
L cached tokens that are read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from interposer import AttentionBackend, AttentionBatch, AttentionSpec, KVCacheLayout, Site
from interposer_rocm.paged_slots import cumulated, read_slots

__all__ = ["CopiedKeysBackend", "Plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, as such a function wants it.

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


class CopiedKeysBackend(AttentionBackend):
    """Whole prompts attend to the step's own keys, everything else to copies from the cache."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        """Examine the package, unless the device is only described.

        Raises: InterposerError: it cannot be used; see ``ExaminedPackage.require``.
        """
        super().__init__(spec, site)
        if not site.resolver.described:
            self._attend = self._found()

    @abstractmethod
    def _found(self) -> Callable[..., Any]:
        """Return the function, examined before."""

    def _options(self) -> dict[str, Any]:
        """Return what is particular to the function."""
        return {}

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[2, P, S, K, D]``, keys first."""
        spec = self.spec
        page_shape = (2, spec.page_size, spec.num_kv_heads, spec.head_size)
        return KVCacheLayout(page_shape, 1, (0, 1, 2, 3, 4), spec.cache_dtype)

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
            causal=True,
            window_size=window,
            **self._options(),
        )
        return out
