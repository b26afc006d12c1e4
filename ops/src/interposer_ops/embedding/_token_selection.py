"""Choosing rows, and rows of sequences one after the other as against padded ones.

Dimensions: T rows of all sequences, B sequences, L rows of the longest one.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op

_op = partial(
    standard_op,
    cases="interposer_ops.embedding._token_selection_cases",
    tolerance=Tolerance(roundings=0),
)


@_op("select_rows", batched=("indices",))
def select_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of ``x`` at ``indices``, as of the last tokens of all sequences.

    Args:
        x: ``[T, ...]``, any dtype; rows may skip memory.
        indices: ``[S]`` int64, each in ``[0, T)``, in any order, also repeated.
    Returns: ``[S, ...]``, dtype of ``x``.
    Dims: hidden_size: elements of a row.
    """
    return x[indices]


@_op("pad_rows", sample=False)
def pad_rows(x: Tensor, starts: Tensor, max_rows: int) -> Tensor:
    """Give every sequence L rows of its own, zeros behind those that it has.

    Args:
        x: ``[T, ...]``, any float dtype; rows may skip memory.
        starts: ``[B + 1]`` int64, where each sequence starts, ascending from 0 to at most T.
        max_rows: L, at least as many rows as any sequence has.
    Returns: ``[B, L, ...]``, dtype of ``x``.
    Dims: hidden_size: elements of a row.
    """
    places = starts[:-1, None] + torch.arange(max_rows, device=x.device)  # [B, L]
    if not x.shape[0]:
        return x.new_zeros((*places.shape, *x.shape[1:]))
    rows = x[places.clamp(max=x.shape[0] - 1)]
    kept = _as_rows(places < starts[1:, None], rows)
    return torch.where(kept, rows, torch.zeros_like(rows))


@_op("unpad_rows", sample=False)
def unpad_rows(padded: Tensor, starts: Tensor, num_rows: int) -> Tensor:
    """Put the rows of sequences one after the other, zeros behind the last: undo ``pad_rows``.

    Args:
        padded: ``[B, L, ...]``, any float dtype; rows may skip memory.
        starts: ``[B + 1]`` int64, where each sequence is to start, ascending from 0 to at most T,
            by L at most.
        num_rows: T.
    Returns: ``[T, ...]``, dtype of ``padded``.
    Dims: hidden_size: elements of a row.
    """
    num_sequences, max_rows = padded.shape[:2]
    if not num_sequences or not max_rows:
        return padded.new_zeros((num_rows, *padded.shape[2:]))
    places = torch.arange(num_rows, device=padded.device)
    found = torch.searchsorted(starts[1:].contiguous(), places, right=True)
    sequence = found.clamp(max=num_sequences - 1)
    rows = padded[sequence, (places - starts[sequence]).clamp(max=max_rows - 1)]
    return torch.where(_as_rows(found < num_sequences, rows), rows, torch.zeros_like(rows))


def _as_rows(mask: Tensor, rows: Tensor) -> Tensor:
    """Return ``mask`` with as many dimensions as ``rows``."""
    return mask.view(*mask.shape, *(1,) * (rows.ndim - mask.ndim))
