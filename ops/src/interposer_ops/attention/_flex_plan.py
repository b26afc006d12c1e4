"""Plans of a step for ``flex_gathered``: all sequences as rows of one product, and its mask.

Dimensions: T tokens, B sequences, M pages of the longest sequence, L cached tokens that are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from interposer import AttentionBatch


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """What is the same for all layers.

    Attributes:
        slots: ``[T]`` int64, that are written.
        page_table: ``[B, M]`` int64.
        lengths, firsts: ``[B]`` int64; how many tokens of each sequence are read, from which on.
        num_keys: L.
        mask: which of ``L`` keys each of ``T`` queries sees; None where there is no query.
    """

    slots: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor
    firsts: torch.Tensor
    num_keys: int
    mask: BlockMask | None


def make_plan(batch: AttentionBatch, window_tokens: int | None) -> FlexPlan:
    """Return the plan for ``batch``; the host waits for the number of keys."""
    counts = batch.query_starts.diff()
    lengths = batch.seq_lens
    if window_tokens is not None:
        lengths = torch.minimum(lengths, counts + (window_tokens - 1))
    firsts = batch.seq_lens - lengths
    num_queries, num_keys = len(batch.slots), int(lengths.sum())
    mask = None
    if num_queries:
        queries = _places(counts, batch.seq_lens - counts, num_queries)
        keys = _places(lengths, firsts, num_keys)
        mask = _mask(queries, keys, window_tokens)
    return FlexPlan(batch.slots, batch.page_table, lengths, firsts, num_keys, mask)


def _places(
    lengths: torch.Tensor, firsts: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequence and the position in it of each row, of ``lengths`` from ``firsts`` on."""
    sequences = torch.arange(len(lengths), device=lengths.device)
    sequences = sequences.repeat_interleave(lengths, output_size=total)
    begins = lengths.cumsum(0) - lengths
    positions = torch.arange(total, device=lengths.device) - (begins - firsts)[sequences]
    return sequences, positions


def _mask(
    queries: tuple[torch.Tensor, torch.Tensor],
    keys: tuple[torch.Tensor, torch.Tensor],
    window_tokens: int | None,
) -> BlockMask:
    (query_sequence, query_position), (key_sequence, key_position) = queries, keys

    def is_seen(
        _sequence: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        distance = query_position[query] - key_position[key]
        seen = (query_sequence[query] == key_sequence[key]) & (distance >= 0)
        return seen if window_tokens is None else seen & (distance < window_tokens)

    device = str(query_position.device)
    return create_block_mask(is_seen, None, None, len(query_position), len(key_position), device)
