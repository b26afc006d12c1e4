"""Chunked gated delta rule: matmuls within chunks, a scan over chunks.

T tokens, H query and key heads, V value heads, K key size, D value size, M chunks, C tokens per
chunk.
Source: arXiv:2406.06484, section 3 (the updates of a chunk from one triangular system);
arXiv:2412.06464 (with a decay).
"""

from __future__ import annotations

import torch
from torch import Tensor

from interposer_ops._declare import torch_kernel
from interposer_ops.recurrence._chunks_torch import chunk_decays, chunks_of
from interposer_ops.recurrence._states import load_states, store_states, without_padding


@torch_kernel("gated_delta_rule", "chunked", traceable=False)
def gated_delta_rule_chunked(
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
    """Compute ``gated_delta_rule``: the tokens of a chunk at once, the chunks one after another.

    The updates u of a chunk depend on each other and on the chunk's initial state S: with
    A[t, s] = beta_t exp(decays from s to t) key_t . key_s for s < t, (I + A) u = beta (value -
    decayed key S). So u = U - W S, where U and W solve one triangular system with the values and
    the keys as right-hand sides, for all chunks before any state is known.
    """
    num_tokens, num_heads, value_size = value.shape
    if not num_tokens:
        return torch.empty_like(value, memory_format=torch.contiguous_format)
    wide, grouped = torch.float32, num_heads // key.shape[1]
    chunks = chunks_of(query_starts, num_tokens)
    queries, keys, values = (
        chunks.gather(rows, wide).transpose(1, 2) for rows in (query, key, value)
    )
    factors = chunks.gather(beta, wide).transpose(1, 2)[..., None]  # [M, V, C, 1]
    between, since = chunk_decays(chunks.gather(decay, wide))
    scores = (queries @ keys.mT).repeat_interleave(grouped, 1) * between
    key_products = (keys @ keys.mT).repeat_interleave(grouped, 1) * between
    queries, keys = (rows.repeat_interleave(grouped, 1) for rows in (queries, keys))
    # One triangular solve for both right-hand sides: U from the values, W from the decayed keys.
    sides = torch.cat((factors * values, factors * since[..., None] * keys), -1)
    system = (factors * key_products).tril(-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    value_updates, key_updates = solved.split((value_size, keys.shape[-1]), -1)
    queries = queries * since[..., None]
    decayed_keys = (keys * between[:, :, -1, :, None]).mT  # [M, V, K, C]
    sequence_states = load_states(states, slots, num_cached, wide)
    y = torch.empty_like(values)
    # The only sequential part: a chunk needs the state after the chunk before.
    for chunk in range(len(chunks.sequences)):
        sequence = chunks.sequences[chunk : chunk + 1]
        state = sequence_states.index_select(0, sequence)[0]
        updates = torch.baddbmm(value_updates[chunk], key_updates[chunk], state, alpha=-1)
        torch.baddbmm(scores[chunk] @ updates, queries[chunk], state, out=y[chunk])
        state = torch.baddbmm(since[chunk, :, -1, None, None] * state, decayed_keys[chunk], updates)
        sequence_states.index_copy_(0, sequence, state[None])
    store_states(states, sequence_states, slots, query_starts)
    result = chunks.scatter((scale * y).transpose(1, 2).to(value.dtype))
    return without_padding(result, chunks.token_sequences, slots)
