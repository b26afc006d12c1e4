"""Chunked state space scan: matmuls within chunks, a scan over chunks.

T tokens, N heads, P head size, G groups, S state size, M chunks, C tokens per chunk.
Source: arXiv:2405.21060, section 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interposer_ops._declare import torch_kernel
from interposer_ops.recurrence._chunks_torch import chunk_decays, chunks_of
from interposer_ops.recurrence._states import load_states, store_states, without_padding


@torch_kernel("state_space_scan", "chunked", traceable=False)
def state_space_scan_chunked(
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
    """Compute ``state_space_scan``: the tokens of a chunk at once, the chunks one after another."""
    num_tokens, num_heads, _ = x.shape
    if not num_tokens:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    wide, grouped = torch.float32, num_heads // b.shape[1]
    chunks = chunks_of(query_starts, num_tokens)
    widths = chunks.gather(steps, wide)  # [M, C, N]
    inputs = chunks.gather(x, wide).transpose(1, 2)  # [M, N, C, P]
    keys, queries = (chunks.gather(rows, wide).transpose(1, 2) for rows in (b, c))
    between, since = chunk_decays(widths * decay)
    added = widths.transpose(1, 2)[..., None] * inputs
    scores = (queries @ keys.mT).repeat_interleave(grouped, 1) * between
    # The tokens of the same chunk; the loop below adds the contribution of the earlier state.
    y = scores @ added  # [M, N, C, P]
    keys, queries = (rows.repeat_interleave(grouped, 1) for rows in (keys, queries))
    queries = queries * since[..., None]
    # Each token, decayed to the end of the chunk.
    updates = (added * between[:, :, -1, :, None]).mT  # [M, N, P, C]
    sequence_states = load_states(states, slots, num_cached, wide)
    for chunk in range(len(chunks.sequences)):
        sequence = chunks.sequences[chunk : chunk + 1]
        state = sequence_states.index_select(0, sequence)[0]
        y[chunk] += queries[chunk] @ state.mT
        state = torch.baddbmm(since[chunk, :, -1, None, None] * state, updates[chunk], keys[chunk])
        sequence_states.index_copy_(0, sequence, state[None])
    if skip is not None:
        y += skip[:, None, None] * inputs
    store_states(states, sequence_states, slots, query_starts)
    result = chunks.scatter(y.transpose(1, 2).to(x.dtype))
    return without_padding(result, chunks.token_sequences, slots)
