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
