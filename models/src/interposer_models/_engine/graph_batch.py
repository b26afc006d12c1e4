"""The memory that a captured decode step reads: written before each replay, padded here alone.

Dimensions: B sequences of the bucket, each with one token, P pages of the longest sequence,
S page size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interposer import AttentionBatch
from interposer.errors import ConfigError
from interposer_models._engine.batch import StepBatch
from interposer_models._engine.graph_buckets import Bucket


class GraphBatch:
    """One bucket's inputs at addresses that never change.

    A row of padding is a sequence of one token, which goes to a slot of a spare page and sees the
    first token there. That one is padding too, and written in the same step: slots are given to
    the last row first. So nothing of another sequence is touched, and no row is empty.

    Attributes:
        step: token ids and positions, each ``[B]`` int64, and what attention reads; the longest
            query and the longest sequence are those that the memory has room for, as a graph
            fixes them.
    """

    def __init__(
        self, bucket: Bucket, page_size: int, spare_pages: Sequence[int], device: str
    ) -> None:
        """Take memory for a bucket; at first all rows are padding, with which it is captured.

        Args:
            spare_pages: pages that no sequence is ever given, with a slot for each row.
        Raises: ConfigError: the spare pages have too few slots.
        """
        size, num_pages = bucket
        if len(spare_pages) * page_size < size:
            raise ConfigError(
                f"{len(spare_pages)} spare pages of {page_size} slots cannot take the {size} "
                f"rows of padding of a bucket of {size}. Try: {-(-size // page_size)} of them"
            )
        self.size = size
        self._padded_from = 0
        order = torch.arange(size).flip(0)
        pages = torch.tensor([*spare_pages], dtype=torch.int64)[order // page_size]
        self._slots = (pages * page_size + order % page_size).to(device)
        self._first_pages = pages.to(device)
        self.step = StepBatch(
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
            AttentionBatch(
                query_starts=torch.arange(size + 1, device=device),
                seq_lens=torch.ones(size, dtype=torch.int64, device=device),
                page_table=self._first_pages[:, None].repeat(1, num_pages),
                slots=self._slots.clone(),
                max_query_tokens=1,
                max_seq_tokens=num_pages * page_size,
            ),
        )

    def fill(self, batch: StepBatch) -> int:
        """Write a step of one token per sequence, and return its number of rows.

        Raises: ConfigError: it is no such step, or does not fit.
        """
        given, own = batch.attention, self.step.attention
        count, width = given.page_table.shape
        tokens = len(batch.token_ids)
        if not 0 < count <= self.size or given.max_query_tokens != 1 or tokens != count:
            raise ConfigError(
                f"a graph of {self.size} rows takes 1 to {self.size} sequences of one token, got "
                f"{count} sequences of {tokens} tokens. Try: run this step without a graph"
            )
        if width > own.page_table.shape[1]:
            raise ConfigError(
                f"a graph with room for {own.page_table.shape[1]} pages per sequence got {width}. "
                "Try: capture for a longer context"
            )
        self.step.token_ids[:count].copy_(batch.token_ids, non_blocking=True)
        self.step.positions[:count].copy_(batch.positions, non_blocking=True)
        own.seq_lens[:count].copy_(given.seq_lens, non_blocking=True)
        own.slots[:count].copy_(given.slots, non_blocking=True)
        # Entries behind a sequence's pages are read by nobody, but have to be pages: those of
        # former steps are.
        own.page_table[:count, :width].copy_(given.page_table, non_blocking=True)
        if count < self._padded_from:
            self._pad(count, self._padded_from)
        self._padded_from = count
        return count

    def _pad(self, first: int, last: int) -> None:
        """Make rows ``first`` to ``last - 1`` padding, as those behind them are."""
        own = self.step.attention
        self.step.token_ids[first:last].zero_()
        self.step.positions[first:last].zero_()
        own.seq_lens[first:last].fill_(1)
        own.slots[first:last].copy_(self._slots[first:last])
        own.page_table[first:last, 0].copy_(self._first_pages[first:last])
