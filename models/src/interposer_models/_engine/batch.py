"""The tensors of one step, built from the scheduler's chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch

from interposer import AttentionBatch
from interposer_models._engine.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Token ids and positions, both ``[T]`` int64, with the paged batch behind them.

    Attributes:
        attention: with the pages of the first pool.
        further: the same with those of each other pool; that of sources is the last one, and has
            the lengths of these.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    further: tuple[AttentionBatch, ...] = ()

    @property
    def by_pool(self) -> tuple[AttentionBatch, ...]:
        """The paged batch of each pool."""
        return (self.attention, *self.further)

    @classmethod
    def build(
        cls,
        chunks: Items[Chunk],
        page_size: int,
        device: str,
        min_pages: int = 1,
        with_states: bool = False,
        with_prefixes: bool = False,
    ) -> StepBatch:
        """Return the batch in which the chunks follow each other without padding.

        Args:
            min_pages: columns that the page table has at least.
            with_states: the sequences have rows of states.
            with_prefixes: the tokens of prompts see each other in both directions.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        starts = [0]
        lengths: list[int] = []
        most_pages = max(min_pages, *(len(chunk.sequence.pages[0]) for chunk in chunks))
        has_sources = bool(chunks[0].sequence.source)
        if has_sources:  # one width for all tables, as graphs have it
            most_pages = max(most_pages, *(len(chunk.sequence.source_pages) for chunk in chunks))
        places: list[list[int]] = [[] for _ in range(2 * len(chunks[0].sequence.pages))]
        for chunk in chunks:
            sequence = chunk.sequence
            start, stop = sequence.num_computed, sequence.num_computed + chunk.num_rows
            token_ids += sequence.tokens(start, start + chunk.num_tokens)
            token_ids += chunk.drafts
            positions += range(start, stop)
            starts.append(len(token_ids))
            lengths.append(stop)
            for pages, slots, table in zip(sequence.pages, places[::2], places[1::2], strict=True):
                slots += [
                    pages[p // page_size] * page_size + p % page_size for p in range(start, stop)
                ]
                table += pages
                table += [0] * (most_pages - len(pages))
        # One tensor, of which they are parts: making six takes a decode step as long as a layer.
        states = [chunk.sequence.state_slot for chunk in chunks] if with_states else []
        longest = [max(chunk.num_rows for chunk in chunks), max(lengths)]
        if has_sources:
            places += _sources(chunks, most_pages)
            longest.append(max(places[-2]))
        prefixes = _prefix_lens(chunks) if with_prefixes else []
        parts = (token_ids, positions, starts, lengths, states, prefixes, *places)
        numbers = torch.tensor([*itertools.chain(*parts)], dtype=torch.int64)
        sizes = [len(part) for part in parts]
        built = cls._of(numbers.split(sizes), most_pages, longest, None)
        if numbers.device == torch.device(device):
            return built
        # What lies on the host goes along, so that no backend waits for the device to tell it.
        there = numbers.to(device, non_blocking=True).split(sizes)
        return cls._of(there, most_pages, longest, built)

    @classmethod
    def _of(
        cls,
        parts: Items[torch.Tensor],
        most_pages: int,
        longest: Items[int],
        host: StepBatch | None,
    ) -> StepBatch:
        tokens, positions, query_starts, seq_lens, states, prefixes, slots, pages, *others = parts
        attention = AttentionBatch(
            query_starts=query_starts,
            seq_lens=seq_lens,
            page_table=pages.view(len(seq_lens), most_pages),
            slots=slots,
            max_query_tokens=longest[0],
            max_seq_tokens=longest[1],
            state_slots=states if len(states) else None,
            prefix_lens=prefixes if len(prefixes) else None,
            host=host.attention if host else None,
        )
        further = [
            replace(
                attention,
                slots=slots,
                page_table=pages.view(len(seq_lens), most_pages),
                host=host.further[number] if host else None,
            )
            for number, (slots, pages) in enumerate(zip(others[::2], others[1::2], strict=True))
        ]
        if len(longest) > 2:
            sources = replace(
                further.pop(), slots=attention.slots, seq_lens=others[-2], max_seq_tokens=longest[2]
            )
            further.append(sources)
        return cls(tokens, positions, attention, tuple(further))


def _prefix_lens(chunks: Items[Chunk]) -> list[int]:
    """Return the lengths of prompts; none where no token of the step sees a later one."""
    sequences = [chunk.sequence for chunk in chunks]
    if any(sequence.num_computed + 1 < len(sequence.prompt) for sequence in sequences):
        return [len(sequence.prompt) for sequence in sequences]
    return []


def _sources(chunks: Items[Chunk], most_pages: int) -> list[list[int]]:
    """Return the lengths of the sources, and their page table, a row behind the other."""
    lengths: list[int] = []
    table: list[int] = []
    for chunk in chunks:
        pages = chunk.sequence.source_pages
        lengths.append(len(chunk.sequence.source))
        table += [*pages, *[0] * (most_pages - len(pages))]
    return [lengths, table]
