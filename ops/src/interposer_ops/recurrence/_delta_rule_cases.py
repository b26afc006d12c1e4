"""Test cases of the gated delta rule.

T tokens, H query and key heads, V value heads, K key size, D value size, B sequences, R rows of the
state pool.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Case, Dims
from interposer_ops._case_combinations import few_changes
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.recurrence._batches_cases import (
    BATCHES,
    Batch,
    batch_indices,
    recurrent_peak,
    sampled_batch,
    with_unused_rows,
)
from interposer_testing.cases import Axis, CaseSpace, Point, Strides, peak, uniform

_Sizes = tuple[int, int, int, int]  # H, V, K, D

_SIZES: dict[str, _Sizes] = {
    "": (2, 4, 16, 8),
    "one head": (1, 1, 8, 4),
    "odd": (1, 3, 7, 5),
    "as many keys as values": (3, 3, 16, 16),
    "sizes of 128": (1, 2, 128, 128),
    "key size 1": (2, 2, 1, 9),
    "value size 1": (2, 4, 33, 1),
}
# Range of the decay, range of beta, and similarity of the keys (1 for equal keys).
_FORMS: dict[str, tuple[float, float, float, float, float]] = {
    "": (-1.0, -0.01, 0.1, 1.0, 0.0),
    "strong decay": (-40.0, -4.0, 0.1, 1.0, 0.0),
    "no decay": (0.0, 0.0, 0.1, 1.0, 0.0),
    "beta up to 2": (-0.1, -0.01, 1.0, 2.0, 0.0),
    "equal keys": (-0.1, -0.01, 0.5, 1.0, 1.0),
}
_AXES = (Axis("batch", BATCHES), Axis("sizes", _SIZES), Axis("form", _FORMS))
_STRIDED: dict[str, Strides] = {
    **dict.fromkeys(("query", "key", "value", "decay", "beta", "states"), "outer"),
    **dict.fromkeys(("query_starts", "slots", "num_cached"), "offset"),
}


def _rule(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    return _case(point["batch"], point["sizes"], point["form"], dtype, generator, "")


gated_delta_rule_cases = CaseSpace(
    _rule,
    *_AXES,
    strided=_STRIDED,
    crossed={"batch": ("", "chunks after others"), "sizes": ("", "odd"), "form": ("",)},
    alone={"batch": ("no sequences",)},
    valid=few_changes(
        _AXES,
        {
            "batch": ("decode", "chunks after others", "padding", "long"),
            "sizes": ("odd", "as many keys as values", "sizes of 128"),
        },
    ),
)
"""Prefill, chunked prefill and decode; states that kernels must not read are NaN."""


def gated_delta_rule_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make a typical step of a Gated DeltaNet layer."""
    generator, batch = torch.Generator().manual_seed(seed), sampled_batch(num_tokens)
    heads, value_heads = int(dims["num_heads"]), int(dims["num_value_heads"])
    sizes = heads, value_heads, int(dims["key_size"]), int(dims["value_size"])
    return _case(batch, sizes, _FORMS[""], dtype, generator, f"{num_tokens} tokens")


def _case(
    batch: Batch,
    sizes: _Sizes,
    form: tuple[float, float, float, float, float],
    dtype: torch.dtype,
    generator: torch.Generator,
    label: str,
) -> Case:
    heads, value_heads, key_size, value_size = sizes
    tokens, wide, (*ranges, similarity) = batch.num_tokens, torch.float32, form
    indices = batch_indices(batch, generator)
    query, key = (normal_numbers((tokens, heads, key_size), wide, generator) for _ in range(2))
    key = similarity * torch.ones_like(key) + (1 - similarity) * key
    states = normal_numbers((batch.num_rows, value_heads, key_size, value_size), wide, generator)
    arguments: dict[str, Any] = {
        "query": functional.normalize(query, dim=-1).to(dtype),
        "key": functional.normalize(key, dim=-1).to(dtype),
        "value": normal_numbers((tokens, value_heads, value_size), dtype, generator),
        "decay": uniform((tokens, value_heads), wide, generator, *ranges[:2]),
        "beta": uniform((tokens, value_heads), wide, generator, *ranges[2:]),
        "states": with_unused_rows(states, batch, indices["slots"]),
        **indices,
        "scale": key_size**-0.5,
    }
    dims: Dims = {
        "num_heads": heads,
        "num_value_heads": value_heads,
        "key_size": key_size,
        "value_size": value_size,
    }
    reduction = (batch.longest + 2) * (key_size // 2 + 8)
    return Case(label, arguments, dims, reduction, _magnitude(batch, arguments))


def _magnitude(batch: Batch, arguments: dict[str, Tensor]) -> float:
    """Bound the magnitude of the terms in the sums of ``gated_delta_rule``.

    A key of unit length never increases the norm of the state: with beta up to 2, an update removes
    the component along the key or, at most, reflects it.
    """
    value, beta, states = (arguments[name] for name in ("value", "beta", "states"))
    rows = torch.linalg.vector_norm(states, dim=-2).nan_to_num().amax(-1)  # [R, V]
    added = beta * value.float().abs().amax(-1)
    decays = torch.exp(arguments["decay"])
    # Rounding changes the length of keys by a few roundoffs of the dtype.
    factor = 1 + 4 * torch.finfo(value.dtype).eps
    norms = recurrent_peak(batch, factor * decays, added, rows, arguments["slots"])
    return 2.0 * peak(norms) + peak(value)
