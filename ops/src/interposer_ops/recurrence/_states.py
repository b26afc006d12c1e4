"""States of sequences in rows of a pool, which a step reads, continues and writes back.

Dimensions: T tokens, N heads, B sequences, R rows of the pool.
"""

from __future__ import annotations

import torch
from torch import Tensor


def begun_states(states: Tensor, slots: Tensor, num_cached: Tensor, wide: torch.dtype) -> Tensor:
    """Return a copy of the state that each sequence begins with, ``[B, ...]`` of dtype ``wide``.

    Args:
        states: ``[R, ...]``; rows of sequences without a cached token may hold anything.
        slots: ``[B]`` int64; negative ones are padding and begin with zeros.
        num_cached: ``[B]`` int64; a sequence without a cached token begins with zeros.
    """
    held = states[slots.clamp(min=0)].to(wide)
    known = (num_cached > 0) & (slots >= 0)
    return torch.where(over(known, held), held, 0)


def store_states(states: Tensor, ends: Tensor, slots: Tensor, query_starts: Tensor) -> None:
    """Write the state that each sequence ends with into its row.

    Padding, and sequences without a token, write nothing. No value is waited for: they write once
    more what another sequence writes, or, where there is none, what stands in a row.

    Args:
        ends: ``[B, ...]``.
    """
    if not slots.shape[0]:
        return
    written = (slots >= 0) & (query_starts.diff() > 0)
    places = torch.arange(slots.shape[0], device=slots.device)
    source = torch.where(written, places, written.int().argmax())
    rows = slots[source].clamp(min=0)
    values = ends[source].to(states.dtype)
    states[rows] = torch.where(over(written[source], values), values, states[rows])


def without_padding(rows: Tensor, sequences: Tensor, slots: Tensor) -> Tensor:
    """Return ``rows``, ``[T, ...]``, with zeros where a token is of a padding sequence.

    Args:
        sequences: ``[T]`` int64: which sequence a token is of.
    """
    return torch.where(over(slots[sequences] >= 0, rows), rows, 0)


def decays_between(
    logarithms: Tensor, sequences: Tensor, query_starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return by what a state decays from token to token, and from before the step.

    Args:
        logarithms: ``[T, N]``, of the factor of each token and head; finite.
        sequences: ``[T]`` int64: which sequence a token is of.
    Returns: ``[N, T, T]``: the factor of what token s adds when it is token t's turn, in row t, 0
        of later tokens and of other sequences; ``[T, N]``: that of what a sequence began with.
    """
    tokens = torch.arange(sequences.shape[0], device=sequences.device)
    behind = tokens[:, None] > tokens
    # One sum for each pair: differences of sums over the whole step would cancel.
    own = torch.where(behind[..., None], logarithms[:, None], 0).cumsum(0)  # [T, T, N]
    seen = (tokens[:, None] >= tokens) & (sequences[:, None] == sequences)
    between = torch.where(seen[..., None], own, -torch.inf).exp()
    first = query_starts[sequences]
    since = own[tokens, first] + logarithms[first]
    return between.permute(2, 0, 1), since.exp()


def over(mask: Tensor, like: Tensor) -> Tensor:
    """Return ``mask`` of dimension 0 with as many dimensions as ``like``."""
    return mask.view(-1, *(1 for _ in like.shape[1:]))
