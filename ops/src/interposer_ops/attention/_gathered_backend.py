"""Decoder attention for platform functions that take contiguous keys without a page table.

The cached tokens that a step reads are copied, one sequence after the other. Steps of whole prompts
read this step's keys directly. A platform subclass provides the attention function.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size, L cached
tokens that are read.
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
    """Plan of one step: cache slots and sequence bounds; the attention function sees no pages.

    Attributes:
        written: ``[T]`` slots for the keys and values of this step.
        read: ``[L]`` slots to read; None if this step's own keys are all keys.
        query_starts, key_starts: ``[B + 1]`` int32.
    """

    written: Tensor
    read: Tensor | None
    query_starts: Tensor
    key_starts: Tensor
    max_query_tokens: int
    max_key_tokens: int


class GatheredBackend(AttentionBackend):
    """Base class of backends that gather cached keys and values; new prompts skip the cache."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, step: GatheredStep) -> Tensor:
        """Compute causal attention within each sequence, the last query aligned with the last key.

        Args:
            query: ``[T, N, D]``, contiguous.
            key, value: ``[L, K, D]``, contiguous; L is T if the step reads no cache.
        Returns: ``[T, N, D]``, dtype of ``query``.
        """

    def kv_layout(self) -> KVCacheLayout:
        """Describe the cache of one layer, ``[2, P, S, K, D]``, keys first."""
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: AttentionBatch) -> GatheredStep:
        """Plan a step: the cache slots to read, only those in the sliding window if there is one.

        The number of slots comes from the host copy of the batch, so that nothing waits for the
        device.
        """
        host, slots_to_read = batch.on_host(), None
        firsts, lengths = windowed(batch, self.spec.window_tokens)
        # All sequences are new: this step's own keys are complete, whatever the window.
        if bool((host.seq_lens == host.query_starts.diff()).all()):
            lengths = batch.query_starts.diff()
        else:
            total = int(windowed(host, self.spec.window_tokens)[1].sum())
            size = self.spec.page_size
            slots_to_read = read_slots(batch.page_table, firsts, lengths, size, num_tokens=total)
        starts = batch.query_starts.to(torch.int32), cumulated(lengths)
        max_key_tokens = max(batch.max_seq_tokens, batch.max_query_tokens)
        return GatheredStep(
            batch.slots, slots_to_read, *starts, batch.max_query_tokens, max_key_tokens
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: GatheredStep
    ) -> Tensor:
        """Store the step's keys and values, then compute attention ``[T, N, D]``."""
        keys, values = cache.flatten(1, 2).unbind(0)  # each [P S, K, D]
        # Written first: ``plan.read`` includes the slots of this step's own tokens.
        keys[plan.written] = key
        values[plan.written] = value
        if plan.read is not None:
            key, value = keys[plan.read], values[plan.read]
        return self.attend(query.contiguous(), key.contiguous(), value.contiguous(), plan)


def windowed(batch: AttentionBatch, window_tokens: int | None) -> tuple[Tensor, Tensor]:
    """Return each sequence's first position to read and number of positions, ``[B]`` int64 each."""
    lengths = batch.seq_lens
    if window_tokens is not None:
        # The first query of the step sees window - 1 earlier tokens; later queries see fewer.
        lengths = torch.minimum(lengths, batch.query_starts.diff() + (window_tokens - 1))
    return batch.seq_lens - lengths, lengths


def window_ends(spec: AttentionSpec) -> tuple[int, int]:
    """Return how many tokens a query sees to the left and to the right; -1 means unlimited.

    This is the convention of all Flash Attention implementations.
    """
    return (-1, -1) if spec.window_tokens is None else (spec.window_tokens - 1, 0)
