"""State space model with one decay per head (Mamba-2), and lightning attention as a special case.

T tokens, N heads, P head size, G groups, S state size, B sequences, R rows of the state pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops.attention._padded_attention import positions_of
from interposer_ops.recurrence._states import (
    decays_between,
    load_states,
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
    """Scan tokens: decay each head's state, add an outer product, and read the state.

    h_t = exp(steps_t * decay) * h_{t-1} + steps_t * x_t b_t^T, y_t = h_t c_t + skip * x_t, in
    float32 or wider. Head n reads group n // (N / G). The state of a sequence without cached tokens
    starts at zero; the row in ``states`` may hold anything. Prefill, chunked prefill and decode are
    the same op. Lightning attention is this op with ``steps`` of 1, the negative slopes as
    ``decay``, values as ``x``, keys as ``b``, queries as ``c``, and no ``skip``.

    Args:
        x: ``[T, N, P]``, any float dtype; the sequences are concatenated. Tokens need not be
            adjacent in memory, here and in ``steps``, ``b`` and ``c``.
        steps: ``[T, N]`` float32, positive: the step size, after softplus.
        decay: ``[N]`` float32, negative.
        b, c: ``[T, G, S]``, dtype of ``x``; N is a multiple of G.
        skip: ``[N]`` float32, or None.
        states: ``[R, N, P, S]`` float32, updated in place; rows need not be adjacent.
        query_starts: ``[B + 1]`` int64: the first token of each sequence, then T.
        slots: ``[B]`` int64, distinct: the row of ``states`` of each sequence. A negative slot
            marks a padding sequence: nothing is read or written, and the result is zeros.
        num_cached: ``[B]`` int64: number of tokens of the sequence before this step.
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
    widths, initial_states = steps.to(wide), load_states(states, slots, num_cached, wide)
    # Quadratic form: each token contributes to all later tokens of its sequence. Without a loop
    # over tokens, the number of tokens may be symbolic.
    between, since = decays_between(widths * decay.to(wide), sequences, query_starts)
    added = (widths[..., None] * x).transpose(0, 1)  # [N, T, P]
    y = (((queries @ keys.mT) * between) @ added).transpose(0, 1)
    # Read the states of all sequences, then select each token's sequence: one state per token would
    # need far more memory.
    tokens = torch.arange(x.shape[0], device=x.device)
    state_reads = (queries @ initial_states.mT).permute(2, 0, 1, 3)[tokens, sequences]
    y = y + since[..., None] * state_reads
    if skip is not None:
        y = y + skip.to(wide)[:, None] * x
    last = (query_starts[1:] - 1).clamp(min=0)
    if x.shape[0]:
        updates = between[:, last].transpose(0, 1)[..., None] * added  # [B, N, T, P]
        final_states = updates.mT @ keys + since[last, :, None, None] * initial_states
        store_states(states, final_states, slots, query_starts)
    return without_padding(y.to(dtype), sequences, slots).contiguous()
