"""Latent attention of long prompts: keys and values of every head are made of the latent vectors.

Absorbed projections read C + R elements for each head and pair of tokens, and add up C; heads of
their own take D + R and V, which is about a third of that in DeepSeek's models. But the keys and
values of all tokens that are seen have to be made first, which pays where many tokens read them.

Dimensions: T tokens, U cached tokens that are read, B sequences, N heads, D plain size of a query
and key head, R rotary size, C latent size, V size of a value head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from interposer import AttentionBatch, AttentionSpec, Site
from interposer_ops.attention import (
    merge_attention_states,
    ragged_attention,
    ragged_attention_with_lse,
)

Expand = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Returns keys ``[U, N, D]`` and values ``[U, N, V]`` of latent vectors ``[U, C]``."""

# Tokens of the cache whose keys and values are held at a time.
_PIECE_TOKENS = 4096
# Shorter queries never pay, so that nobody asks how long each of them is.
_LEAST_TOKENS = 256
# Products that are saved, of those that are left. On a CPU, 1.3 of DeepSeek-V2-Lite's prompts of
# 512 tokens give 1.06 of the speed, 1.9 of 1,024 tokens 1.5.
_LEAST_GAIN = 1.5
# Neither a window, a cap, sinks nor slopes.
_MASKS = (None,) * 4


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of what the sequences have in the cache, as keys for all queries of a step.

    Attributes:
        slots: ``[U]`` int64.
        starts: ``[B + 1]`` int64; the keys of sequence b go from entry b to before entry b + 1.
        longest: the most keys of a sequence.
    """

    slots: Tensor
    starts: Tensor
    longest: int


class ExpandedAttention:
    """Attention with a key and a value per head, of which the cache holds none.

    Args:
        spec: of the latent attention.
        plain: D.
        value: V.
    """

    def __init__(self, site: Site, spec: AttentionSpec, plain: int, value: int) -> None:
        heads, self.latent = spec.num_heads, spec.latent_size
        rotary = spec.head_size - spec.latent_size
        sizes = {"head_size": plain + rotary, "value_size": value}
        masks = dict.fromkeys(("windowed", "softcapped", "sinks", "alibi"), False)
        facts = {"num_heads": heads, "num_kv_heads": heads, **sizes, **masks}
        self._alone = site.bind(ragged_attention, **facts, causal=True)
        self._own = site.bind(ragged_attention_with_lse, **facts, causal=True)
        self._earlier = site.bind(ragged_attention_with_lse, **facts, causal=False)
        self._merge = site.bind(merge_attention_states, num_heads=heads, value_size=value)
        self.scale = spec.scale
        # Of a pair of tokens in each form, and of a token that is expanded.
        self._costs = (
            2 * self.latent + rotary,
            plain + rotary + value,
            self.latent * (plain + value),
        )

    def pays(self, batch: AttentionBatch) -> bool:
        """Say whether so long queries are worth it; the host is asked for nothing that it lacks."""
        if batch.max_query_tokens < _LEAST_TOKENS:
            return False
        if batch.host is None and batch.slots.device.type != "cpu":
            return False
        absorbed, expanded, each = self._costs
        pairs = tokens = 0
        for count, seen in _lengths(batch):
            pairs += count * (seen - count) + count * (count + 1) // 2
            tokens += seen
        return pairs * absorbed >= _LEAST_GAIN * (pairs * expanded + tokens * each)

    def __call__(
        self, query: Tensor, vectors: Tensor, expand: Expand, cache: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """Return ``[T, N, V]``.

        Args:
            query: ``[T, N, D + R]``.
            vectors: ``[T, 1, C + R]`` of the same tokens, which are in the cache already.
            cache: ``[P, S, C + R]``.
        """
        starts, longest = batch.query_starts, batch.max_query_tokens

        def attend(op: Any, vectors: Tensor, key_starts: Tensor, most: int, causal: bool) -> Any:
            lengths = starts, key_starts, longest, most
            return op(query, *self._keys(vectors, expand), *lengths, self.scale, causal, *_MASKS)

        pieces = pieces_of(batch, cache.shape[1])
        if not pieces:
            return attend(self._alone, vectors[:, 0], starts, longest, True)  # type: ignore[no-any-return]
        out, lse = attend(self._own, vectors[:, 0], starts, longest, True)
        held = cache.flatten(0, 1)
        for piece in pieces:
            further = attend(self._earlier, held[piece.slots], piece.starts, piece.longest, False)
            out, lse = self._merge(out, lse, *further)
        return out  # type: ignore[no-any-return]

    def _keys(self, vectors: Tensor, expand: Expand) -> tuple[Tensor, Tensor]:
        """Return keys ``[U, N, D + R]`` and values ``[U, N, V]`` of vectors ``[U, C + R]``."""
        keys, values = expand(vectors[:, : self.latent].contiguous())
        rotated = vectors[:, None, self.latent :].expand(-1, keys.shape[1], -1)
        return torch.cat((keys, rotated), -1), values


def pieces_of(batch: AttentionBatch, page_size: int) -> list[Piece]:
    """Return what was in the cache before the step, a range of positions after the other."""
    before = [seen - count for count, seen in _lengths(batch)]
    table, device = batch.on_host().page_table, batch.slots.device
    width = max(page_size, _PIECE_TOKENS // len(before))
    pieces = []
    for first in range(0, max(before), width):
        slots, starts = [], [0]
        for pages, count in zip(table, before, strict=True):
            places = torch.arange(first, max(first, min(count, first + width)))
            slots.append(pages[places // page_size] * page_size + places % page_size)
            starts.append(starts[-1] + len(places))
        longest = max(stop - start for start, stop in pairwise(starts))
        there = torch.cat(slots).to(device), torch.tensor(starts, device=device)
        pieces.append(Piece(*there, longest))
    return pieces


def _lengths(batch: AttentionBatch) -> list[tuple[int, int]]:
    """Return new tokens and all tokens of each sequence."""
    host = batch.on_host()
    return list(zip(host.query_starts.diff().tolist(), host.seq_lens.tolist(), strict=True))
