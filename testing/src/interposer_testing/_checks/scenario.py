"""Sequences that arrive, are prefilled in chunks and decode, as a scheduler would batch them.

Dimensions: T tokens, B sequences, M pages of the longest sequence, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from interposer import AttentionBatch, AttentionSpec
from interposer_testing.workload import paged_batch

# Tokens per step of each sequence, in pages and tokens; none while it waits. The steps are: one
# prompt alone, prompts beside a decode, a chunk and a late prompt, one decode alone, a chunk beside
# decodes, decodes only.
_CHUNKS = (
    ((0, 7), (0, 1), (0, 1), (0, 1), (0, 1), (0, 1)),
    ((0, 0), (1, 0), (0, 1), (0, 0), (0, 1), (0, 1)),  # a prompt of exactly one page
    ((0, 0), (1, -1), (0, 1), (0, 0), (0, 1), (0, 1)),  # decodes fill a page, then begin the next
    ((0, 0), (0, 3), (1, 2), (0, 0), (1, 0), (0, 1)),  # a prompt in chunks
    ((0, 0), (0, 0), (2, 1), (0, 0), (0, 1), (0, 1)),
    ((0, 0), (0, 1), (0, 1), (0, 0), (0, 0), (0, 1)),  # a prompt of a single token
)
# Tokens of each sequence's first chunk that are no part of its prompt: it is computed again.
_GENERATED = (0, 0, 0, 0, 2, 0)

# Tokens of each sequence's source, in pages and tokens: some are shorter than a query.
_SOURCES = ((0, 3), (0, 1), (1, 0), (1, 1), (0, 2), (2, -1))


def pages_needed(page_size: int) -> int:
    """Return P, the pages that ``chunked_steps`` spreads its sequences over."""
    return sum(_num_pages(chunks, page_size) for chunks in _CHUNKS)


def chunked_steps(spec: AttentionSpec, generator: torch.Generator) -> Iterator[AttentionBatch]:
    """Yield the batches of steps in a row over one cache, in host memory.

    The pages of every second sequence are scattered at random, those of the others follow each
    other, and every step has the sequences in an order of its own. Where the spec has prefixes,
    the first chunk of a sequence is its prompt.
    """
    page_size = spec.page_size
    tables = _tables(page_size, generator)
    done = [0] * len(_CHUNKS)
    for step in range(len(_CHUNKS[0])):
        order = torch.randperm(len(_CHUNKS), generator=generator).tolist()
        lengths = {b: _tokens(_CHUNKS[b][step], page_size) for b in order}
        running = [b for b in order if lengths[b]]
        starts = [done[b] for b in running]
        batch = paged_batch(
            [tables[b] for b in running], starts, [lengths[b] for b in running], page_size
        )
        prefixes = [_prefix_tokens(b, page_size) for b in running]
        sees_later = any(start + 1 < p for start, p in zip(starts, prefixes, strict=True))
        if spec.prefix_lm and sees_later:
            batch = replace(batch, prefix_lens=torch.tensor(prefixes))
        yield batch
        for b in running:
            done[b] += lengths[b]


def source_steps(
    page_size: int, generator: torch.Generator
) -> Iterator[tuple[AttentionBatch, AttentionBatch]]:
    """Yield the steps of ``chunked_steps`` as readers of sources, which other pages hold.

    With each comes the batch that writes the sources which are first read in it, perhaps none.
    """
    lengths = [_tokens(source, page_size) for source in _SOURCES]
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(pages_needed(page_size), generator=generator)
    tables = order[: sum(counts)].split(counts)
    written: set[int] = set()
    for step in range(len(_CHUNKS[0])):
        running = [b for b in range(len(_CHUNKS)) if _CHUNKS[b][step] != (0, 0)]
        queries = [_tokens(_CHUNKS[b][step], page_size) for b in running]
        fresh = [b for b in running if b not in written]
        written.update(fresh)
        slots = [_slots(tables[b], lengths[b], page_size) for b in fresh]
        batch = paged_batch(
            [tables[b] for b in running], [0] * len(running), queries, page_size=10**9
        )
        seen = torch.tensor([lengths[b] for b in running])
        yield (
            writing(torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)),
            replace(
                batch,
                seq_lens=seen,
                slots=torch.zeros_like(batch.slots),
                max_seq_tokens=int(seen.max()),
            ),
        )


def writing(slots: torch.Tensor) -> AttentionBatch:
    """Return the batch of a source: slots to write to, and no sequence that reads."""
    return AttentionBatch(
        query_starts=torch.zeros(1, dtype=torch.int64),
        seq_lens=torch.empty(0, dtype=torch.int64),
        page_table=torch.empty(0, 1, dtype=torch.int64),
        slots=slots,
        max_query_tokens=1,
        max_seq_tokens=1,
    )


def trimmed(batch: AttentionBatch, spec: AttentionSpec, zero_page: int) -> AttentionBatch:
    """Return the batch with a page of zeros for those that no new token sees, as the engine does.

    Args:
        batch: in host memory.
    """
    if spec.window_tokens is None:
        return batch
    firsts = batch.seq_lens - batch.query_starts.diff() - spec.window_tokens + 1
    num_unseen = firsts.clamp(min=0) // spec.page_size
    is_unseen = torch.arange(batch.page_table.shape[1]) < num_unseen[:, None]
    return replace(batch, page_table=batch.page_table.masked_fill(is_unseen, zero_page))


def occupying_step(page_size: int) -> AttentionBatch:
    """Return a batch that fills every page, as ended sequences have."""
    num_pages = pages_needed(page_size)
    tables = list(torch.arange(num_pages).split(1))
    return paged_batch(tables, [0] * num_pages, [page_size] * num_pages, page_size)


def _slots(table: torch.Tensor, num_tokens: int, page_size: int) -> torch.Tensor:
    at = torch.arange(num_tokens)
    return table[at // page_size] * page_size + at % page_size


def _tables(page_size: int, generator: torch.Generator) -> list[torch.Tensor]:
    counts = [_num_pages(chunks, page_size) for chunks in _CHUNKS]
    ordered = sum(counts[::2])
    scattered = ordered + torch.randperm(sum(counts[1::2]), generator=generator)
    tables: list[torch.Tensor] = [torch.empty(0)] * len(counts)
    tables[::2] = torch.arange(ordered).split(counts[::2])
    tables[1::2] = scattered.split(counts[1::2])
    return tables


def _num_pages(chunks: tuple[tuple[int, int], ...], page_size: int) -> int:
    return -(-sum(_tokens(chunk, page_size) for chunk in chunks) // page_size)


def _prefix_tokens(sequence: int, page_size: int) -> int:
    counts = (_tokens(chunk, page_size) for chunk in _CHUNKS[sequence])
    return next(count for count in counts if count) - _GENERATED[sequence]


def _tokens(chunk: tuple[int, int], page_size: int) -> int:
    pages, tokens = chunk
    return pages * page_size + tokens
