"""Cases of the paged cache and of attention over it.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, M pages of the longest
sequence, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from interposer import Case
from interposer.op import Dims
from interposer.tuning.workload import typical_sequences

__all__ = [
    "paged_attention_cases",
    "paged_attention_sample",
    "reshape_and_cache_cases",
    "reshape_and_cache_sample",
]

_SPARE_PAGES = 3
_WINDOW_TOKENS, _SOFTCAP = 256, 30.0  # of samples; the dims do not tell how large they are


@dataclass(frozen=True)
class _Batch:
    """Sequences as (tokens in the cache, tokens of the query), and how they are attended to."""

    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    page_size: int = 4
    causal: bool = True
    window_tokens: int | None = None
    softcap: float | None = None
    query_peak: float = 1.0
    fused: bool = False


_MIXED = ((9, 9), (7, 1), (12, 3), (1, 1))
_BATCHES = {
    "one token": _Batch(((1, 1),)),
    "prefill": _Batch(((9, 9), (4, 4), (1, 1))),
    "prefill around page edges": _Batch(((3, 3), (4, 4), (5, 5), (8, 8))),
    "decode": _Batch(((1, 1), (4, 1), (5, 1), (13, 1))),
    "decode around page edges": _Batch(((15, 1), (16, 1), (17, 1)), page_size=16),
    "chunk after a prefix": _Batch(((11, 4), (8, 4), (6, 5))),
    "mixed": _Batch(_MIXED),
    "mixed, MHA": _Batch(_MIXED, num_kv_heads=4),
    "mixed, MQA": _Batch(_MIXED, num_heads=5, num_kv_heads=1),
    "mixed, groups of three": _Batch(_MIXED, num_heads=6),
    "mixed, page of one": _Batch(_MIXED, page_size=1),
    "mixed, page of 16": _Batch(_MIXED, page_size=16),
    "head size 64": _Batch(_MIXED, head_size=64),
    "head size 80": _Batch(_MIXED, head_size=80),
    "head size 128": _Batch(_MIXED, head_size=128),
    "head size 256": _Batch(_MIXED, head_size=256),
    "head size 20": _Batch(_MIXED, head_size=20),
    "window": _Batch(_MIXED, window_tokens=3),
    "window of one": _Batch(_MIXED, window_tokens=1),
    "window longer than the sequences": _Batch(_MIXED, window_tokens=100),
    "window of one page": _Batch(((20, 1), (23, 9)), window_tokens=4),
    "softcap": _Batch(_MIXED, softcap=1.5),
    "window and softcap": _Batch(_MIXED, window_tokens=5, softcap=1.5),
    "not causal": _Batch(_MIXED, causal=False),
    "large scores": _Batch(_MIXED, query_peak=60.0),
    "long": _Batch(((131, 1), (70, 33), (64, 1)), page_size=16),
    "sequence without a query": _Batch(((6, 2), (5, 0), (3, 1))),
    "no sequences": _Batch(()),
    "slices of one projection and one cache": _Batch(_MIXED, fused=True),
}


def paged_attention_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield batches over shuffled pages; slots that hold no token of a sequence are NaN."""
    generator = torch.Generator().manual_seed(seed)
    for label, batch in _BATCHES.items():
        yield _attention(label, batch, dtype, generator)


def paged_attention_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return a typical step over a cache of shuffled pages."""
    batch = _Batch(
        typical_sequences(num_tokens),
        num_heads=int(dims["num_heads"]),
        num_kv_heads=int(dims["num_kv_heads"]),
        head_size=int(dims["head_size"]),
        page_size=int(dims["page_size"]),
        window_tokens=_WINDOW_TOKENS if dims["windowed"] else None,
        softcap=_SOFTCAP if dims["softcapped"] else None,
    )
    generator = torch.Generator().manual_seed(seed)
    return _attention(f"{num_tokens} tokens", batch, dtype, generator)


def _attention(label: str, batch: _Batch, dtype: torch.dtype, generator: torch.Generator) -> Case:
    heads, kv_heads, head_size = batch.num_heads, batch.num_kv_heads, batch.head_size
    query_lens = torch.tensor([tokens for _, tokens in batch.sequences], dtype=torch.int64)
    page_table, slots = _scattered([n for n, _ in batch.sequences], batch.page_size, generator)
    num_pages = page_table.numel() + _SPARE_PAGES
    shape = (num_pages, batch.page_size, kv_heads, head_size)
    keys, values = _caches(shape, dtype, paired=batch.fused)
    for cache in (keys, values):
        stored = _uniform((len(slots), kv_heads, head_size), generator).to(dtype)
        cache[slots // batch.page_size, slots % batch.page_size] = stored
    num_tokens = int(query_lens.sum())
    projection = batch.query_peak * _uniform((num_tokens, heads + 2, head_size), generator)
    query = projection.to(dtype)[:, :heads]
    # Three times the usual, so that random scores differ enough to matter.
    scale = 3 * head_size**-0.5
    largest_score = batch.query_peak * head_size * scale
    arguments = {
        "query": query if batch.fused else query.contiguous(),
        "key_cache": keys,
        "value_cache": values,
        "page_table": page_table,
        "query_starts": torch.cat((torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0))),
        "seq_lens": torch.tensor([n for n, _ in batch.sequences], dtype=torch.int64),
        "max_query_tokens": max((tokens for _, tokens in batch.sequences), default=1),
        "scale": scale,
        "causal": batch.causal,
        "window_tokens": batch.window_tokens,
        "softcap": batch.softcap,
    }
    dims = _dims(
        heads,
        kv_heads,
        head_size,
        batch.page_size,
        windowed=batch.window_tokens is not None,
        softcapped=batch.softcap is not None,
    )
    # Scores stay in float32. The error of one is one of its weight, and weights act on values of at
    # most 1, as large as any sum of them that is stored.
    longest = max((n for n, _ in batch.sequences), default=0)
    return Case(
        label,
        arguments,
        dims,
        reduction=head_size + longest,
        magnitude=1 + largest_score,
        rounded=1.0,
    )


def reshape_and_cache_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield tokens for scattered slots; slots that get no token hold NaN and must keep it."""
    generator = torch.Generator().manual_seed(seed)
    yield _writing("one token", 1, 2, 64, 4, dtype, generator)
    yield _writing("many tokens", 45, 2, 64, 16, dtype, generator)
    yield _writing("every slot", 24, 2, 32, 4, dtype, generator)
    yield _writing("one kv head", 7, 1, 128, 16, dtype, generator)
    yield _writing("odd sizes", 5, 3, 20, 1, dtype, generator)
    yield _writing("head size 80", 5, 2, 80, 4, dtype, generator)
    yield _writing("no tokens", 0, 2, 64, 4, dtype, generator)
    yield _writing("slices of one projection and one cache", 9, 2, 64, 4, dtype, generator, True)


