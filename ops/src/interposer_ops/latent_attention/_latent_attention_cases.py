"""Test cases of attention to latent vectors.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, P pages, S page size, X
attended tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from interposer import Case, Dims
from interposer_ops._case_combinations import few_changes
from interposer_ops._case_numbers import dtype_name
from interposer_ops.attention._sequences_cases import (
    LENGTHS,
    Lengths,
    Options,
    Paged,
    bounded_case,
    paged,
    random_query,
    random_scale,
    sampled_lengths,
    sampled_storage,
    score_scale,
)
from interposer_testing.cases import Axis, CaseSpace, Point, uniform

# Heads, latent size, rotary size.
_HEADS = {
    "": (4, 32, 16),
    "one head": (1, 32, 16),
    "odd": (3, 20, 12),
    "16 heads": (16, 32, 16),
    "no rotary part": (4, 32, 0),
    "latent size 256": (2, 256, 32),
    "latent size 512": (2, 512, 64),
}
_FEATURES: dict[str, Options] = {
    "": {},
    "large scores": {"query_peak": 60.0},
    "e4m3 cache": {"cache_dtype": torch.float8_e4m3fn},
    "e4m3 cache with a scale": {"cache_dtype": torch.float8_e4m3fn, "scaled": True},
    "e5m2 cache with a scale": {"cache_dtype": torch.float8_e5m2, "scaled": True},
}
# Largest number of listed tokens, fraction in use (0: none in every second row), order.
_NAMED: dict[str, tuple[int, float, str]] = {
    "": (4, 1.0, "ascending"),
    "one named": (1, 1.0, "ascending"),
    "seven named": (7, 1.0, "ascending"),
    "all named": (32, 1.0, "ascending"),
    "in any order": (8, 1.0, "shuffled"),
    "gaps": (8, 0.5, "shuffled"),
    "none in some rows": (4, 0.0, "ascending"),
}
_STRIDED: dict[str, Any] = {
    **dict.fromkeys(("query", "cache", "page_table", "indices"), "outer"),
    **dict.fromkeys(("query_starts", "seq_lens", "sequences", "cache_scale"), "offset"),
}
_DECODE_AXES = (Axis("batch", LENGTHS), Axis("heads", _HEADS), Axis("feature", _FEATURES))
_SPARSE_AXES = (*_DECODE_AXES, Axis("named", _NAMED))
_PAIRED = {
    "batch": ("decode", "chunk after a prefix", "several pages", "page of 16", "long"),
    "heads": ("odd", "16 heads", "latent size 256"),
    "feature": ("large scores", "e4m3 cache with a scale", "e5m2 cache with a scale"),
}
_CROSSED = {
    "batch": ("", "decode", "long"),
    "heads": ("", "odd"),
    "feature": ("", "e4m3 cache with a scale"),
}


def _decode(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    return _decode_case(point["batch"], point["heads"], point["feature"], dtype, generator)


def _sparse(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    listing, options = point["named"], point["feature"]
    return _sparse_case(point["batch"], point["heads"], options, listing, dtype, generator)


latent_attention_decode_cases = CaseSpace(
    _decode,
    *_DECODE_AXES,
    strided=_STRIDED,
    crossed=_CROSSED,
    alone={"batch": ("no sequences",)},
    valid=few_changes(_DECODE_AXES, _PAIRED, most=3),
)
"""Batches over shuffled pages; unused slots hold NaN, so that a kernel that reads them fails."""

sparse_latent_attention_cases = CaseSpace(
    _sparse,
    *_SPARSE_AXES,
    strided=_STRIDED,
    crossed={**_CROSSED, "feature": ("",), "named": ("", "gaps")},
    alone={"batch": ("no sequences",)},
    valid=few_changes(
        _SPARSE_AXES, {**_PAIRED, "named": ("all named", "gaps", "none in some rows")}
    ),
)
"""The batches of decoding; each token lists some positions of its sequence, or none."""


def latent_attention_decode_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Build a typical step over a cache of shuffled pages."""
    lengths, options = sampled_lengths(dims, num_tokens), sampled_storage(dims, dtype)
    generator, label = torch.Generator().manual_seed(seed), f"{num_tokens} tokens"
    return _decode_case(lengths, _sizes(dims), options, dtype, generator, label)


