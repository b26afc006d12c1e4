"""Cases of attention over a paged cache.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from interposer import Case, Dims
from interposer_ops._case_pruning import combined
from interposer_ops.attention._paged_sequences_cases import LENGTHS, Lengths, paged
from interposer_ops.caches._paging_cases import attention_dims, caches
from interposer_testing.cases import Axis, CaseSpace, Point, longest_row, peak, uniform
from interposer_testing.workload import typical_sequences

_WINDOW_TOKENS, _SOFTCAP = 256, 30.0  # of samples; the dims do not tell how large they are
_PREFIX_TOKENS = 64  # of samples

# Heads, kv heads, head size.
_HEADS = {
    "": (4, 2, 32),
    "one head": (1, 1, 32),
    "MHA": (4, 4, 32),
    "MQA": (5, 1, 32),
    "groups of three": (6, 2, 32),
    "groups of eight": (16, 2, 16),
    "head size 20": (4, 2, 20),
    "head size 64": (4, 2, 64),
    "head size 80": (4, 2, 80),
    "head size 128": (4, 2, 128),
    "head size 256": (4, 2, 256),
}
_MASKS: dict[str, dict[str, Any]] = {
    "": {},
    "window": {"window_tokens": 3},
    "window of one": {"window_tokens": 1},
    "window of one page": {"window_tokens": 4},
    "window longer than the sequences": {"window_tokens": 500},
    "not causal": {"causal": False},
    "prefix": {"prefix": 5},
    "prefix and window": {"prefix": 5, "window_tokens": 3},
}
_FEATURES: dict[str, dict[str, Any]] = {
    "": {},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": None},
    "float32 sinks": {"sinks": torch.float32},
    "softcap and sinks": {"softcap": 1.5, "sinks": None},
    "ALiBi": {"alibi": True},
    "softcap and ALiBi": {"softcap": 1.5, "alibi": True},
    "large scores": {"query_peak": 60.0},
    "e4m3 cache": {"cache_dtype": torch.float8_e4m3fn},
    "e5m2 cache": {"cache_dtype": torch.float8_e5m2, "scales": 1},
    "e4m3 cache, scales of heads": {"cache_dtype": torch.float8_e4m3fn, "scales": 0},
    "e4m3 cache and sinks": {"cache_dtype": torch.float8_e4m3fn, "scales": 1, "sinks": None},
    "int8 cache": {"cache_dtype": torch.int8, "scales": 1},
    "int8 cache, scales of heads": {"cache_dtype": torch.int8, "scales": 0},
}
_AXES = (
    Axis("batch", LENGTHS),
    Axis("heads", _HEADS),
    Axis("mask", _MASKS),
    Axis("feature", _FEATURES),
)
_PAIRED = {
    "batch": ("prefill", "decode", "chunk after a prefix", "long"),
    "heads": ("MHA", "MQA", "groups of three", "head size 80"),
    "mask": ("window", "window of one page", "not causal", "prefix"),
    "feature": (
        "softcap",
        "sinks",
        "softcap and sinks",
        "ALiBi",
        "large scores",
        "e4m3 cache, scales of heads",
        "int8 cache, scales of heads",
    ),
}
_few = combined(_AXES, _PAIRED)
_of_three = {**_PAIRED, "batch": ("decode", "chunk after a prefix"), "heads": ()}
_no_heads = combined(_AXES, _of_three, most=3)


def _valid(point: Point, dtype: torch.dtype) -> bool:
    """Keep pairs of options, and how batches, masks and features meet.

    ALiBi is of causal models: what it means for later tokens is for encoders to say.
    """
    sees_later = point["mask"].get("prefix") or not point["mask"].get("causal", True)
    if sees_later and point["feature"].get("alibi"):
        return False
    return _few(point, dtype) or _no_heads(point, dtype)


def _paged_attention(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    options = {**point["mask"], **point["feature"]}
    return _attention(point["batch"], point["heads"], options, dtype, generator)


paged_attention_cases = CaseSpace(
    _paged_attention,
    *_AXES,
    strided={
        "query": "outer",
        "key_cache": "outer",
        "value_cache": "outer",
        "page_table": "outer",
        **dict.fromkeys(("query_starts", "seq_lens", "sinks", "alibi_slopes"), "offset"),
        **dict.fromkeys(("prefix_lens", "key_scale", "value_scale"), "offset"),
    },
    crossed={
        "batch": ("", "decode", "long"),
        "heads": ("", "head size 80"),
        "mask": ("", "prefix"),
        "feature": ("", "softcap and sinks", "ALiBi", "e4m3 cache, scales of heads"),
    },
    alone={"batch": ("no sequences",)},
    valid=_valid,
)
"""Batches over shuffled pages; slots that hold no token of a sequence are NaN."""


def paged_attention_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return a typical step over a cache of shuffled pages."""
    name = str(dims.get("cache_dtype", "")) or cache_dtype_name(dtype)
    options = {
        "window_tokens": _WINDOW_TOKENS if dims["windowed"] else None,
        "softcap": _SOFTCAP if dims["softcapped"] else None,
        "prefix": _PREFIX_TOKENS if dims.get("prefix_lm") else 0,
        "alibi": bool(dims.get("alibi")),
        "cache_dtype": getattr(torch, name),
        **({"sinks": None} if dims.get("sinks") else {}),
        **({} if name == cache_dtype_name(dtype) else {"scales": 1}),
    }
    heads = tuple(int(dims[n]) for n in ("num_heads", "num_kv_heads", "head_size"))
    lengths = Lengths(typical_sequences(num_tokens), int(dims["page_size"]))
    generator = torch.Generator().manual_seed(seed)
    return _attention(lengths, heads, options, dtype, generator, f"{num_tokens} tokens")