def reshape_and_cache_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return keys that were rotated and values cut out of the projection, for a typical step."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = int(dims["num_heads"]), int(dims["num_kv_heads"])
    head_size, page_size = int(dims["head_size"]), int(dims["page_size"])
    sequences = typical_sequences(num_tokens)
    table, cached = _scattered([tokens for tokens, _ in sequences], page_size, generator)
    ends = torch.tensor([0, *(tokens for tokens, _ in sequences)]).cumsum(0)
    newest = [
        cached[end - query : end] for end, (_, query) in zip(ends[1:], sequences, strict=True)
    ]
    shape = (table.numel() + _SPARE_PAGES, page_size, kv_heads, head_size)
    keys, values = _caches(shape, dtype, paired=False)
    projection = _uniform((num_tokens, heads + 2 * kv_heads, head_size), generator).to(dtype)
    _, key, value = projection.split((heads, kv_heads, kv_heads), dim=1)
    arguments = {
        "key": key.contiguous(),
        "value": value,
        "key_cache": keys,
        "value_cache": values,
        "slots": torch.cat(newest),
    }
    return Case(f"{num_tokens} tokens", arguments, dims, reduction=0)


def _writing(
    label: str,
    num_tokens: int,
    kv_heads: int,
    head_size: int,
    page_size: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    fused: bool = False,
) -> Case:
    num_pages = max(6, -(-num_tokens // page_size))
    keys, values = _caches((num_pages, page_size, kv_heads, head_size), dtype, paired=fused)
    heads = 2 * kv_heads
    projection = torch.randn(num_tokens, heads + 2 * kv_heads, head_size, generator=generator)
    _, key, value = projection.to(dtype).split((heads, kv_heads, kv_heads), dim=1)
    slots = torch.randperm(num_pages * page_size, generator=generator)[:num_tokens]
    arguments = {
        "key": key if fused else key.contiguous(),
        "value": value if fused else value.contiguous(),
        "key_cache": keys,
        "value_cache": values,
        "slots": slots,
    }
    dims = _dims(heads, kv_heads, head_size, page_size)
    return Case(label, arguments, dims, reduction=0)


def _dims(
    heads: int,
    kv_heads: int,
    head_size: int,
    page_size: int,
    *,
    windowed: bool = False,
    softcapped: bool = False,
) -> dict[str, int | bool]:
    """Return the dims of an ``AttentionSpec`` with these facts."""
    return {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": head_size,
        "page_size": page_size,
        "windowed": windowed,
        "softcapped": softcapped,
    }


def _scattered(
    seq_lens: list[int], page_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a page table ``[B, M]`` of shuffled pages and the slots of all cached tokens.

    Every entry has a page of its own, so that entries beyond a sequence's pages name pages that
    hold nothing.
    """
    longest = max((-(-tokens // page_size) for tokens in seq_lens), default=0)
    count = len(seq_lens) * longest
    pages = torch.randperm(count + _SPARE_PAGES, generator=generator)[:count]
    table = pages.view(len(seq_lens), longest)
    slots = [
        table[b, torch.arange(tokens) // page_size] * page_size + torch.arange(tokens) % page_size
        for b, tokens in enumerate(seq_lens)
    ]
    return table, torch.cat(slots) if slots else torch.zeros(0, dtype=torch.int64)


def _caches(
    shape: tuple[int, ...], dtype: torch.dtype, *, paired: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return caches of NaN, ``[P, S, K, D]``; paired ones alternate in memory page by page."""
    pair = (shape[0], 2, *shape[1:]) if paired else (2, *shape)
    keys, values = torch.full(pair, torch.nan, dtype=dtype).unbind(1 if paired else 0)
    return keys, values


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return numbers between -1 and 1, so that the bounds of sums are known."""
    return 2 * torch.rand(shape, generator=generator) - 1
