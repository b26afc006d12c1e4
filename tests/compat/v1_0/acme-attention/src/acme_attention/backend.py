"""Attention one sequence at a time.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size,
L cached tokens of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch

from acme_attention.judges import judge
from interposer import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capability,
    KVCacheLayout,
    Site,
    Verdict,
)


class RowsBackend(AttentionBackend):
    """Decoder attention with a cache of its own layout."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self.group = spec.num_heads // spec.num_kv_heads
        self.num_steps = 0

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Answer as the predicate does."""
        return judge(spec, capability)

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[P, S, 2, K, D]``, kept in memory as ``[P, 2, S, K, D]``."""
        spec = self.spec
        page_shape = (spec.page_size, 2, spec.num_kv_heads, spec.head_size)
        return KVCacheLayout(
            page_shape=page_shape,
            page_axis=0,
            stride_order=(0, 2, 1, 3, 4),
            dtype=spec.cache_dtype,
        )

    def plan(self, batch: AttentionBatch) -> Any:
        """Return the slots to write and, for each sequence, its query rows and cached slots."""
        self.num_steps += 1
        size = self.spec.page_size
        sequences = []
        starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
        for index, length in enumerate(lengths):
            positions = torch.arange(length)
            slots = batch.page_table[index, positions // size] * size + positions % size
            sequences.append((starts[index], starts[index + 1], slots))
        return batch.slots, sequences

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
    ) -> torch.Tensor:
        """Write, then attend: ``[T, N, D]``."""
        written, sequences = plan
        size = self.spec.page_size
        cache[written // size, written % size] = torch.stack((key, value), 1)
        out = torch.empty_like(query)
        for start, stop, slots in sequences:
            cached = cache[slots // size, slots % size]  # [L, 2, K, D]
            keys, values = cached.repeat_interleave(self.group, 2).unbind(1)
            scores = torch.einsum("tnd,lnd->ntl", query[start:stop], keys) * self.spec.scale
            offset = len(slots) - (stop - start)
            hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(offset + 1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[start:stop] = torch.einsum("ntl,lnd->tnd", weights, values)
        return out
