"""Sequences of a ragged batch cut into chunks of one length, without waiting for a value.

Dimensions: T tokens, B sequences, M chunks, C tokens of a chunk, N heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from interposer_ops.attention._padded_attention import positions_of
from interposer_ops.recurrence._states import over

_MOST_TOKENS = 64


class Chunks(NamedTuple):
    """Chunks of sequences, in their order; those behind the last one hold no token.

    Attributes:
        tokens: ``[M, C]`` int64, which token stands where; any where none does.
        inside: ``[M, C]`` bool, where there is one.
        sequences: ``[M]`` int64: which sequence a chunk is of.
        places: ``[T]`` int64: where a token stands among the M C places.
        owners: ``[T]`` int64: which sequence a token is of.
    """

    tokens: Tensor
    inside: Tensor
    sequences: Tensor
    places: Tensor
    owners: Tensor

    def gathered(self, rows: Tensor, wide: torch.dtype) -> Tensor:
        """Return the rows of all chunks, ``[M, C, ...]``, zeros where there is no token."""
        chosen = rows[self.tokens.flatten()]
        chosen = torch.where(over(self.inside.flatten(), chosen), chosen, 0)
        return chosen.to(wide).view(*self.tokens.shape, *rows.shape[1:])

    def scattered(self, rows: Tensor) -> Tensor:
        """Return ``[T, ...]`` of the ``[M, C, ...]`` of all chunks."""
        return rows.flatten(0, 1)[self.places]


def chunks_of(query_starts: Tensor, num_tokens: int) -> Chunks:
    """Return the chunks of sequences; the sizes alone say how long and how many they are."""
    num_sequences, device = len(query_starts) - 1, query_starts.device
    usual = -(-num_tokens // num_sequences)
    size = min(_MOST_TOKENS, 1 << (usual - 1).bit_length())
    most = (num_tokens + num_sequences * (size - 1)) // size
    counts = (query_starts.diff() + size - 1) // size
    ends = counts.cumsum(0)
    begins = ends - counts  # chunks before each sequence
    chunks = torch.arange(most, device=device)
    sequences = torch.bucketize(chunks, ends, right=True).clamp(max=num_sequences - 1)
    first = query_starts[sequences] + (chunks - begins[sequences]) * size
    tokens = first[:, None] + torch.arange(size, device=device)
    inside = tokens < query_starts[sequences + 1][:, None]
    owners, offsets = positions_of(query_starts, num_tokens)
    places = begins[owners] * size + offsets
    return Chunks(tokens.clamp(max=num_tokens - 1), inside, sequences, places, owners)


def chunk_decays(logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """Return by what a state decays within chunks.

    Args:
        logarithms: ``[M, C, N]``, of the factor of each token and head.
    Returns: ``[M, N, C, C]``: the factor of what token s adds when it is token t's turn, in row t;
        0 of later ones. ``[M, N, C]``: that of what a chunk began with.
    """
    size = logarithms.shape[1]
    heads = logarithms.transpose(1, 2)  # [M, N, C]
    # One sum for each pair: differences of sums over the whole chunk would cancel.
    pairs = heads[..., None].expand(*heads.shape, size).tril(-1).cumsum(-2)
    places = torch.arange(size, device=logarithms.device)
    between = pairs.masked_fill(places[:, None] < places, -torch.inf).exp()
    return between, (pairs[..., 0] + heads[..., :1]).exp()
