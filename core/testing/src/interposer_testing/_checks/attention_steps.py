"""Test steps with chunked prefill and decoding, batched as a scheduler does.

Dimensions: T tokens, B sequences, M pages of the longest sequence, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from interposer import AttentionBatch, AttentionSpec
from interposer_testing.workload import paged_batch

# New tokens of each sequence (row) in each step (column), as (pages, tokens); (0, 0) while the
# sequence waits. The steps are: one prompt; prompts and a decode; a chunk and a late prompt; one
# decode; a chunk and decodes; decodes only.
_CHUNKS = (
    ((0, 7), (0, 1), (0, 1), (0, 1), (0, 1), (0, 1)),
    ((0, 0), (1, 0), (0, 1), (0, 0), (0, 1), (0, 1)),  # a prompt of exactly one page
    ((0, 0), (1, -1), (0, 1), (0, 0), (0, 1), (0, 1)),  # decodes fill a page, then start the next
    ((0, 0), (0, 3), (1, 2), (0, 0), (1, 0), (0, 1)),  # a prompt in chunks
    ((0, 0), (0, 0), (2, 1), (0, 0), (0, 1), (0, 1)),
    ((0, 0), (0, 1), (0, 1), (0, 0), (0, 0), (0, 1)),  # a prompt of a single token
)
# Generated tokens at the end of each sequence's first chunk: a preempted sequence recomputes them.
_GENERATED = (0, 0, 0, 0, 2, 0)

# Tokens of each sequence's encoder input, as (pages, tokens); some are shorter than a query.
_SOURCES = ((0, 3), (0, 1), (1, 0), (1, 1), (0, 2), (2, -1))


def num_pages_needed(page_size: int) -> int:
    """Return P, the number of pages that ``chunked_steps`` uses."""
    return sum(_num_pages(chunks, page_size) for chunks in _CHUNKS)


def chunked_steps(spec: AttentionSpec, generator: torch.Generator) -> Iterator[AttentionBatch]:
    """Yield the batches of consecutive steps over one cache, in host memory.

    Every second sequence has randomly scattered pages, all others have consecutive pages. The order
    of sequences differs in each step. For a prefix-LM, the first chunk of a sequence is the prefix.
    """
    page_size = spec.page_size
    tables = _tables(page_size, generator)
    num_cached = [0] * len(_CHUNKS)  # tokens of each sequence
    for step in range(len(_CHUNKS[0])):
        order = torch.randperm(len(_CHUNKS), generator=generator).tolist()
        lengths = {b: _tokens(_CHUNKS[b][step], page_size) for b in order}
        running = [b for b in order if lengths[b]]
        starts = [num_cached[b] for b in running]
        batch = paged_batch(
            [tables[b] for b in running], starts, [lengths[b] for b in running], page_size
        )
        prefixes = [_prefix_tokens(b, page_size) for b in running]
        # Only steps inside a prefix pass prefix_lens: later tokens are causal.
        is_in_prefix = any(start + 1 < p for start, p in zip(starts, prefixes, strict=True))
        if spec.prefix_lm and is_in_prefix:
            batch = replace(batch, prefix_lens=torch.tensor(prefixes))
        yield batch
        for b in running:
            num_cached[b] += lengths[b]


def cross_attention_steps(
    page_size: int, generator: torch.Generator
) -> Iterator[tuple[AttentionBatch, AttentionBatch]]:
    """Yield (store batch, query batch) for the steps of ``chunked_steps`` as cross-attention.

    The store batch writes the encoder inputs that the step reads first. It may be empty.
    """
    lengths = [_tokens(source, page_size) for source in _SOURCES]
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(num_pages_needed(page_size), generator=generator)
    tables = order[: sum(counts)].split(counts)
    stored: set[int] = set()  # sequences whose encoder input is in the cache
    for step in range(len(_CHUNKS[0])):
        running = [b for b in range(len(_CHUNKS)) if _CHUNKS[b][step] != (0, 0)]
        queries = [_tokens(_CHUNKS[b][step], page_size) for b in running]
        new = [b for b in running if b not in stored]
        stored.update(new)
        slots = [_slots(tables[b], lengths[b], page_size) for b in new]
        # ``slots`` is replaced below. The huge page size only keeps its computation inside of the
        # page table, because queries may be longer than the encoder input.
        batch = paged_batch(
            [tables[b] for b in running], [0] * len(running), queries, page_size=10**9
        )
        source_lens = torch.tensor([lengths[b] for b in running])
        yield (
            write_batch(torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)),
            replace(
                batch,
                seq_lens=source_lens,
                slots=torch.zeros_like(batch.slots),
                max_seq_tokens=int(source_lens.max()),
            ),
        )


def write_batch(slots: torch.Tensor) -> AttentionBatch:
    """Create a batch that writes an encoder input to ``slots`` and has no queries."""
    return AttentionBatch(
        query_starts=torch.zeros(1, dtype=torch.int64),
        seq_lens=torch.empty(0, dtype=torch.int64),
        page_table=torch.empty(0, 1, dtype=torch.int64),
        slots=slots,
        max_query_tokens=1,
        max_seq_tokens=1,
    )


def without_old_pages(batch: AttentionBatch, spec: AttentionSpec, zero_page: int) -> AttentionBatch:
    """Replace pages before the sliding window by ``zero_page``, as the engine does.

    Args:
        batch: a batch in host memory.
    """
    if spec.window_tokens is None:
        return batch
    first_positions = batch.seq_lens - batch.query_starts.diff() - spec.window_tokens + 1
    num_outside = first_positions.clamp(min=0) // spec.page_size
    is_outside = torch.arange(batch.page_table.shape[1]) < num_outside[:, None]
    return replace(batch, page_table=batch.page_table.masked_fill(is_outside, zero_page))


def full_cache_step(page_size: int) -> AttentionBatch:
    """Create a batch that writes every slot of every page, as finished sequences did."""
    num_pages = num_pages_needed(page_size)
    tables = list(torch.arange(num_pages).split(1))
    return paged_batch(tables, [0] * num_pages, [page_size] * num_pages, page_size)


def _slots(table: torch.Tensor, num_tokens: int, page_size: int) -> torch.Tensor:
    position = torch.arange(num_tokens)
    return table[position // page_size] * page_size + position % page_size


def _tables(page_size: int, generator: torch.Generator) -> list[torch.Tensor]:
    counts = [_num_pages(chunks, page_size) for chunks in _CHUNKS]
    num_consecutive = sum(counts[::2])
    scattered = num_consecutive + torch.randperm(sum(counts[1::2]), generator=generator)
    tables: list[torch.Tensor] = [torch.empty(0)] * len(counts)
    tables[::2] = torch.arange(num_consecutive).split(counts[::2])
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
