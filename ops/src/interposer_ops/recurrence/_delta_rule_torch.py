"""The gated delta rule as matrix products over chunks.

Dimensions: T tokens, H heads of queries and keys, V heads of values, K key size, D value size, M
chunks, C tokens of a chunk.
Source: arXiv:2406.06484, section 3 (the updates of a chunk from one triangular system);
arXiv:2412.06464 (with a decay).
"""

from __future__ import annotations

import torch
from torch import Tensor

from interposer_ops._declare import torch_kernel
from interposer_ops.recurrence._chunks_torch import chunk_decays, chunks_of
from interposer_ops.recurrence._states import begun_states, store_states, without_padding


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
    """Compute ``gated_delta_rule``: tokens of a chunk at once, chunks one after the other.

    The updates u of a chunk answer to each other and to the state S that it begins with: with
    A[t, s] = beta_t exp(decays from s to t) key_t . key_s for s < t, (I + A) u = beta (value -
    decayed key S). So u is what the values give less what the keys give times S, and both come
    from one triangular system that needs no state.
    """
    num_tokens, num_heads, value_size = value.shape
    if not num_tokens:
        return torch.empty_like(value, memory_format=torch.contiguous_format)
    wide, grouped = torch.float32, num_heads // key.shape[1]
    chunks = chunks_of(query_starts, num_tokens)
    queries, keys, values = (
        chunks.gathered(rows, wide).transpose(1, 2) for rows in (query, key, value)
    )
    factors = chunks.gathered(beta, wide).transpose(1, 2)[..., None]  # [M, V, C, 1]
    between, since = chunk_decays(chunks.gathered(decay, wide))
    scores = (queries @ keys.mT).repeat_interleave(grouped, 1) * between
    alike = (keys @ keys.mT).repeat_interleave(grouped, 1) * between
    queries, keys = (rows.repeat_interleave(grouped, 1) for rows in (queries, keys))
    sides = torch.cat((factors * values, factors * since[..., None] * keys), -1)
    system = (factors * alike).tril(-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    given, answered = solved.split((value_size, keys.shape[-1]), -1)
    queries = queries * since[..., None]
    left = (keys * between[:, :, -1, :, None]).mT  # [M, V, K, C]
    held = begun_states(states, slots, num_cached, wide)
    y = torch.empty_like(values)
    for chunk in range(len(chunks.sequences)):
        own = chunks.sequences[chunk : chunk + 1]
        state = held.index_select(0, own)[0]
        updates = torch.baddbmm(given[chunk], answered[chunk], state, alpha=-1)
        torch.baddbmm(scores[chunk] @ updates, queries[chunk], state, out=y[chunk])
        state = torch.baddbmm(since[chunk, :, -1, None, None] * state, left[chunk], updates)
        held.index_copy_(0, own, state[None])
    store_states(states, held, slots, query_starts)
    result = chunks.scattered((scale * y).transpose(1, 2).to(value.dtype))
    return without_padding(result, chunks.owners, slots)
