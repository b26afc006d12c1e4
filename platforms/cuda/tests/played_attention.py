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
