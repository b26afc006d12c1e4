"""Cases of attention to latent vectors.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, P pages, S page size,
X attended tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from interposer import Case, Dims
from interposer_ops._case_pruning import combined
from interposer_ops.attention._paged_attention_cases import cache_dtype_name
from interposer_ops.attention._paged_sequences_cases import LENGTHS, Lengths, Paged, paged
from interposer_testing.cases import Axis, CaseSpace, Point, longest_row, peak, uniform
from interposer_testing.workload import typical_sequences

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
_FEATURES: dict[str, dict[str, Any]] = {
    "": {},
    "large scores": {"query_peak": 60.0},
    "e4m3 cache": {"cache_dtype": torch.float8_e4m3fn},
    "e4m3 cache with a scale": {"cache_dtype": torch.float8_e4m3fn, "scaled": True},
    "e5m2 cache with a scale": {"cache_dtype": torch.float8_e5m2, "scaled": True},
}
# Tokens that are named at most, and how: a share of 0 names none.
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
    named, options = point["named"], point["feature"]
    return _sparse_case(point["batch"], point["heads"], options, named, dtype, generator)


latent_attention_decode_cases = CaseSpace(
    _decode,
    *_DECODE_AXES,
    strided=_STRIDED,
    crossed=_CROSSED,
    alone={"batch": ("no sequences",)},
    valid=combined(_DECODE_AXES, _PAIRED, most=3),
)
"""Batches over shuffled pages; slots that hold no token of a sequence are NaN."""

sparse_latent_attention_cases = CaseSpace(
    _sparse,
    *_SPARSE_AXES,
    strided=_STRIDED,
    crossed={**_CROSSED, "feature": ("",), "named": ("", "gaps")},
    alone={"batch": ("no sequences",)},
    valid=combined(_SPARSE_AXES, {**_PAIRED, "named": ("all named", "gaps", "none in some rows")}),
)
"""The batches of decoding; of the sequence of each token some positions are named, or none."""


def latent_attention_decode_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Return a typical step over a cache of shuffled pages."""
    lengths, heads, options = _sampled(dtype, dims, num_tokens)
    generator = torch.Generator().manual_seed(seed)
    return _decode_case(lengths, heads, options, dtype, generator, f"{num_tokens} tokens")


def sparse_latent_attention_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Return a typical step in which every token names as many others as it may."""
    lengths, heads, options = _sampled(dtype, dims, num_tokens)
    generator = torch.Generator().manual_seed(seed)
    named, label = (int(dims["top_k"]), 1.0, "ascending"), f"{num_tokens} tokens"
    return _sparse_case(lengths, heads, options, named, dtype, generator, label)


def _sampled(
    dtype: torch.dtype, dims: Dims, num_tokens: int
) -> tuple[Lengths, tuple[int, ...], dict[str, Any]]:
    lengths = Lengths(typical_sequences(num_tokens), int(dims["page_size"]))
    heads = tuple(int(dims[name]) for name in ("num_heads", "latent_size", "rotary_size"))
    name = str(dims["cache_dtype"])
    return (
        lengths,
        heads,
        {
            "cache_dtype": getattr(torch, name),
            "scaled": name != cache_dtype_name(dtype),
        },
    )


def _decode_case(
    lengths: Lengths,
    sizes: tuple[int, ...],
    options: Mapping[str, Any],
    dtype: torch.dtype,
    generator: torch.Generator,
    label: str = "",
) -> Case:
    batch = paged(lengths, generator)
    query, cache, scale = _tensors(batch, sizes, options, dtype, generator)
    arguments = {
        "query": query,
        "cache": cache,
        **batch.arguments,
        "max_query_tokens": max((tokens for _, tokens in lengths.sequences), default=1),
        **_constants(sizes, scale),
    }
    return _case(label, arguments, lengths, sizes)


def _sparse_case(
    lengths: Lengths,
    sizes: tuple[int, ...],
    options: Mapping[str, Any],
    named: tuple[int, float, str],
    dtype: torch.dtype,
    generator: torch.Generator,
    label: str = "",
) -> Case:
    batch = paged(lengths, generator)
    query, cache, scale = _tensors(batch, sizes, options, dtype, generator)
    tokens = [
        (number, cached - queries + offset + 1)
        for number, (cached, queries) in enumerate(lengths.sequences)
        for offset in range(queries)
    ]
    top_k, share, order = named
    indices = torch.full((len(tokens), top_k), -1, dtype=torch.int32)
    for row, (_, num_visible) in enumerate(tokens):
        # Of a share of 0 every second row has all names.
        kept = share or row % 2
        count = int(kept * min(top_k, num_visible))
        chosen = torch.randperm(num_visible, generator=generator)[:count]
        indices[row, :count] = chosen.sort().values.int()
        if order == "shuffled":
            indices[row] = indices[row, torch.randperm(top_k, generator=generator)]
    arguments = {
        "query": query,
        "cache": cache,
        "page_table": batch.arguments["page_table"],
        "sequences": torch.tensor([number for number, _ in tokens], dtype=torch.int64),
        "indices": indices,
        **_constants(sizes, scale),
    }
    case = _case(label, arguments, lengths, sizes)
    return Case(
        label,
        arguments,
        {**case.dims, "top_k": top_k},
        reduction=sizes[1] + sizes[2] + top_k,
        magnitude=case.magnitude,
        rounded=case.rounded,
    )


def _tensors(
    batch: Paged,
    sizes: tuple[int, ...],
    options: Mapping[str, Any],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the query, the cache and its scale."""
    heads, latent_size, rotary_size = sizes
    width, most = latent_size + rotary_size, options.get("query_peak", 1.0)
    query = uniform((batch.lengths.num_tokens, heads, width), dtype, generator, -most, most)
    scale = None
    if options.get("scaled"):  # numbers up to 1 then fill the range of 8 bits
        scale = uniform((1,), torch.float32, generator, 0.004, 0.02)
    stored = uniform((len(batch.slots), width), torch.float32, generator)
    stored = stored if scale is None else stored / scale
    return query, batch.filled(stored.to(options.get("cache_dtype", dtype))), scale


def _constants(sizes: tuple[int, ...], cache_scale: torch.Tensor | None) -> dict[str, Any]:
    _, latent_size, rotary_size = sizes
    # Three times the usual, so that random scores differ enough to matter.
    scale = 3 * (latent_size + rotary_size) ** -0.5
    return {"latent_size": latent_size, "scale": scale, "cache_scale": cache_scale}


def _case(
    label: str, arguments: Mapping[str, Any], lengths: Lengths, sizes: tuple[int, ...]
) -> Case:
    query, cache, factor = (arguments[name] for name in ("query", "cache", "cache_scale"))
    heads, latent_size, rotary_size = sizes
    dims: Dims = {
        "num_heads": heads,
        "latent_size": latent_size,
        "rotary_size": rotary_size,
        "page_size": lengths.page_size,
        "cache_dtype": cache_dtype_name(cache.dtype),
    }
    # Scores stay in float32. The error of one is one of its weight, and weights act on values, as
    # large as any sum of them that is stored: 1, or an eighth more where 8 bits rounded them up.
    largest_value = 1.0 if cache.dtype == query.dtype else 1.125
    largest_key = longest_row(cache.float().nan_to_num()) * (1 if factor is None else peak(factor))
    return Case(
        label,
        arguments,
        dims,
        reduction=latent_size + rotary_size + lengths.longest,
        magnitude=(1 + arguments["scale"] * longest_row(query) * largest_key) * largest_value,
        rounded=largest_value,
    )
