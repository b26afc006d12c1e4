"""Linear attention whose state forgets what a key held before it holds something new.

Dimensions: T tokens, H heads of queries and keys, V heads of values, K key size, D value size, B
sequences, R rows of states.
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
    "gated_delta_rule",
    cases="interposer_ops.recurrence._delta_rule_cases",
    mutates=("states",),
    tolerance=Tolerance(roundings=2),
    batched=("slots", "num_cached"),
    ragged=dict.fromkeys(("query", "key", "value", "decay", "beta"), "query_starts"),
)
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    query_starts: Tensor,
    slots: Tensor,
    num_cached: Tensor,
    scale: float,
) -> Tensor:
    """Decay the state of each head, correct what it answers to the token's key, and query it.

    With S = exp(decay_t) * S_{t-1}: u_t = beta_t * (value_t - S^T key_t), S_t = S + key_t u_t^T,
    y_t = scale * S_t^T query_t, in float32 or wider. Value head v reads query and key head
    v // (V / H). A sequence without a cached token begins with zeros, whatever its row holds.
    Prompts, chunks of them and single tokens are the same op.

    Args:
        query: ``[T, H, K]``, any float dtype, normalised; the sequences lie one behind the other;
            tokens may skip memory, here and in the next four.
        key: ``[T, H, K]``, dtype of ``query``, of unit length.
        value: ``[T, V, D]``, dtype of ``query``; V is a multiple of H.
        decay: ``[T, V]`` float32: the logarithm of the gate, finite and not positive.
        beta: ``[T, V]`` float32: how much of the correction is made, from 0 to 2.
        states: ``[R, V, K, D]`` float32, written in place; rows may skip memory.
        query_starts: ``[B + 1]`` int64: where the tokens of each sequence start, T last.
        slots: ``[B]`` int64, distinct: which row of ``states`` a sequence has. A negative one is
            padding, of which nothing is read or written and the result is zeros.
        num_cached: ``[B]`` int64: tokens of a sequence before the step.
        scale: factor of the result.
    Returns: ``[T, V, D]``, dtype of ``value``.
    Dims: num_heads, num_value_heads, key_size, value_size.
    Source: arXiv:2412.06464 (Gated DeltaNet).
    """
    dtype, wide = value.dtype, torch.promote_types(value.dtype, torch.float32)
    sequences, _ = positions_of(query_starts, value.shape[0])
    query, key, value = (
        without_padding(rows, sequences, slots).to(wide) for rows in (query, key, value)
    )
    grouped = value.shape[1] // key.shape[1]
    queries, keys = (
        rows.repeat_interleave(grouped, 1).transpose(0, 1) for rows in (query, key)
    )  # [V, T, K]
    factors, begun = beta.to(wide), begun_states(states, slots, num_cached, wide)
    between, since = decays_between(decay.to(wide), sequences, query_starts)
    # Of every sequence, then of its own: a copy of the state for each token is far larger.
    tokens = torch.arange(value.shape[0], device=value.device)
    held, read = (
        since[..., None] * (rows @ begun).permute(2, 0, 1, 3)[tokens, sequences]
        for rows in (keys, queries)
    )
    # The updates u of all tokens at once, each of which reads those before it: (I + A) u = w.
    earlier = ((keys @ keys.mT) * between).tril(-1) * factors.T[..., None]
    wanted = (factors[..., None] * (value - held)).transpose(0, 1)  # [V, T, D]
    updates = torch.linalg.solve_triangular(earlier, wanted, upper=False, unitriangular=True)
    scores = (queries @ keys.mT) * between
    y = scale * (read + (scores @ updates).transpose(0, 1))
    last = (query_starts[1:] - 1).clamp(min=0)
    if value.shape[0]:
        left = between[:, last].transpose(0, 1)[..., None] * keys  # [B, V, T, K]
        ends = left.mT @ updates + since[last, :, None, None] * begun
        store_states(states, ends, slots, query_starts)
    return without_padding(y.to(dtype), sequences, slots).contiguous()
