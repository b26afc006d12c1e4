"""Attention as the packages document it, computed with torch on the processor.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, M pages, P pages, S page size,
L cached tokens.
"""

# mypy: ignore-errors
import torch


def attend(query, keys, values, scale, window=(-1, -1), causal=True, softcap=0.0):
    """Return ``[T, N, D]`` float32; masks are aligned to the bottom right corner."""
    heads = query.shape[1] // keys.shape[1]
    keys, values = (t.float().repeat_interleave(heads, 1) for t in (keys, values))
    scores = torch.einsum("tnd,lnd->ntl", query.float(), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    length, count = len(keys), len(query)
    place = torch.arange(count)[:, None] + length - count
    distance = place - torch.arange(length)
    left, right = window
    right = 0 if causal else right
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= -distance > right
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("ntl,lnd->tnd", weights, values)


def attend_pages(query, starts, pages, lengths, caches, most, scale, window, causal, softcap):
    """Return ``[T, N, D]`` of queries from ``starts`` ``[B + 1]`` on, of at most ``most`` tokens.

    Sequence b has ``lengths[b]`` tokens in ``pages[b]`` of both caches ``[P, S, K, D]``. As on a
    GPU, no value of these is read on the host.
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
    out = torch.zeros(len(query) + 1, *query.shape[1:], dtype=query.dtype)
    out[torch.where(step < counts[:, None], taken, len(query)).long()] = found.to(query.dtype)
    return out[:-1]


def rows(cache, pages, length):
    """Return ``[L, K, D]`` of ``[P, S, K, D]``."""
    return cache[pages.long()].flatten(0, 1)[:length]


def whole(*numbers):
    """Require int32 without gaps."""
    for tensor in numbers:
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def same(*tensors):
    """Require 16 bits of one kind whose last dimension is contiguous."""
    assert {t.dtype for t in tensors} in ({torch.bfloat16}, {torch.float16})
    assert all(t.stride(-1) == 1 for t in tensors)
