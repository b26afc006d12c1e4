"""Split the sequences of a ragged batch into chunks of equal size, without synchronization.

T tokens, B sequences, M chunks, C tokens per chunk, N heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from interposer_ops.attention._padded_attention import positions_of
from interposer_ops.recurrence._states import expand_mask

_MAX_CHUNK_TOKENS = 64


class Chunks(NamedTuple):
    """Chunks in the order of the sequences, padded at the end by chunks without tokens.

    Attributes:
        tokens: ``[M, C]`` int64: the token at each position of a chunk; arbitrary at padding.
        is_token: ``[M, C]`` bool: False at padding.
        sequences: ``[M]`` int64: the sequence of each chunk.
        positions: ``[T]`` int64: the position of each token among the M * C chunk positions.
        token_sequences: ``[T]`` int64: the sequence of each token.
    """

    tokens: Tensor
    is_token: Tensor
    sequences: Tensor
    positions: Tensor
    token_sequences: Tensor

    def gather(self, rows: Tensor, wide: torch.dtype) -> Tensor:
        """Gather token rows ``[T, ...]`` into chunks ``[M, C, ...]``, with zeros at padding."""
        chunk_rows = rows[self.tokens.flatten()]
        chunk_rows = torch.where(expand_mask(self.is_token.flatten(), chunk_rows), chunk_rows, 0)
        return chunk_rows.to(wide).view(*self.tokens.shape, *rows.shape[1:])

    def scatter(self, rows: Tensor) -> Tensor:
        """Return chunk rows ``[M, C, ...]`` in token order, ``[T, ...]``."""
        return rows.flatten(0, 1)[self.positions]


def chunks_of(query_starts: Tensor, num_tokens: int) -> Chunks:
    """Split sequences into chunks; M and C depend only on the numbers of tokens and sequences."""
    num_sequences, device = len(query_starts) - 1, query_starts.device
    average = -(-num_tokens // num_sequences)
    # A power of two near the mean length: short sequences would leave long chunks mostly empty.
    size = min(_MAX_CHUNK_TOKENS, 1 << (average - 1).bit_length())
    # An upper bound from shapes alone: the lengths are known only to the device.
    max_chunks = (num_tokens + num_sequences * (size - 1)) // size
    counts = (query_starts.diff() + size - 1) // size
    ends = counts.cumsum(0)
    starts = ends - counts  # number of chunks before each sequence
    chunks = torch.arange(max_chunks, device=device)
    sequences = torch.bucketize(chunks, ends, right=True).clamp(max=num_sequences - 1)
    first = query_starts[sequences] + (chunks - starts[sequences]) * size
    tokens = first[:, None] + torch.arange(size, device=device)
    is_token = tokens < query_starts[sequences + 1][:, None]
    token_sequences, offsets = positions_of(query_starts, num_tokens)
    positions = starts[token_sequences] * size + offsets
    tokens = tokens.clamp(max=num_tokens - 1)
    return Chunks(tokens, is_token, sequences, positions, token_sequences)


def chunk_decays(logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decay between each pair of tokens of a chunk, and since the chunk's start.

    Args:
        logarithms: ``[M, C, N]``, logarithm of the decay of each token and head.
    Returns: ``[M, N, C, C]``: in row t, column s the decay of token s's contribution at token t; 0
        for later tokens. ``[M, N, C]``: the decay of the chunk's initial state at token t.
    """
    size = logarithms.shape[1]
    heads = logarithms.transpose(1, 2)  # [M, N, C]
    # One sum per pair of tokens: differences of cumulative sums of the chunk would cancel.
    pairs = heads[..., None].expand(*heads.shape, size).tril(-1).cumsum(-2)
    positions = torch.arange(size, device=logarithms.device)
    between = pairs.masked_fill(positions[:, None] < positions, -torch.inf).exp()
    return between, (pairs[..., 0] + heads[..., :1]).exp()
