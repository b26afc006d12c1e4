"""The tensors of one step, built from the scheduler's chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from interposer import AttentionBatch
from interposer_models._engine.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Token ids and positions, both ``[T]`` int64, with the paged batch behind them."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch

    @classmethod
    def build(
        cls, chunks: Items[Chunk], page_size: int, device: str, min_pages: int = 1
    ) -> StepBatch:
        """Return the batch in which the chunks follow each other without padding.

        Args:
            min_pages: columns that the page table has at least.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        lengths: list[int] = []
        most_pages = max(min_pages, *(len(chunk.sequence.pages) for chunk in chunks))
        table: list[int] = []
        for chunk in chunks:
            sequence, pages = chunk.sequence, chunk.sequence.pages
            start, stop = sequence.num_computed, sequence.num_computed + chunk.num_tokens
            token_ids += sequence.tokens(start, stop)
            positions += range(start, stop)
            slots += [pages[p // page_size] * page_size + p % page_size for p in range(start, stop)]
            starts.append(len(token_ids))
            lengths.append(stop)
            table += pages
            table += [0] * (most_pages - len(pages))
        # One tensor, of which they are parts: making six takes a decode step as long as a layer.
        parts = (token_ids, positions, slots, starts, lengths, table)
        numbers = torch.tensor([*itertools.chain(*parts)], dtype=torch.int64, device=device)
        tokens, places, slots_of_tokens, query_starts, seq_lens, pages_of_sequences = numbers.split(
            [len(part) for part in parts]
        )
        attention = AttentionBatch(
            query_starts=query_starts,
            seq_lens=seq_lens,
            page_table=pages_of_sequences.view(len(chunks), most_pages),
            slots=slots_of_tokens,
            max_query_tokens=max(chunk.num_tokens for chunk in chunks),
            max_seq_tokens=max(lengths),
        )
        return cls(tokens, places, attention)
