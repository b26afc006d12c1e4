"""Gated delta rule (Gated DeltaNet): linear attention that replaces the value stored for a key.

T tokens, H query and key heads, V value heads, K key size, D value size, B sequences, R rows of the
state pool.
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
    """Scan tokens: decay each head's state, correct the value stored for the key, read the state.

    With S = exp(decay_t) * S_{t-1}: u_t = beta_t * (value_t - S^T key_t), S_t = S + key_t u_t^T,
    y_t = scale * S_t^T query_t, in float32 or wider. Value head v reads query and key head
    v // (V / H). The state of a sequence without cached tokens starts at zero; the row in
    ``states`` may hold anything. Prefill, chunked prefill and decode are the same op.

    Args:
        query: ``[T, H, K]``, any float dtype, normalised; the sequences are concatenated. Tokens
            need not be adjacent in memory, here and in the next four arguments.
        key: ``[T, H, K]``, dtype of ``query``, of unit length.
        value: ``[T, V, D]``, dtype of ``query``; V is a multiple of H.
        decay: ``[T, V]`` float32: the logarithm of the gate, finite and not positive.
        beta: ``[T, V]`` float32: step size of the correction, from 0 to 2.
        states: ``[R, V, K, D]`` float32, updated in place; rows need not be adjacent.
        query_starts: ``[B + 1]`` int64: the first token of each sequence, then T.
        slots: ``[B]`` int64, distinct: the row of ``states`` of each sequence. A negative slot
            marks a padding sequence: nothing is read or written, and the result is zeros.
        num_cached: ``[B]`` int64: number of tokens of the sequence before this step.
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
    factors, initial_states = beta.to(wide), load_states(states, slots, num_cached, wide)
    between, since = decays_between(decay.to(wide), sequences, query_starts)
    # Read the states of all sequences, then select each token's sequence: one state per token would
    # need far more memory.
    tokens = torch.arange(value.shape[0], device=value.device)
    stored_values, state_reads = (
        since[..., None] * (rows @ initial_states).permute(2, 0, 1, 3)[tokens, sequences]
        for rows in (keys, queries)
    )
    # Each update u depends on the earlier ones: solve (I + A) u = w for the updates of all tokens.
    system = ((keys @ keys.mT) * between).tril(-1) * factors.T[..., None]
    targets = (factors[..., None] * (value - stored_values)).transpose(0, 1)  # [V, T, D]
    updates = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    scores = (queries @ keys.mT) * between
    y = scale * (state_reads + (scores @ updates).transpose(0, 1))
    last = (query_starts[1:] - 1).clamp(min=0)
    if value.shape[0]:
        decayed_keys = between[:, last].transpose(0, 1)[..., None] * keys  # [B, V, T, K]
        final_states = decayed_keys.mT @ updates + since[last, :, None, None] * initial_states
        store_states(states, final_states, slots, query_starts)
    return without_padding(y.to(dtype), sequences, slots).contiguous()
