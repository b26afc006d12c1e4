"""State spaces with one decay per head, and the linear attention that they contain.

Dimensions: T tokens, N heads, P head size, G groups, S state size, B sequences, R rows of states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops.attention._padded_attention import positions_of
from interposer_ops.recurrence._states import (
    begun_states,
    decays_between,
    store_states,
    without_padding,
)


@standard_op(
    "state_space_scan",
    cases="interposer_ops.recurrence._state_space_cases",
    mutates=("states",),
    constants=("decay", "skip"),
    tolerance=Tolerance(roundings=2),
    batched=("slots", "num_cached"),
    ragged=dict.fromkeys(("x", "steps", "b", "c"), "query_starts"),
)
def state_space_scan(
    x: Tensor,
    steps: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    states: Tensor,
    query_starts: Tensor,
    slots: Tensor,
    num_cached: Tensor,
) -> Tensor:
    """Decay the state of each head, add the token's outer product to it, and read it.

    h_t = exp(steps_t * decay) * h_{t-1} + steps_t * x_t b_t^T, y_t = h_t c_t + skip * x_t, in
    float32 or wider. Head n reads group n // (N / G). A sequence without a cached token begins with
    zeros, whatever its row holds. Prompts, chunks of them and single tokens are the same op.
    Lightning attention is this op with ``steps`` of 1, the negative slopes as ``decay``, values as
    ``x``, keys as ``b``, queries as ``c``, and no ``skip``.

    Args:
        x: ``[T, N, P]``, any float dtype; the sequences lie one behind the other; tokens may skip
            memory, here and in ``steps``, ``b`` and ``c``.
        steps: ``[T, N]`` float32, positive: the width of a step, after softplus.
        decay: ``[N]`` float32, negative.
        b, c: ``[T, G, S]``, dtype of ``x``; N is a multiple of G.
        skip: ``[N]`` float32, or None.
        states: ``[R, N, P, S]`` float32, written in place; rows may skip memory.
        query_starts: ``[B + 1]`` int64: where the tokens of each sequence start, T last.
        slots: ``[B]`` int64, distinct: which row of ``states`` a sequence has. A negative one is
            padding, of which nothing is read or written and the result is zeros.
        num_cached: ``[B]`` int64: tokens of a sequence before the step.
    Returns: ``[T, N, P]``, dtype of ``x``.
    Dims: num_heads, num_groups, head_size, state_size.
    Source: arXiv:2405.21060 (Mamba-2); arXiv:2401.04658 (lightning attention).
    """
    dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    sequences, _ = positions_of(query_starts, x.shape[0])
    x, b, c = (without_padding(rows, sequences, slots).to(wide) for rows in (x, b, c))
    grouped = x.shape[1] // b.shape[1]
    keys, queries = (
        rows.repeat_interleave(grouped, 1).transpose(0, 1) for rows in (b, c)
    )  # [N, T, S]
    widths, begun = steps.to(wide), begun_states(states, slots, num_cached, wide)
    # Every token adds to all later ones of its sequence: no loop, so that sizes may be symbols.
    between, since = decays_between(widths * decay.to(wide), sequences, query_starts)
    added = (widths[..., None] * x).transpose(0, 1)  # [N, T, P]
    y = (((queries @ keys.mT) * between) @ added).transpose(0, 1)
    # Of every sequence, then of its own: a copy of the state for each token is far larger.
    tokens = torch.arange(x.shape[0], device=x.device)
    read = (queries @ begun.mT).permute(2, 0, 1, 3)[tokens, sequences]
    y = y + since[..., None] * read
    if skip is not None:
        y = y + skip.to(wide)[:, None] * x
    last = (query_starts[1:] - 1).clamp(min=0)
    if x.shape[0]:
        left = between[:, last].transpose(0, 1)[..., None] * added  # [B, N, T, P]
        ends = left.mT @ keys + since[last, :, None, None] * begun
        store_states(states, ends, slots, query_starts)
    return without_padding(y.to(dtype), sequences, slots).contiguous()
