"""Test cases of the indexer of sparse attention.

Dimensions: T tokens, I indexer heads, D size of an indexer head, P pages, S page size, L tokens of
the longest sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_combinations import few_changes
from interposer_ops._case_numbers import dtype_name
from interposer_ops.attention._sequences_cases import (
    LENGTHS,
    Lengths,
    Options,
    paged,
    random_query,
    random_scale,
    sampled_lengths,
    sampled_storage,
)
from interposer_testing.cases import Axis, CaseSpace, Point, longest_row, normal, uniform
from interposer_testing.workload import typical_sequences

_HEADS = {
    "": (4, 32),
    "one head": (1, 32),
    "odd": (3, 20),
    "size 64": (8, 64),
    "size 128": (4, 128),
    "64 heads": (64, 16),
}
_FEATURES: dict[str, Options] = {
    "": {},
    "positive weights": {"least_weight": 0.0},
    "zero weights": {"weight_peak": 0.0},
    "large products": {"query_peak": 60.0},
    "e4m3 keys": {"cache_dtype": torch.float8_e4m3fn},
    "e4m3 keys with scales": {"cache_dtype": torch.float8_e4m3fn, "scaled": True},
    "e5m2 keys with scales": {"cache_dtype": torch.float8_e5m2, "scaled": True},
    "keys with scales": {"scaled": True},
}
_SPARE = {"": 0, "longer rows": 5}
_AXES = (
    Axis("batch", LENGTHS),
    Axis("heads", _HEADS),
    Axis("feature", _FEATURES),
    Axis("row", _SPARE),
)
_PAIRED = {
    "batch": ("decode", "chunk after a prefix", "several pages", "page of 16", "long"),
    "heads": ("odd", "size 128", "64 heads"),
    "feature": ("zero weights", "large products", "e4m3 keys with scales"),
    "row": ("longer rows",),
}


def _scores(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    options = {**point["feature"], "spare": point["row"]}
    return _scores_case(point["batch"], point["heads"], options, dtype, generator)


indexer_scores_cases = CaseSpace(
    _scores,
    *_AXES,
    strided={
        **dict.fromkeys(("query", "keys", "weights", "page_table", "key_scales"), "outer"),
        **dict.fromkeys(("query_starts", "seq_lens"), "offset"),
    },
    crossed={
        "batch": ("", "decode", "long"),
        "heads": ("", "odd"),
        "feature": ("", "e4m3 keys with scales"),
        "row": ("",),
    },
    alone={"batch": ("no sequences",)},
    valid=few_changes(_AXES, _PAIRED),
)
"""Batches over shuffled pages; unused slots hold NaN, so a kernel that reads one of them fails."""


def indexer_scores_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build a typical step over a cache of shuffled pages."""
    heads = int(dims["num_heads"]), int(dims["head_size"])
    lengths, options = sampled_lengths(dims, num_tokens), sampled_storage(dims, dtype)
    generator = torch.Generator().manual_seed(seed)
    return _scores_case(lengths, heads, options, dtype, generator, f"{num_tokens} tokens")


def _scores_case(
    lengths: Lengths, sizes: tuple[int, int], options: Options, dtype: torch.dtype,
    generator: torch.Generator, label: str = "",
) -> Case:  # fmt: skip
    heads, head_size = sizes
    batch = paged(lengths, generator)
    heaviest = options.get("weight_peak", 1.0)
    lightest = options.get("least_weight", -heaviest)
    query = random_query((lengths.num_tokens, heads, head_size), options, dtype, generator)
    weights = uniform(query.shape[:2], torch.float32, generator, lightest, heaviest)
    scales, stored_dtype = None, options.get("cache_dtype", dtype)
    stored = uniform((len(batch.slots), head_size), torch.float32, generator)
    factors = torch.ones(len(batch.slots))
    if options.get("scaled"):
        factors = random_scale(factors.shape, options, generator)
        scales = batch.filled(factors)
    keys = (stored / factors[:, None]).to(stored_dtype)
    arguments = {
        "query": query,
        "keys": batch.filled(keys),
        "weights": weights,
        **batch.arguments,
        "max_seq_tokens": lengths.longest + options.get("spare", 0),
        "key_scales": scales,
    }
    dims: Dims = {
        "num_heads": heads,
        "head_size": head_size,
        "page_size": lengths.page_size,
        "cache_dtype": dtype_name(stored_dtype),
        "scaled": scales is not None,
    }
    # A dot product is a sum of D terms, a score is a sum of I weighted dot products.
    largest_score = longest_row(query) * longest_row(keys.float() * factors[:, None])
    weighted = float(weights.abs().sum(-1).max()) if weights.numel() else 0.0
    return Case(
        label, arguments, dims, reduction=head_size + heads + 2, magnitude=largest_score * weighted
    )


