"""Sequences in a paged cache, as every op that reads one gets them.

Dimensions: T tokens, B sequences, M pages of the longest sequence, P pages, S page size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from interposer_ops.caches._paging_cases import SPARE_PAGES, scattered, starts_of


@dataclass(frozen=True)
class Lengths:
    """Sequences as (tokens in the cache, tokens of the query), and the tokens of a page."""

    sequences: tuple[tuple[int, int], ...]
    page_size: int = 4

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return sum(tokens for _, tokens in self.sequences)

    @property
    def longest(self) -> int:
        """Return the most tokens that a sequence has in the cache."""
        return max((tokens for tokens, _ in self.sequences), default=0)


_MIXED = ((9, 9), (7, 1), (12, 3), (1, 1))
LENGTHS = {
    "": Lengths(_MIXED),
    "one token": Lengths(((1, 1),)),
    "prefill": Lengths(((9, 9), (4, 4), (1, 1))),
    "prefill around page edges": Lengths(((3, 3), (4, 4), (5, 5), (8, 8))),
    "decode": Lengths(((1, 1), (4, 1), (5, 1), (13, 1))),
    "decode around page edges": Lengths(((15, 1), (16, 1), (17, 1)), page_size=16),
    "chunk after a prefix": Lengths(((11, 4), (8, 4), (6, 5))),
    "several pages": Lengths(((20, 1), (23, 9))),
    "page of one": Lengths(_MIXED, page_size=1),
    "page of 16": Lengths(_MIXED, page_size=16),
    "long": Lengths(((131, 1), (70, 33), (64, 1)), page_size=16),
    "sequence without a query": Lengths(((6, 2), (5, 0), (3, 1))),
    "no sequences": Lengths(()),
}


@dataclass(frozen=True)
class Paged:
    """Where the tokens of a batch lie.

    Attributes:
        arguments: ``page_table``, ``query_starts`` and ``seq_lens``.
        slots: of all cached tokens, int64.
        num_pages: P; some pages belong to no sequence.
    """

    lengths: Lengths
    arguments: dict[str, torch.Tensor]
    slots: torch.Tensor
    num_pages: int

    def filled(self, stored: torch.Tensor, cache: torch.Tensor | None = None) -> torch.Tensor:
        """Return a cache ``[P, S, ...]`` with ``stored`` in the slots and NaN elsewhere.

        Args:
            stored: one row for each slot.
            cache: of NaN, to fill; a new one without it.
        """
        size = self.lengths.page_size
        if cache is None:
            empty = torch.full((self.num_pages, size, *stored.shape[1:]), torch.nan)
            cache = empty.to(stored.dtype)
        cache[self.slots // size, self.slots % size] = stored
        return cache


def paged(lengths: Lengths, generator: torch.Generator) -> Paged:
    """Return the sequences over shuffled pages."""
    cached = [tokens for tokens, _ in lengths.sequences]
    table, slots = scattered(cached, lengths.page_size, generator)
    arguments = {
        "page_table": table,
        "query_starts": starts_of([tokens for _, tokens in lengths.sequences]),
        "seq_lens": torch.tensor(cached, dtype=torch.int64),
    }
    return Paged(lengths, arguments, slots, table.numel() + SPARE_PAGES)
