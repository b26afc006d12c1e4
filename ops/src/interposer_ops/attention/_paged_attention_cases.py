"""Test cases of attention over a paged cache.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size.
"""

from __future__ import annotations

import torch

from interposer import Case, Dims
from interposer_ops._case_combinations import few_changes
from interposer_ops._case_numbers import dtype_name
from interposer_ops.attention._sequences_cases import (
    FEATURES,
    LENGTHS,
    Lengths,
    Options,
    bounded_case,
    paged,
    random_query,
    random_scale,
    sampled_lengths,
    sampled_scores,
    sampled_storage,
    score_arguments,
)
from interposer_ops.caches._paging_cases import caches
from interposer_testing.cases import Axis, CaseSpace, Point, uniform

_PREFIX_TOKENS = 64  # prefix length in samples

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
_MASKS: dict[str, Options] = {
    "": {},
    "window": {"window_tokens": 3},
    "window of one": {"window_tokens": 1},
    "window of one page": {"window_tokens": 4},
    "window longer than the sequences": {"window_tokens": 500},
    "not causal": {"causal": False},
    "prefix": {"prefix": 5},
    "prefix and window": {"prefix": 5, "window_tokens": 3},
}
_FEATURES: dict[str, Options] = {
    **FEATURES,
    "softcap and ALiBi": {"softcap": 1.5, "alibi": True},
    "e4m3 cache": {"cache_dtype": torch.float8_e4m3fn},
    "e5m2 cache": {"cache_dtype": torch.float8_e5m2, "scaled": True},
    "e4m3 cache, scales of heads": {"cache_dtype": torch.float8_e4m3fn, "scaled": "heads"},
    "e4m3 cache and sinks": {"cache_dtype": torch.float8_e4m3fn, "scaled": True, "sinks": None},
    "int8 cache": {"cache_dtype": torch.int8, "scaled": True},
    "int8 cache, scales of heads": {"cache_dtype": torch.int8, "scaled": "heads"},
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
_is_few_changes = few_changes(_AXES, _PAIRED)
_TRIPLES = {**_PAIRED, "batch": ("decode", "chunk after a prefix"), "heads": ()}
_is_triple = few_changes(_AXES, _TRIPLES, most=3)


def _valid(point: Point, dtype: torch.dtype) -> bool:
    """Keep points that combine two options, or a batch, a mask and a feature; the rest is skipped.

    ALiBi is tested with causal masks only: the op leaves later tokens to encoders.
    """
    if not point["mask"].get("causal", True) and point["feature"].get("alibi"):
        return False
    return _is_few_changes(point, dtype) or _is_triple(point, dtype)


def _paged_attention(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    options = {**point["mask"], **point["feature"]}
    return _attention(point["batch"], point["heads"], options, dtype, generator)


paged_attention_cases = CaseSpace(
    _paged_attention,
    *_AXES,
    strided={
        **dict.fromkeys(("query", "key_cache", "value_cache", "page_table"), "outer"),
        **dict.fromkeys(("query_starts", "seq_lens", "sinks", "alibi_slopes"), "offset"),
        **dict.fromkeys(("prefix_lens", "key_scale", "value_scale"), "offset"),
    },
    varying={"sinks": ("dtype",)},
    crossed={
        "batch": ("", "decode", "long"),
        "heads": ("", "head size 80"),
        "mask": ("", "prefix"),
        "feature": ("", "softcap and sinks", "ALiBi", "e4m3 cache, scales of heads"),
    },
    alone={"batch": ("no sequences",)},
    valid=_valid,
)
"""Batches over shuffled pages; unused slots hold NaN, so a kernel that reads one of them fails."""


def paged_attention_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build a typical step over a cache of shuffled pages."""
    options = {
        **sampled_scores(dims),
        **sampled_storage(dims, dtype),
        "prefix": _PREFIX_TOKENS if dims.get("prefix_lm") else 0,
    }
    heads = tuple(int(dims[n]) for n in ("num_heads", "num_kv_heads", "head_size"))
    lengths, generator = sampled_lengths(dims, num_tokens), torch.Generator().manual_seed(seed)
    return _attention(lengths, heads, options, dtype, generator, f"{num_tokens} tokens")


def _attention(
    lengths: Lengths, sizes: tuple[int, ...], options: Options, dtype: torch.dtype,
    generator: torch.Generator, label: str = "",
) -> Case:  # fmt: skip
    heads, kv_heads, head_size = sizes
    batch = paged(lengths, generator)
    stored_dtype, scaled = options.get("cache_dtype", dtype), options.get("scaled")
    keys, values = caches((batch.num_pages, lengths.page_size, kv_heads, head_size), stored_dtype)
    count = kv_heads if scaled == "heads" else 1
    scales = [random_scale((count,), options, generator) if scaled else None for _ in range(2)]
    for cache, factor in zip((keys, values), scales, strict=True):
        stored = uniform((len(batch.slots), kv_heads, head_size), torch.float32, generator)
        stored = stored if factor is None else stored / factor[:, None]
        batch.filled(stored.to(stored_dtype), cache)
    query = random_query((lengths.num_tokens, heads, head_size), options, dtype, generator)
    scores, score_dims = score_arguments(heads, head_size, options, dtype, generator)
    prefixes = None
    if options.get("prefix"):
        # Lengths around the prefix, an empty prefix, and one that is longer than the cached tokens.
        lengths_in_turn = options["prefix"] * torch.tensor([1, 0, 2, 100])
        prefixes = lengths_in_turn.repeat(len(lengths.sequences))[: len(lengths.sequences)]
    arguments = {
        "query": query,
        "key_cache": keys,
        "value_cache": values,
        **batch.arguments,
        "max_query_tokens": lengths.longest_query,
        **scores,
        "prefix_lens": prefixes,
        **dict(zip(("key_scale", "value_scale"), scales, strict=True)),
    }
    dims: Dims = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": head_size,
        "page_size": lengths.page_size,
        **score_dims,
        "prefix_lm": prefixes is not None,
        "cache_dtype": dtype_name(stored_dtype),
        "scaled": bool(scaled),
        "per_head": scaled == "heads",
    }
    longest = lengths.longest
    return bounded_case(label, arguments, dims, keys, longest, scales[0], width=head_size)