# Tokens and length of a row.
_ROWS = {
    "": (5, 64),
    "one row": (1, 64),
    "one score": (2, 1),
    "odd": (7, 127),
    "after a power of two": (3, 1025),
    "long": (2, 5000),
    "no rows": (0, 64),
}
_TOP_K = {"": 8, "top one": 1, "top 13": 13, "top 64": 64, "top 2048": 2048}
# How many scores of a row are visible, of its length; the first ones, or spread over the row.
_VISIBLE: dict[str, tuple[float, bool]] = {
    "": (1.0, False),
    "causal": (0.5, False),
    "a few": (0.05, False),
    "holes": (0.5, True),
    "none in some rows": (0.0, False),
}
_NUMBERS = {"": "normal", "negative": "negative", "repeated": "repeated", "large": "large"}


def _topk(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    return _topk_case(
        point["row"], point["top_k"], point["visible"], point["numbers"], dtype, generator
    )


_TOPK_AXES = (
    Axis("row", _ROWS),
    Axis("top_k", _TOP_K),
    Axis("visible", _VISIBLE),
    Axis("numbers", _NUMBERS),
)

indexer_topk_cases = CaseSpace(
    _topk,
    *_TOPK_AXES,
    strided={"scores": "outer"},
    crossed={"row": ("", "odd"), "top_k": ("", "top 64"), "visible": ("", "holes")},
    alone={"row": ("no rows",)},
    valid=few_changes(
        _TOPK_AXES, {"row": ("odd", "after a power of two"), "top_k": ("top one", "top 64")}
    ),
)
"""Rows longer and shorter than ``top_k``, partly masked; ties within the chosen scores."""


def indexer_topk_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build the indexer scores of a typical step."""
    rows = (num_tokens, max(tokens for tokens, _ in typical_sequences(num_tokens)))
    generator = torch.Generator().manual_seed(seed)
    top_k, label = int(dims["top_k"]), f"{num_tokens} tokens"
    return _topk_case(rows, top_k, (1.0, False), "normal", dtype, generator, label)


def _topk_case(
    shape: tuple[int, int], top_k: int, visible: tuple[float, bool], numbers: str,
    dtype: torch.dtype, generator: torch.Generator, label: str = "",
) -> Case:  # fmt: skip
    scores = normal(shape, dtype, generator, 1e4 if numbers == "large" else 1.0)
    if numbers == "negative":
        scores = -scores.abs() - 1
    if numbers == "repeated":
        scores = torch.randint(-3, 4, shape, generator=generator).to(dtype)
    visible_fraction, is_spread = visible
    for row, row_scores in enumerate(scores):
        # A fraction of 0 masks every second row completely.
        num_visible = round((visible_fraction or row % 2) * shape[1])
        order = torch.arange(shape[1])
        if is_spread:
            order = torch.randperm(shape[1], generator=generator)
        row_scores[order[num_visible:]] = -torch.inf
    return Case(label, {"scores": _decided(scores, top_k), "top_k": top_k}, {"top_k": top_k})


def _decided(scores: Tensor, top_k: int) -> Tensor:
    """Break ties: lower the scores that equal the smallest of the top k but are not chosen."""
    if not scores.numel() or top_k >= scores.shape[1]:
        return scores
    values, indices = scores.topk(top_k, dim=-1)
    smallest = values[:, -1:]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, indices, True)
    # A distance that no dtype of the tests rounds away.
    lower = torch.where(smallest > 0, smallest / 2, 2 * smallest) - 1
    return torch.where((scores == smallest) & ~chosen, lower, scores)
