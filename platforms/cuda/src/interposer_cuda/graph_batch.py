"""The memory that a captured decode step reads: written before each replay, padded here alone.

Dimensions: B sequences of the bucket, each with one token, P pages of the longest sequence,
S page size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interposer import AttentionBatch
from interposer.errors import ConfigError

__all__ = ["GraphBatch"]


class GraphBatch:
    """One bucket's inputs at addresses that never change.

    A row of padding is a sequence of one token, which goes to a slot of a spare page and sees the
    first token there. That one is padding too, and written in the same step: slots are given to
    the last row first. So nothing of another sequence is touched, and no row is empty.

    Attributes:
        token_ids, positions: ``[B]`` int64.
        attention: what the step's attention reads; the longest query and the longest sequence are
            those that the memory has room for, as a graph fixes them.
    """

    def __init__(
        self, size: int, num_pages: int, page_size: int, spare_pages: Sequence[int], device: str
    ) -> None:
        """Take memory for ``size`` sequences of at most ``num_pages`` pages.

        Args:
            spare_pages: pages that no sequence is ever given, with a slot for each row.
        Raises: ConfigError: the spare pages have too few slots.
        """
        # All rows are padding while the step is captured.
        if len(spare_pages) * page_size < size:
            raise ConfigError(
                f"{len(spare_pages)} spare pages of {page_size} slots cannot take the {size} "
                f"rows of padding of a bucket of {size}. Try: {-(-size // page_size)} of them"
            )
        self.size = size
        self.token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        order = torch.arange(size).flip(0)
        pages = torch.tensor([*spare_pages], dtype=torch.int64)[order // page_size]
        self._slots = (pages * page_size + order % page_size).to(device)
        self._tables = pages[:, None].expand(size, num_pages).contiguous().to(device)
        self.attention = AttentionBatch(
            query_starts=torch.arange(size + 1, device=device),
            seq_lens=torch.ones(size, dtype=torch.int64, device=device),
            page_table=self._tables.clone(),
            slots=self._slots.clone(),
            max_query_tokens=1,
            max_seq_tokens=num_pages * page_size,
        )

    def fill(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> int:
        """Write a step that decodes one token per sequence, and return how many rows it has.

        Raises: ConfigError: it is no such step, or does not fit.
        """
        count = len(batch.seq_lens)
        width = batch.page_table.shape[1]
        room = self.attention.page_table
        if not 0 < count <= self.size or batch.max_query_tokens != 1 or len(token_ids) != count:
            raise ConfigError(
                f"a graph of {self.size} rows takes 1 to {self.size} sequences of one token, got "
                f"{count} sequences of {len(token_ids)} tokens. Try: run this step without a graph"
            )
        if width > room.shape[1]:
            raise ConfigError(
                f"a graph with room for {room.shape[1]} pages per sequence got {width}. "
                "Try: capture for a longer context"
            )
        self.token_ids[:count].copy_(token_ids, non_blocking=True)
        self.positions[:count].copy_(positions, non_blocking=True)
        self.token_ids[count:].zero_()
        self.positions[count:].zero_()
        own = self.attention
        own.seq_lens[:count].copy_(batch.seq_lens, non_blocking=True)
        own.seq_lens[count:].fill_(1)
        own.slots[:count].copy_(batch.slots, non_blocking=True)
        own.slots[count:].copy_(self._slots[count:])
        room[:count, :width].copy_(batch.page_table, non_blocking=True)
        # Entries behind a sequence's pages are read by nobody, but have to be pages.
        room[:count, width:].zero_()
        room[count:].copy_(self._tables[count:])
        return count
