"""Attention as the packages document it, computed with torch on the CPU.

Dimensions: T tokens, N heads, K kv heads, D head size, E size of a value, B sequences, M pages,
P pages, S page size, L cached tokens.
"""

# mypy: ignore-errors
import torch


def attend_pages(query, starts, pages, lengths, caches, most, scale, window, causal, softcap):
    """Return ``[T, N, E]`` of queries from ``starts`` ``[B + 1]`` on, of at most ``most`` tokens.

    Sequence b has ``lengths[b]`` tokens in ``pages[b]`` of both caches, ``[P, S, K, D]`` and
    ``[P, S, K, E]``. As on a GPU, no value of these is read on the host.
    """
    keys, values = (cache[pages.long()].flatten(1, 2) for cache in caches)  # [B, L, K, D]
    place, step = torch.arange(keys.shape[1]), torch.arange(most)
    written = place < lengths[:, None]
    heads = query.shape[1] // keys.shape[2]
    keys, values = (
        torch.where(written[..., None, None], t.float(), 0.0).repeat_interleave(heads, 2)
        for t in (keys, values)
    )
    counts = starts.diff()
    taken = starts[:-1, None] + step  # [B, Q]
    queries = query[taken.clamp(max=len(query) - 1).long()].float()
    scores = torch.einsum("bqnd,blnd->bnql", queries, keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    distance = ((lengths - counts)[:, None] + step)[..., None] - place  # [B, Q, L]
    left, right = window
    right = 0 if causal else right
    hidden = (~written)[:, None].expand_as(distance)
    if left >= 0:
        hidden = hidden | (distance > left)
    if right >= 0:
        hidden = hidden | (-distance > right)
    weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    found = torch.einsum("bnql,blnd->bqnd", weights, values)
    # Rows that no query has go to one behind the last.
    out = torch.zeros(len(query) + 1, *found.shape[2:], dtype=query.dtype)
    out[torch.where(step < counts[:, None], taken, len(query)).long()] = found.to(query.dtype)
    return out[:-1]


def whole(*numbers):
    """Require int32 without gaps."""
    for tensor in numbers:
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def same(*tensors):
    """Require 16 bits of one kind whose last dimension is contiguous."""
    assert {t.dtype for t in tensors} in ({torch.bfloat16}, {torch.float16})
    assert all(t.stride(-1) == 1 for t in tensors)
