"""The short convolution in front of state spaces and of linear attention.

Dimensions: T tokens, C channels, W taps, B sequences, S rows of the windows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops.attention._padded_attention import positions_of
from interposer_ops.recurrence._states import (
    begun_states,
    over,
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
    """Convolve each channel with its own taps over the newest tokens of a sequence.

    y_t = bias + sum over j of weight[:, j] * x_{t - (W - 1) + j}, then SiLU where ``silu`` says so,
    in float32 or wider. The tokens before those of the step are in the sequence's window. A
    sequence without a cached token has zeros before it, whatever its window holds. Prompts, chunks
    of them and single tokens are the same op.

    Args:
        x: ``[T, C]``, any float dtype; the sequences lie one behind the other; rows may skip
            memory.
        weight: ``[C, W]``, dtype of ``x``, W from 2 to 8; the last tap is that of the token itself.
        bias: ``[C]``, dtype of ``x``, or None.
        windows: ``[S, C, W - 1]``, dtype of ``x``, written in place: the last W - 1 inputs of a
            sequence, the oldest first; rows may skip memory.
        query_starts: ``[B + 1]`` int64: where the tokens of each sequence start, T last.
        slots: ``[B]`` int64, distinct: which row of ``windows`` a sequence has. A negative one is
            padding, of which nothing is read or written and the result is zeros.
        num_cached: ``[B]`` int64: tokens of a sequence before the step.
    Returns: ``[T, C]``, dtype of ``x``.
    Dims: num_channels, window (W), silu.
    Source: arXiv:2312.00752.
    """
    num_taps = weight.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    begun = begun_states(windows, slots, num_cached, x.dtype)  # [B, C, W - 1]
    sequences, offsets = positions_of(query_starts, x.shape[0])
    tokens = torch.arange(x.shape[0], device=x.device)
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    for tap in range(num_taps):
        distance = num_taps - 1 - tap
        before = begun[sequences, :, (num_taps - 1 + offsets - distance).clamp(max=num_taps - 2)]
        own = x[(tokens - distance).clamp(min=0)]
        inputs = torch.where(over(offsets >= distance, x), own, before)
        total = total + inputs.to(wide) * weight[:, tap].to(wide)
    if bias is not None:
        total = total + bias.to(wide)
    if silu:
        total = functional.silu(total)
    _store_windows(x, begun, windows, query_starts, slots)
    return without_padding(total.to(x.dtype), sequences, slots)


def _store_windows(
    x: Tensor, begun: Tensor, windows: Tensor, query_starts: Tensor, slots: Tensor
) -> None:
    """Write the last W - 1 inputs of each sequence."""
    if not x.shape[0]:
        return
    width, lengths = windows.shape[2], query_starts.diff()
    batch = torch.arange(slots.shape[0], device=x.device)
    columns = []
    for column in range(width):
        place = lengths - width + column  # in the step; negative ones are of the window before
        own = x[(query_starts[:-1] + place).clamp(min=0)]
        old = begun[batch, :, (width + place).clamp(max=width - 1)]
        columns.append(torch.where(over(place >= 0, own), own, old))
    store_states(windows, torch.stack(columns, -1), slots, query_starts)