def sparse_latent_attention_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Build a typical step in which every token lists as many positions as allowed."""
    lengths, options = sampled_lengths(dims, num_tokens), sampled_storage(dims, dtype)
    listing = (int(dims["top_k"]), 1.0, "ascending")
    generator, label = torch.Generator().manual_seed(seed), f"{num_tokens} tokens"
    return _sparse_case(lengths, _sizes(dims), options, listing, dtype, generator, label)


def _sizes(dims: Dims) -> tuple[int, ...]:
    return tuple(int(dims[name]) for name in ("num_heads", "latent_size", "rotary_size"))


def _decode_case(
    lengths: Lengths, sizes: tuple[int, ...], options: Options, dtype: torch.dtype,
    generator: torch.Generator, label: str = "",
) -> Case:  # fmt: skip
    batch = paged(lengths, generator)
    tensors, constants = _tensors(batch, sizes, options, dtype, generator)
    sequence_arguments = {**batch.arguments, "max_query_tokens": lengths.longest_query}
    return _case(
        label, {**tensors, **sequence_arguments, **constants}, lengths, sizes, lengths.longest
    )


def _sparse_case(
    lengths: Lengths, sizes: tuple[int, ...], options: Options, listing: tuple[int, float, str],
    dtype: torch.dtype, generator: torch.Generator, label: str = "",
) -> Case:  # fmt: skip
    batch = paged(lengths, generator)
    tensors, constants = _tensors(batch, sizes, options, dtype, generator)
    tokens = [
        (number, cached - queries + offset + 1)
        for number, (cached, queries) in enumerate(lengths.sequences)
        for offset in range(queries)
    ]
    top_k, used_fraction, order = listing
    indices = torch.full((len(tokens), top_k), -1, dtype=torch.int32)
    for row, (_, num_visible) in enumerate(tokens):
        # A fraction of 0 means: every second row lists nothing, the other rows list all.
        fraction = used_fraction or row % 2
        count = int(fraction * min(top_k, num_visible))
        chosen = torch.randperm(num_visible, generator=generator)[:count]
        indices[row, :count] = chosen.sort().values.int()
        if order == "shuffled":
            indices[row] = indices[row, torch.randperm(top_k, generator=generator)]
    sequence_arguments = {
        "page_table": batch.arguments["page_table"],
        "sequences": torch.tensor([number for number, _ in tokens], dtype=torch.int64),
        "indices": indices,
    }
    return _case(
        label, {**tensors, **sequence_arguments, **constants}, lengths, sizes, top_k, top_k=top_k
    )


def _tensors(
    batch: Paged,
    sizes: tuple[int, ...],
    options: Options,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Build the tensor arguments and the constant arguments of both latent attention ops."""
    heads, latent_size, rotary_size = sizes
    width = latent_size + rotary_size
    query = random_query((batch.lengths.num_tokens, heads, width), options, dtype, generator)
    scale = random_scale((1,), options, generator) if options.get("scaled") else None
    stored = uniform((len(batch.slots), width), torch.float32, generator)
    stored = stored if scale is None else stored / scale
    cache = batch.filled(stored.to(options.get("cache_dtype", dtype)))
    constants = {"latent_size": latent_size, "scale": score_scale(width), "cache_scale": scale}
    return {"query": query, "cache": cache}, constants


def _case(
    label: str,
    arguments: dict[str, Any],
    lengths: Lengths,
    sizes: tuple[int, ...],
    longest: int,
    **dims: int,
) -> Case:
    cache, (heads, latent_size, rotary_size) = arguments["cache"], sizes
    scale, width = arguments["cache_scale"], latent_size + rotary_size
    all_dims: Dims = {
        "num_heads": heads,
        "latent_size": latent_size,
        "rotary_size": rotary_size,
        "page_size": lengths.page_size,
        "cache_dtype": dtype_name(cache.dtype),
        "scaled": scale is not None,
        **dims,
    }
    return bounded_case(label, arguments, all_dims, cache, longest, scale, width=width)