def cache_dtype_name(dtype: torch.dtype) -> str:
    """Return how dims name ``dtype``."""
    return str(dtype).removeprefix("torch.")


def _attention(
    lengths: Lengths,
    sizes: tuple[int, ...],
    options: Mapping[str, Any],
    dtype: torch.dtype,
    generator: torch.Generator,
    label: str = "",
) -> Case:
    heads, kv_heads, head_size = sizes
    batch = paged(lengths, generator)
    stored_dtype = options.get("cache_dtype", dtype)
    shape = (batch.num_pages, lengths.page_size, kv_heads, head_size)
    keys, values = caches(shape, stored_dtype, paired=False)
    rows = (len(batch.slots), kv_heads, head_size)
    key_scale, value_scale = (_cache_scale(options, kv_heads, generator) for _ in range(2))
    for cache, factor in ((keys, key_scale), (values, value_scale)):
        bound = 1.0 if factor is None else factor[:, None]
        stored = uniform(rows, torch.float32, generator) / bound
        batch.filled(stored.to(stored_dtype), cache)
    query_peak = options.get("query_peak", 1.0)
    query = uniform(
        (lengths.num_tokens, heads, head_size), dtype, generator, -query_peak, query_peak
    )
    sinks = slopes = prefixes = None
    if "sinks" in options:
        sinks = uniform((heads,), options["sinks"] or dtype, generator, -1.0, 2.0)
    if options.get("alibi"):
        slopes = 2.0 ** -torch.arange(heads, dtype=torch.float32)
    if options.get("prefix"):
        # Around the prefix, one of no token, and one that is not in the cache as a whole.
        several = options["prefix"] * torch.tensor([1, 0, 2, 100])
        prefixes = several.repeat(len(lengths.sequences))[: len(lengths.sequences)]
    # Three times the usual, so that random scores differ enough to matter.
    scale = 3 * head_size**-0.5
    arguments = {
        "query": query,
        "key_cache": keys,
        "value_cache": values,
        **batch.arguments,
        "max_query_tokens": max((tokens for _, tokens in lengths.sequences), default=1),
        "scale": scale,
        "causal": options.get("causal", True),
        "window_tokens": options.get("window_tokens"),
        "softcap": options.get("softcap"),
        "sinks": sinks,
        "alibi_slopes": slopes,
        "prefix_lens": prefixes,
        "key_scale": key_scale,
        "value_scale": value_scale,
    }
    dims: Dims = {
        **attention_dims(heads, kv_heads, head_size, lengths.page_size),
        "windowed": options.get("window_tokens") is not None,
        "softcapped": options.get("softcap") is not None,
        "sinks": sinks is not None,
        "alibi": slopes is not None,
        "prefix_lm": prefixes is not None,
        "cache_dtype": cache_dtype_name(stored_dtype),
    }
    # Scores stay in float32. The error of one is one of its weight, and weights act on values, as
    # large as any sum of them that is stored: 1, or an eighth more where 8 bits rounded them up.
    largest_value = 1.0 if stored_dtype == dtype else 1.125
    held = keys.float().nan_to_num()
    if not stored_dtype.is_floating_point:
        held = held.masked_fill(held == -128, 0.0)  # of slots that hold no token
    largest_key = longest_row(held)
    if key_scale is not None:
        largest_key *= peak(key_scale)
    largest_score = scale * longest_row(query) * largest_key
    if slopes is not None:
        largest_score += lengths.longest * peak(slopes)
    return Case(
        label,
        arguments,
        dims,
        reduction=head_size + lengths.longest,
        magnitude=(1 + largest_score) * largest_value,
        rounded=largest_value,
    )


def _cache_scale(
    options: Mapping[str, Any], kv_heads: int, generator: torch.Generator
) -> torch.Tensor | None:
    """Return a scale by which numbers up to 1 fill the range of 8 bits; 0 asks for one a head."""
    if "scales" not in options:
        return None
    count = options["scales"] or kv_heads
    least = 0.008 if options.get("cache_dtype") == torch.int8 else 0.004
    return uniform((count,), torch.float32, generator, least, 0.02)
