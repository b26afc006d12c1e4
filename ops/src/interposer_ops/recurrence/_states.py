"""Load, decay and store the states of sequences in a state pool.

T tokens, N heads, B sequences, R rows of the pool.
"""

from __future__ import annotations

import torch
from torch import Tensor


def load_states(states: Tensor, slots: Tensor, num_cached: Tensor, wide: torch.dtype) -> Tensor:
    """Copy the initial state of each sequence, ``[B, ...]`` of dtype ``wide``.

    Args:
        states: ``[R, ...]``; rows of sequences without cached tokens may hold anything.
        slots: ``[B]`` int64; a negative slot marks padding, whose state is zero.
        num_cached: ``[B]`` int64; the state of a sequence without cached tokens is zero.
    """
    rows = states[slots.clamp(min=0)].to(wide)
    has_state = (num_cached > 0) & (slots >= 0)
    return torch.where(expand_mask(has_state, rows), rows, 0)


def store_states(states: Tensor, final_states: Tensor, slots: Tensor, query_starts: Tensor) -> None:
    """Write the final state of each sequence into the sequence's row of the pool.

    Padding and sequences without tokens must not change the pool. The number of valid sequences is
    known only to the device. To avoid a synchronization, each such sequence repeats the write of a
    valid sequence, or rewrites a row unchanged if no sequence is valid.

    Args:
        final_states: ``[B, ...]``.
    """
    if not slots.shape[0]:
        return
    is_written = (slots >= 0) & (query_starts.diff() > 0)
    sequences = torch.arange(slots.shape[0], device=slots.device)
    source = torch.where(is_written, sequences, is_written.int().argmax())
    rows = slots[source].clamp(min=0)
    values = final_states[source].to(states.dtype)
    states[rows] = torch.where(expand_mask(is_written[source], values), values, states[rows])


def without_padding(rows: Tensor, sequences: Tensor, slots: Tensor) -> Tensor:
    """Zero the ``rows``, ``[T, ...]``, of tokens in padding sequences.

    Args:
        sequences: ``[T]`` int64: the sequence of each token.
    """
    return torch.where(expand_mask(slots[sequences] >= 0, rows), rows, 0)


def decays_between(
    logarithms: Tensor, sequences: Tensor, query_starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the decay between each pair of tokens, and since the start of the step.

    Args:
        logarithms: ``[T, N]``, logarithm of the decay of each token and head; finite.
        sequences: ``[T]`` int64: the sequence of each token.
    Returns: ``[N, T, T]``: in row t, column s the decay of token s's contribution at token t; 0 for
        later tokens and other sequences. ``[T, N]``: the decay of the initial state at token t.
    """
    tokens = torch.arange(sequences.shape[0], device=sequences.device)
    is_later = tokens[:, None] > tokens
    # One sum per pair of tokens: differences of cumulative sums of the step would cancel.
    sums = torch.where(is_later[..., None], logarithms[:, None], 0).cumsum(0)  # [T, T, N]
    is_visible = (tokens[:, None] >= tokens) & (sequences[:, None] == sequences)
    between = torch.where(is_visible[..., None], sums, -torch.inf).exp()
    first = query_starts[sequences]
    since = sums[tokens, first] + logarithms[first]
    return between.permute(2, 0, 1), since.exp()


def expand_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Append dimensions of size 1 to ``mask``, ``[T]``, up to the dimensions of ``like``."""
    return mask.view(-1, *(1 for _ in like.shape[1:]))
