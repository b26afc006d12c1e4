"""Test cases of attention without a cache.

Dimensions: T query tokens, U key tokens, N heads, K kv heads, D size of a query and key, E size of
a value, B sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_combinations import few_changes
from interposer_ops.attention._sequences_cases import (
    FEATURES,
    Options,
    bounded_case,
    random_query,
    sampled_scores,
    score_arguments,
)
from interposer_ops.caches._paging_cases import starts_of
from interposer_testing.cases import Axis, CaseSpace, Point, uniform

Sequences = tuple[tuple[int, int], ...]

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
_MASKS: dict[str, Options] = {
    "": {"causal": True},
    "bidirectional": {"causal": False},
    "window": {"causal": True, "window_tokens": 3},
    "window of one": {"causal": True, "window_tokens": 1},
    "bidirectional window": {"causal": False, "window_tokens": 3},
}
_AXES = (
    Axis("batch", _BATCHES),
    Axis("heads", _HEADS),
    Axis("mask", _MASKS),
    Axis("feature", FEATURES),
)
_valid = few_changes(
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
    varying={"sinks": ("dtype",)},
    crossed={
        "batch": ("", "other keys"),
        "heads": ("", "values narrower"),
        "mask": ("", "bidirectional"),
        "feature": ("", "softcap and sinks", "ALiBi"),
    },
    alone={"batch": ("no sequences", "no keys at all")},
    valid=_valid,
)
"""Sequences with as many keys as queries, more, fewer and none; all masks and features."""


def ragged_attention_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Build a call with one sequence, whose queries attend to its own keys."""
    options = sampled_scores(dims)
    names = ("num_heads", "num_kv_heads", "head_size", "value_size")
    heads = tuple(int(dims[name]) for name in names)
    generator = torch.Generator().manual_seed(seed)
    batch = ((num_tokens, num_tokens),)
    return _attention(batch, heads, options, dtype, generator, f"{num_tokens} tokens")


def _attention(
    batch: Sequences, sizes: tuple[int, ...], options: Options, dtype: torch.dtype,
    generator: torch.Generator, label: str = "",
) -> Case:  # fmt: skip
    heads, kv_heads, head_size, value_size = sizes
    query_lens, key_lens = [q for q, _ in batch], [k for _, k in batch]
    query = random_query((sum(query_lens), heads, head_size), options, dtype, generator)
    key = uniform((sum(key_lens), kv_heads, head_size), dtype, generator)
    value = uniform((sum(key_lens), kv_heads, value_size), dtype, generator)
    scores, score_dims = score_arguments(heads, head_size, options, dtype, generator)
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "query_starts": starts_of(query_lens),
        "key_starts": starts_of(key_lens),
        "max_query_tokens": max([1, *query_lens]),
        "max_key_tokens": max([1, *key_lens]),
        **scores,
    }
    dims: Dims = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": head_size,
        "value_size": value_size,
        **score_dims,
    }
    longest = max([1, *query_lens, *key_lens])
    return bounded_case(label, arguments, dims, key, longest, width=head_size)


ragged_attention_with_lse_cases = ragged_attention_cases
ragged_attention_with_lse_sample = ragged_attention_sample

_SHAPES = {
    "": (5, 4, 32),
    "one token": (1, 4, 64),
    "one element": (1, 1, 1),
    "odd": (7, 3, 20),
    "size 80": (3, 2, 80),
    "size 128": (33, 4, 128),
    "size 512": (2, 2, 512),
    "no tokens": (0, 4, 32),
}
# Ends of the range of the lse of either side.
_RANGES = {
    "": ((-2.0, 2.0), (-2.0, 2.0)),
    "a outweighs b": ((50.0, 60.0), (-60.0, -50.0)),
    "b outweighs a": ((-60.0, -50.0), (50.0, 60.0)),
    "equal": ((3.0, 3.0), (3.0, 3.0)),
    "beyond the exponential": ((95.0, 100.0), (95.0, 100.0)),
    "below the exponential": ((-120.0, -115.0), (-120.0, -115.0)),
}
# Which of two neighbouring rows have no keys on a side.
_EMPTY = {
    "": ("", ""),
    "a empty": ("every", ""),
    "b empty": ("", "every"),
    "both empty": ("every", "every"),
    "some empty": ("even", "odd"),
    "some empty on both sides": ("even", "even"),
}


def _merge(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    return _joined_case(point["shape"], point["range"], point["empty"], dtype, generator)


merge_attention_states_cases = CaseSpace(
    _merge,
    Axis("shape", _SHAPES),
    Axis("range", _RANGES),
    Axis("empty", _EMPTY),
    strided=dict.fromkeys(("out_a", "lse_a", "out_b", "lse_b"), "outer"),
    crossed={
        "shape": ("", "size 80"),
        "range": ("", "beyond the exponential"),
        "empty": ("", "some empty"),
    },
    alone={"shape": ("no tokens", "one element"), "empty": ("both empty", "a empty", "b empty")},
)
"""Sides of similar and different weight, beyond the range of exp, and without keys."""


def merge_attention_states_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Build two partial attention results whose softmax sums are similar."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, int(dims["num_heads"]), int(dims["value_size"]))
    label = f"{num_tokens} tokens"
    return _joined_case(shape, _RANGES[""], ("", ""), dtype, generator, label)


def _joined_case(
    shape: tuple[int, int, int], ranges: tuple[tuple[float, float], tuple[float, float]],
    empty: tuple[str, str], dtype: torch.dtype, generator: torch.Generator, label: str = "",
) -> Case:  # fmt: skip
    arguments = dict[str, Tensor]()
    for side, (low, high), rows in zip("ab", ranges, empty, strict=True):
        out = uniform(shape, dtype, generator)
        lse = uniform(shape[:2], torch.float32, generator, low, high)
        if rows:
            chosen = slice(1 if rows == "odd" else 0, None, 1 if rows == "every" else 2)
            lse[chosen] = -torch.inf
            out[chosen] = 0
        arguments |= {f"out_{side}": out, f"lse_{side}": lse}
    # Outputs are at most 1. The float32 error of an lse of size M becomes the relative error of a
    # weight. Operations: subtract, exponentiate (a few roundings), add, divide, multiply.
    largest = max(abs(end) for low_high in ranges for end in low_high)
    dims = {"num_heads": shape[1], "value_size": shape[2]}
    return Case(label, arguments, dims, reduction=6, magnitude=1 + largest, rounded=1.0)
