"""Decoder attention by functions that take keys of any length without a page table.

What is read of the cache is copied, one sequence after the other; steps of whole prompts read
their own keys instead. A platform adds the function.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size,
L cached tokens that are read.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from interposer import AttentionBackend, AttentionBatch, AttentionSpec, KVCacheLayout
from interposer_ops.caches._kv_cache import cumulated, read_slots


@dataclass(frozen=True, slots=True)
class GatheredStep:
    """One step without pages.

    Attributes:
        written: ``[T]`` slots that the step's own tokens go to.
        read: ``[L]`` slots that are read; None where the step's own keys are all there are.
        query_starts, key_starts: ``[B + 1]`` int32.
    """

    written: Tensor
    read: Tensor | None
    query_starts: Tensor
    key_starts: Tensor
    max_query_tokens: int
    max_key_tokens: int


class GatheredBackend(AttentionBackend):
    """Whole prompts attend to the step's own keys, everything else to copies from the cache."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, step: GatheredStep) -> Tensor:
        """Return causal attention within each sequence; masks are aligned at the newest tokens.

        Args:
            query: ``[T, N, D]``, contiguous.
            key, value: ``[L, K, D]``, contiguous; L is T where the step reads nothing.
        Returns: ``[T, N, D]``, dtype of ``query``.
        """

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[2, P, S, K, D]``, keys first."""
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: AttentionBatch) -> GatheredStep:
        """Return what is read, which is no more than the window where there is one.

        How many tokens that is, the host knows of its copy of the batch.
        """
        host, read = batch.on_host(), None
        firsts, lengths = windowed(batch, self.spec.window_tokens)
        if bool((host.seq_lens == host.query_starts.diff()).all()):
            lengths = batch.query_starts.diff()
        else:
            total = int(windowed(host, self.spec.window_tokens)[1].sum())
            size = self.spec.page_size
            read = read_slots(batch.page_table, firsts, lengths, size, num_tokens=total)
        starts = batch.query_starts.to(torch.int32), cumulated(lengths)
        most = max(batch.max_seq_tokens, batch.max_query_tokens)
        return GatheredStep(batch.slots, read, *starts, batch.max_query_tokens, most)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: GatheredStep
    ) -> Tensor:
        """Write, then attend; see ``AttentionBackend.forward``."""
        keys, values = cache.flatten(1, 2).unbind(0)  # each [P S, K, D]
        keys[plan.written] = key
        values[plan.written] = value
        if plan.read is not None:
            key, value = keys[plan.read], values[plan.read]
        return self.attend(query.contiguous(), key.contiguous(), value.contiguous(), plan)


def windowed(batch: AttentionBatch, window_tokens: int | None) -> tuple[Tensor, Tensor]:
    """Return the first position that each sequence reads, and how many, ``[B]`` int64 each."""
    lengths = batch.seq_lens
    if window_tokens is not None:
        lengths = torch.minimum(lengths, batch.query_starts.diff() + (window_tokens - 1))
    return batch.seq_lens - lengths, lengths


def window_ends(spec: AttentionSpec) -> tuple[int, int]:
    """Return how many tokens to the left and right of its own a query sees; -1 is all.

    Flash attention of every make counts them so.
    """
    return (-1, -1) if spec.window_tokens is None else (spec.window_tokens - 1, 0)
