"""Decode steps as graphs: one for each bucket, captured when it is first wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from interposer import AttentionBatch
from interposer_cuda.graph_batch import GraphBatch
from interposer_cuda.graph_buckets import GraphBuckets

__all__ = ["DecodeGraphs", "Step"]

Step = Callable[[torch.Tensor, torch.Tensor, AttentionBatch], torch.Tensor]
"""``(token_ids, positions, batch)`` to a row of results per token."""

Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""``Platform.capture_graph``."""


class DecodeGraphs:
    """Runs a step of one token per sequence through the graph of its bucket.

    Args:
        step: what is captured; it must read nothing but its arguments and what never moves.
        capture: of the platform.
        spare_pages: pages of the cache that no sequence is given, see ``pages_for``.
    """

    def __init__(
        self,
        step: Step,
        capture: Capture,
        buckets: GraphBuckets,
        *,
        num_pages: int,
        page_size: int,
        spare_pages: Sequence[int],
        device: str,
    ) -> None:
        self.buckets = buckets
        self._step = step
        self._capture = capture
        self._memory = (num_pages, page_size, [*spare_pages], device)
        self._graphs: dict[int, tuple[GraphBatch, Callable[[], object]]] = {}

    @staticmethod
    def pages_for(buckets: GraphBuckets, page_size: int) -> int:
        """Return how many spare pages padding needs."""
        return -(-buckets.sizes[-1] // page_size)

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Return what ``step`` would, through a graph where one fits.

        What is returned is overwritten by the next step.
        """
        size = self.buckets.size_for(len(batch.seq_lens))
        decodes = batch.max_query_tokens == 1 and len(token_ids) == len(batch.seq_lens)
        if size is None or not decodes or batch.page_table.shape[1] > self._memory[0]:
            return self._step(token_ids, positions, batch)
        if size not in self._graphs:
            self._graphs[size] = self._captured(size)
        held, replay = self._graphs[size]
        count = held.fill(token_ids, positions, batch)
        results = replay()
        assert isinstance(results, torch.Tensor)
        return results[:count]

    def _captured(self, size: int) -> tuple[GraphBatch, Callable[[], object]]:
        held = GraphBatch(size, *self._memory)
        replay = self._capture(lambda: self._step(held.token_ids, held.positions, held.attention))
        return held, replay
