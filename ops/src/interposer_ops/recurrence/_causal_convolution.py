"""Causal depthwise convolution before state spaces and linear attention.

T tokens, C channels, W taps, B sequences, S rows of the window pool.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops.attention._padded_attention import positions_of
from interposer_ops.recurrence._states import (
    expand_mask,
    load_states,
    store_states,
    without_padding,
)


@standard_op(
    "causal_convolution",
    cases="interposer_ops.recurrence._causal_convolution_cases",
    mutates=("windows",),
    constants=("weight", "bias"),
    tolerance=Tolerance(roundings=2),
    batched=("slots", "num_cached"),
    ragged={"x": "query_starts"},
)
def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    windows: Tensor,
    query_starts: Tensor,
    slots: Tensor,
    num_cached: Tensor,
    silu: bool,
) -> Tensor:
    """Convolve each channel with the channel's W taps over the last W tokens of the sequence.

    y_t = bias + sum over j of weight[:, j] * x_{t - (W - 1) + j}, then SiLU if ``silu``, in float32
    or wider. The sequence's window holds the tokens before the step. Zeros precede a sequence
    without cached tokens; the row in ``windows`` may hold anything. Prefill, chunked prefill and
    decode are the same op.

    Args:
        x: ``[T, C]``, any float dtype; the sequences are concatenated; rows need not be adjacent.
        weight: ``[C, W]``, dtype of ``x``, W from 2 to 8; the last tap weights the token itself.
        bias: ``[C]``, dtype of ``x``, or None.
        windows: ``[S, C, W - 1]``, dtype of ``x``, updated in place: the last W - 1 inputs of each
            sequence, the oldest first; rows need not be adjacent.
        query_starts: ``[B + 1]`` int64: the first token of each sequence, then T.
        slots: ``[B]`` int64, distinct: the row of ``windows`` of each sequence. A negative slot
            marks a padding sequence: nothing is read or written, and the result is zeros.
        num_cached: ``[B]`` int64: number of tokens of the sequence before this step.
    Returns: ``[T, C]``, dtype of ``x``.
    Dims: num_channels, window (W), silu.
    Source: arXiv:2312.00752.
    """
    num_taps = weight.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    initial_windows = load_states(windows, slots, num_cached, x.dtype)  # [B, C, W - 1]
    sequences, offsets = positions_of(query_starts, x.shape[0])
    tokens = torch.arange(x.shape[0], device=x.device)
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    for tap in range(num_taps):
        # Both sources are indexed for every token; the clamps keep unselected indices in range.
        distance = num_taps - 1 - tap
        window_inputs = initial_windows[
            sequences, :, (num_taps - 1 + offsets - distance).clamp(max=num_taps - 2)
        ]
        step_inputs = x[(tokens - distance).clamp(min=0)]
        inputs = torch.where(expand_mask(offsets >= distance, x), step_inputs, window_inputs)
        total = total + inputs.to(wide) * weight[:, tap].to(wide)
    if bias is not None:
        total = total + bias.to(wide)
    if silu:
        total = functional.silu(total)
    _store_windows(x, initial_windows, windows, query_starts, slots)
    return without_padding(total.to(x.dtype), sequences, slots)


def _store_windows(
    x: Tensor, initial_windows: Tensor, windows: Tensor, query_starts: Tensor, slots: Tensor
) -> None:
    """Write the last W - 1 inputs of each sequence into its window."""
    if not x.shape[0]:
        return
    width, lengths = windows.shape[2], query_starts.diff()
    batch = torch.arange(slots.shape[0], device=x.device)
    columns = []
    for column in range(width):
        # Position in the step; negative positions are in the window before the step.
        position = lengths - width + column
        step_inputs = x[(query_starts[:-1] + position).clamp(min=0)]
        window_inputs = initial_windows[batch, :, (width + position).clamp(max=width - 1)]
        columns.append(
            torch.where(expand_mask(position >= 0, step_inputs), step_inputs, window_inputs)
        )
    store_states(windows, torch.stack(columns, -1), slots, query_starts)
