"""The tensors of one step, built from the scheduler's chunks."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from interposer import AttentionBatch
from interposer_models.scheduler import Chunk

__all__ = ["StepBatch"]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Token ids and positions, both ``[T]`` int64, with the paged batch behind them."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch

    @classmethod
    def build(cls, chunks: Items[Chunk], page_size: int, device: str) -> StepBatch:
        """Return the batch in which the chunks follow each other without padding."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        lengths: list[int] = []
        most_pages = max(len(chunk.sequence.pages) for chunk in chunks)
        table: list[list[int]] = []
        for chunk in chunks:
            sequence, pages = chunk.sequence, chunk.sequence.pages
            start, stop = sequence.num_computed, sequence.num_computed + chunk.num_tokens
            token_ids += sequence.tokens(start, stop)
            positions += range(start, stop)
            slots += [pages[p // page_size] * page_size + p % page_size for p in range(start, stop)]
            starts.append(len(token_ids))
            lengths.append(stop)
            table.append(pages + [0] * (most_pages - len(pages)))

        def tensor(values: list[int] | list[list[int]]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        attention = AttentionBatch(
            query_starts=tensor(starts),
            seq_lens=tensor(lengths),
            page_table=tensor(table),
            slots=tensor(slots),
            max_query_tokens=max(chunk.num_tokens for chunk in chunks),
            max_seq_tokens=max(lengths),
        )
        return cls(tensor(token_ids), tensor(positions), attention)
