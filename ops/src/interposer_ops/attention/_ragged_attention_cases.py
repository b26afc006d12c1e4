"""Cases of attention without a cache.

Dimensions: T query tokens, U key tokens, N heads, K kv heads, D size of a query and key, E size of
a value, B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from interposer import Case, Dims
from interposer_ops._case_pruning import combined
from interposer_ops.caches._paging_cases import starts_of
from interposer_testing.cases import Axis, CaseSpace, Point, longest_row, peak, uniform

Sequences = tuple[tuple[int, int], ...]

_WINDOW_TOKENS, _SOFTCAP = 256, 30.0  # of samples; the dims do not tell how large they are

# Query tokens and key tokens of every sequence.
_BATCHES: dict[str, Sequences] = {
    "": ((5, 5), (1, 1), (9, 9)),
    "one token": ((1, 1),),
    "one sequence": ((17, 17),),
    "after a prefix": ((2, 9), (3, 3), (1, 12)),
    "other keys": ((3, 7), (4, 1), (1, 6), (5, 4)),
    "fewer keys than queries": ((6, 2), (9, 1)),
    "one without keys": ((2, 4), (3, 0), (1, 1)),
    "no keys at all": ((2, 0), (1, 0)),
    "one without queries": ((2, 2), (0, 3), (3, 5)),
    "long": ((67, 67), (33, 70)),
    "no sequences": (),
}
# Heads, kv heads, size of a query and key, size of a value.
_HEADS = {
    "": (4, 2, 32, 32),
    "one head": (1, 1, 32, 32),
    "MHA": (4, 4, 32, 32),
    "MQA": (5, 1, 32, 32),
    "groups of three": (6, 2, 32, 32),
    "head size 20": (4, 2, 20, 20),
    "head size 64": (4, 2, 64, 64),
    "head size 72": (2, 2, 72, 72),
    "head size 80": (4, 2, 80, 80),
    "head size 128": (4, 2, 128, 128),
    "values narrower": (4, 4, 48, 32),
    "MLA": (2, 2, 192, 128),
    "values wider": (4, 2, 16, 24),
}
_MASKS: dict[str, dict[str, Any]] = {
    "": {"causal": True},
    "bidirectional": {"causal": False},
    "window": {"causal": True, "window_tokens": 3},
    "window of one": {"causal": True, "window_tokens": 1},
    "bidirectional window": {"causal": False, "window_tokens": 3},
}
_FEATURES: dict[str, dict[str, Any]] = {
    "": {},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": None},
    "float32 sinks": {"sinks": torch.float32},
    "softcap and sinks": {"softcap": 1.5, "sinks": None},
    "ALiBi": {"alibi": True},
    "large scores": {"query_peak": 60.0},
}
_AXES = (
    Axis("batch", _BATCHES),
    Axis("heads", _HEADS),
    Axis("mask", _MASKS),
    Axis("feature", _FEATURES),
)
_valid = combined(
    _AXES,
    {
        "batch": (
            "after a prefix",
            "other keys",
            "fewer keys than queries",
            "one without keys",
            "long",
        ),
        "heads": ("MHA", "MQA", "values narrower"),
        "mask": ("bidirectional", "window", "bidirectional window"),
        "feature": ("softcap", "softcap and sinks", "ALiBi"),
    },
)


def _ragged_attention(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    options = {**point["mask"], **point["feature"]}
    return _attention(point["batch"], point["heads"], options, dtype, generator)


ragged_attention_cases = CaseSpace(
    _ragged_attention,
    *_AXES,
    strided={
        **dict.fromkeys(("query", "key", "value"), "outer"),
        **dict.fromkeys(("query_starts", "key_starts", "sinks", "alibi_slopes"), "offset"),
    },
    crossed={
        "batch": ("", "other keys"),
        "heads": ("", "values narrower"),
        "mask": ("", "bidirectional"),
        "feature": ("", "softcap and sinks", "ALiBi"),
    },
    alone={"batch": ("no sequences", "no keys at all")},
    valid=_valid,
)
"""Sequences with as many keys as queries, more, fewer and none, under masks and with features."""


def ragged_attention_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return one sequence that attends to itself."""
    options = {
        "causal": bool(dims["causal"]),
        "window_tokens": _WINDOW_TOKENS if dims["windowed"] else None,
        "softcap": _SOFTCAP if dims["softcapped"] else None,
        "alibi": bool(dims["alibi"]),
        **({"sinks": None} if dims["sinks"] else {}),
    }
    names = ("num_heads", "num_kv_heads", "head_size", "value_size")
    heads = tuple(int(dims[name]) for name in names)
    generator = torch.Generator().manual_seed(seed)
    batch = ((num_tokens, num_tokens),)
    return _attention(batch, heads, options, dtype, generator, f"{num_tokens} tokens")


def _attention(
    batch: Sequences,
    sizes: tuple[int, ...],
    options: Mapping[str, Any],
    dtype: torch.dtype,
    generator: torch.Generator,
    label: str = "",
) -> Case:
    heads, kv_heads, head_size, value_size = sizes
    query_lens, key_lens = [q for q, _ in batch], [k for _, k in batch]
    most = options.get("query_peak", 1.0)
    query = uniform((sum(query_lens), heads, head_size), dtype, generator, -most, most)
    key = uniform((sum(key_lens), kv_heads, head_size), dtype, generator)
    value = uniform((sum(key_lens), kv_heads, value_size), dtype, generator)
    sinks = slopes = None
    if "sinks" in options:
        sinks = uniform((heads,), options["sinks"] or dtype, generator, -1.0, 2.0)
    if options.get("alibi"):
        slopes = 2.0 ** -torch.arange(heads, dtype=torch.float32)
    # Three times the usual, so that random scores differ enough to matter.
    scale = 3 * head_size**-0.5
    longest = max([1, *query_lens, *key_lens])
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "query_starts": starts_of(query_lens),
        "key_starts": starts_of(key_lens),
        "max_query_tokens": max([1, *query_lens]),
        "max_key_tokens": max([1, *key_lens]),
        "scale": scale,
        "causal": options["causal"],
        "window_tokens": options.get("window_tokens"),
        "softcap": options.get("softcap"),
        "sinks": sinks,
        "alibi_slopes": slopes,
    }
    dims: Dims = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": head_size,
        "value_size": value_size,
        "causal": options["causal"],
        "windowed": options.get("window_tokens") is not None,
        "softcapped": options.get("softcap") is not None,
        "sinks": sinks is not None,
        "alibi": slopes is not None,
    }
    # Scores stay in float32. The error of one is one of its weight, and weights act on values of at
    # most 1, as large as any sum of them that is stored. It is also the error of the logarithm.
    largest = scale * longest_row(query) * longest_row(key)
    if slopes is not None:
        largest += longest * peak(slopes)
    return Case(
        label, arguments, dims, reduction=head_size + longest, magnitude=1 + largest, rounded=1.0
    )


ragged_attention_with_lse_cases = ragged_attention_cases
ragged_attention_with_lse_sample = ragged_attention_sample
