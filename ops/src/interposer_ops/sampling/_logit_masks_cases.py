"""Test cases of the ops that edit logits before sampling.

B sequences, V vocabulary, M listed tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import dtype_name
from interposer_ops.sampling._logits_cases import (
    LOGIT_SHAPES,
    LOGITS,
    clear_rows,
    clearly_truncated,
    num_rows,
    random_logits,
)
from interposer_testing.cases import Axis, CaseSpace, Point, Special, normal, peak, uniform

# M, and the number of listed tokens per row; None for a random number.
_LISTS = {
    "": (7, None),
    "full lists": (5, 5),
    "one token listed": (1, 1),
    "nothing listed": (4, 0),
    "no lists": (0, 0),
    "long lists": (61, None),
}
_IDS = {"": torch.int32, "long ids": torch.int64}
_ALONE = {"shape": ("no rows",)}
_WIDE = (2, 32000)
_SPECIAL: dict[str, tuple[Special, ...]] = {
    "logits": ("infinities", "NaN", "subnormals", "negative zeros")
}


def _is_small_or_plain(point: Point, _: torch.dtype) -> bool:
    """Return whether ``point`` has a small vocabulary, or only the vocabulary is large."""
    return point["shape"] != _WIDE or sum(bool(label) for label in point.labels.values()) == 1


def _logit_bias(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    logits = normal(point["shape"], dtype, generator, 4.0)
    token_ids = _listed(logits, point["list"], point["ids"], generator)
    values = uniform(tuple(token_ids.shape), torch.float32, generator, -8.0, 8.0)
    if point["values"] == "ruled out":
        values = torch.full_like(values, float("-inf"))
    return _bias_case(logits, token_ids, values)


apply_logit_bias_cases = CaseSpace(
    _logit_bias,
    Axis("shape", LOGIT_SHAPES),
    Axis("list", _LISTS),
    Axis("values", {"": "finite", "ruled out": "ruled out"}),
    Axis("ids", _IDS),
    strided={"logits": "rows", "token_ids": "rows", "values": "rows"},
    special={"logits": ("NaN", "subnormals", "infinities")},
    crossed={
        "shape": ("many rows", "odd vocabulary"),
        "list": ("", "long lists"),
        "values": ("",),
        "ids": ("",),
    },
    alone=_ALONE,
    valid=lambda point, dtype: (
        _is_small_or_plain(point, dtype)
        and not (point["values"] == "ruled out" and not point["list"][0])
    ),
)
"""Lists of every length; finite values, and values that mask a token."""


def _bitmask(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    logits = normal(point["shape"], dtype, generator)
    return _bitmask_case(logits, point["share"], point["tail"], generator)


apply_token_bitmask_cases = CaseSpace(
    _bitmask,
    Axis("shape", {**LOGIT_SHAPES, "whole words": (4, 128), "a word but one": (3, 31)}),
    Axis("share", {"": 0.5, "few allowed": 0.03, "all allowed": 1.0, "none allowed": 0.0}),
    Axis("tail", {"": False, "bits behind the vocabulary": True}),
    strided={"logits": "rows", "bitmask": "rows"},
    special=_SPECIAL,
    crossed={"shape": ("many rows", "odd vocabulary"), "share": ("", "few allowed"), "tail": ("",)},
    alone=_ALONE,
    # A vocabulary that fills its words has no bits after the last token.
    valid=lambda point, _: not (point["tail"] and point["shape"][1] % 32 == 0),
)
"""Masks with different fractions of set bits, including sign bits and bits of no token."""


def _suppress(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    logits = normal(point["shape"], dtype, generator)
    rows = (logits.shape[0],)
    stop_ids = _listed(logits, point["list"], point["ids"], generator)
    if point["list"] == _LISTS["long lists"]:
        stop_ids[:, 1] = stop_ids[:, 0]  # a token may be listed twice
    min_tokens = torch.randint(1, 9, rows, generator=generator)
    steps = torch.randint(0, 9, rows, generator=generator)
    if point["steps"] is not None:
        steps = min_tokens + point["steps"]
    return _suppress_case(logits, steps, min_tokens, stop_ids)


suppress_tokens_until_cases = CaseSpace(
    _suppress,
    Axis("shape", LOGIT_SHAPES),
    Axis("list", _LISTS),
    Axis("steps", {"": None, "last step before": -1, "first step after": 0}),
    Axis("ids", _IDS),
    strided={"logits": "rows", "stop_ids": "rows", "steps": "offset", "min_tokens": "offset"},
    special=_SPECIAL,
    crossed={"shape": ("many rows", "odd vocabulary"), "list": ("",), "steps": ("",), "ids": ("",)},
    alone=_ALONE,
    valid=lambda point, dtype: (
        _is_small_or_plain(point, dtype)
        and not (point.labels["steps"] and (point.labels["ids"] or point["list"][1] != 5))
    ),
)
"""Lists of every length; rows before, at and after the minimum number of tokens."""


def _temperature(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    logits = normal(point["shape"], dtype, generator, point["scale"])
    low, high = point["temperature"]
    temperature = uniform((logits.shape[0],), torch.float32, generator, low, high)
    if low == 0:
        temperature[::2] = 0
    return _temperature_case(logits, temperature)


apply_temperature_cases = CaseSpace(
    _temperature,
    Axis("shape", LOGIT_SHAPES),
    Axis(
        "temperature",
        {"": (0.1, 2.0), "greedy and random rows": (0.0, 2.0), "cold": (1e-6, 1e-3), "one": (1, 1)},
    ),
    Axis("scale", {"": 4.0, "zeros": 0.0, "large": 1e4}),
    strided={"logits": "rows", "temperature": "offset"},
    special=_SPECIAL,
    crossed={
        "shape": ("many rows", "odd vocabulary", "a word and one"),
        "temperature": ("", "greedy and random rows"),
        "scale": ("",),
    },
    alone=_ALONE,
    valid=_is_small_or_plain,
)
"""Ordinary, greedy and tiny temperatures of ordinary, zero and large logits."""


# Parameters of all rows; "mixed" makes the parameters of every second row neutral.
_TOP: dict[str, dict[str, float]] = {
    "": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "top-k and top-p": {"top_k": 20, "top_p": 0.9},
    "nothing": {},
    "top-k of one": {"top_k": 1},
    "top-k above the vocabulary": {"top_k": 10**6},
    "top-p of zero": {"top_p": 0.0},
    "neutral": {"top_k": 0, "top_p": 1.0},
    "neutral and other rows": {"top_k": 20, "top_p": 0.9, "mixed": 1.0},
}


def _top(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    setting = point["setting"]
    rows = point["shape"][0]
    top_k = torch.full((rows,), int(setting["top_k"])) if "top_k" in setting else None
    top_p = torch.full((rows,), setting["top_p"]) if "top_p" in setting else None
    if "mixed" in setting and top_k is not None and top_p is not None:
        top_k[::2] = 0
        top_p[1::2] = 1
    return _truncated_case(
        point["logits"], point["shape"], dtype, generator, top_k=top_k, top_p=top_p
    )


mask_top_k_top_p_cases = CaseSpace(
    _top,
    Axis("shape", LOGIT_SHAPES),
    Axis("setting", _TOP),
    Axis("logits", LOGITS),
    strided={"logits": "rows", "top_k": "offset", "top_p": "offset"},
    varying={"top_k": ("absent",), "top_p": ("absent",)},
    crossed={"shape": ("many rows", "odd vocabulary"), "logits": ("",)},
    alone={"shape": ("no rows", "one token")},
    valid=lambda point, dtype: (
        _is_small_or_plain(point, dtype)
        # A mixed batch needs at least two rows.
        and not (point["shape"][0] == 1 and "mixed" in point["setting"])
    ),
)
"""Top-k, top-p, both and neither, at ordinary and extreme values, also different per row."""


def _min_p(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    min_p = torch.full((point["shape"][0],), point["min_p"])
    if point["mixed"]:
        min_p[::2] = 0
    return _truncated_case(point["logits"], point["shape"], dtype, generator, min_p=min_p)


mask_min_p_cases = CaseSpace(
    _min_p,
    Axis("shape", LOGIT_SHAPES),
    Axis("min_p", {"": 0.1, "small": 1e-4, "most": 0.9, "one": 1.0, "zero": 0.0}),
    Axis("logits", LOGITS),
    Axis("mixed", {"": False, "neutral and other rows": True}),
    strided={"logits": "rows", "min_p": "offset"},
    crossed={"shape": ("many rows", "odd vocabulary"), "logits": ("",), "mixed": ("",)},
    alone={"shape": ("no rows", "one token")},
    valid=lambda point, dtype: (
        _is_small_or_plain(point, dtype)
        and not (point["mixed"] and (point["shape"][0] == 1 or point["min_p"] == 0))
    ),
)
"""Ratios from 0, which keeps all tokens, to 1, which keeps only the likeliest."""


def apply_logit_bias_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make rows of logits with eight biased tokens each."""
    logits, generator = _sampled(dtype, dims, num_tokens, seed)
    token_ids = _listed(logits, (8, 8), _index_dtype(dims), generator)
    values = uniform(tuple(token_ids.shape), torch.float32, generator, -8.0, 8.0)
    return _bias_case(logits, token_ids, values, f"{num_tokens} tokens")


def apply_token_bitmask_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make rows of logits and masks that allow one token in ten."""
    logits, generator = _sampled(dtype, dims, num_tokens, seed)
    return _bitmask_case(logits, 0.1, False, generator, f"{num_tokens} tokens")


def suppress_tokens_until_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Make rows of logits with four stop tokens each; some rows have reached their minimum."""
    logits, generator = _sampled(dtype, dims, num_tokens, seed)
    rows = (logits.shape[0],)
    stop_ids = _listed(logits, (4, 4), _index_dtype(dims), generator)
    steps = torch.randint(0, 9, rows, generator=generator)
    min_tokens = torch.randint(1, 9, rows, generator=generator)
    return _suppress_case(logits, steps, min_tokens, stop_ids, f"{num_tokens} tokens")


def apply_temperature_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make rows of logits, each with its own temperature."""
    logits, generator = _sampled(dtype, dims, num_tokens, seed)
    temperature = uniform((logits.shape[0],), torch.float32, generator, 0.1, 2.0)
    return _temperature_case(logits, temperature, f"{num_tokens} tokens")


def mask_top_k_top_p_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make rows of logits that both top-k and top-p truncate."""
    shape = (num_rows(num_tokens), int(dims["vocab_size"]))
    top_k, top_p = torch.full(shape[:1], 50), torch.full(shape[:1], 0.9)
    generator, label = torch.Generator().manual_seed(seed), f"{num_tokens} tokens"
    return _truncated_case("random", shape, dtype, generator, top_k=top_k, top_p=top_p, label=label)


def mask_min_p_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make rows of logits with a ``min_p`` of a twentieth."""
    shape = (num_rows(num_tokens), int(dims["vocab_size"]))
    generator, label = torch.Generator().manual_seed(seed), f"{num_tokens} tokens"
    min_p = torch.full(shape[:1], 0.05)
    return _truncated_case("random", shape, dtype, generator, min_p=min_p, label=label)


def _sampled(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows(num_tokens), int(dims["vocab_size"]))
    return normal(shape, dtype, generator, 4.0), generator


def _listed(
    logits: Tensor, length: tuple[int, int | None], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Draw ``[B, M]`` distinct token ids, including the first and last id, padded with -1."""
    rows, vocab_size = logits.shape
    max_tokens, num_listed = length
    token_ids = torch.full((rows, max_tokens), -1, dtype=dtype)
    for row in range(rows):
        count = num_listed
        if count is None:
            count = int(torch.randint(max_tokens + 1, (), generator=generator))
        tokens = torch.randperm(vocab_size, generator=generator)[: max(count - 2, 0)]
        edges = torch.tensor([vocab_size - 1, 0])
        tokens = torch.cat((edges, tokens[(tokens > 0) & (tokens < vocab_size - 1)]))
        tokens = (tokens if vocab_size > 1 else tokens[1:])[:count]
        token_ids[row, : len(tokens)] = tokens.to(dtype)
    return token_ids


def _bias_case(logits: Tensor, token_ids: Tensor, values: Tensor, label: str = "") -> Case:
    arguments = {"logits": logits, "token_ids": token_ids, "values": values}
    magnitude = peak(logits) + peak(values)
    dims: Dims = {"vocab_size": logits.shape[1], "index_dtype": dtype_name(token_ids.dtype)}
    return Case(label, arguments, dims, magnitude=magnitude)


def _bitmask_case(
    logits: Tensor, probability: float, tail_bit: bool, generator: torch.Generator, label: str = ""
) -> Case:
    rows, vocab_size = logits.shape
    words = -(-vocab_size // 32)
    allowed = torch.rand(rows, 32 * words, generator=generator) < probability
    allowed[:, vocab_size:] = tail_bit
    powers = 2 ** torch.arange(32)
    packed = (allowed.view(rows, words, 32) * powers).sum(-1)
    arguments = {"logits": logits, "bitmask": packed.to(torch.int32)}
    return Case(label, arguments, {"vocab_size": vocab_size}, reduction=0)


def _suppress_case(
    logits: Tensor, steps: Tensor, min_tokens: Tensor, stop_ids: Tensor, label: str = ""
) -> Case:
    arguments = {"logits": logits, "steps": steps, "min_tokens": min_tokens, "stop_ids": stop_ids}
    dims: Dims = {"vocab_size": logits.shape[1], "index_dtype": dtype_name(stop_ids.dtype)}
    return Case(label, arguments, dims, reduction=0)


def _index_dtype(dims: Dims) -> torch.dtype:
    """Return the dtype of token ids in the dims of a sample, int64 by default."""
    dtype: torch.dtype = getattr(torch, str(dims.get("index_dtype", "int64")))
    return dtype


def _temperature_case(logits: Tensor, temperature: Tensor, label: str = "") -> Case:
    # Two roundings, of a reciprocal and of the multiplication by it, and no sum. But a kernel may
    # flush a subnormal logit to zero before the division by a small temperature.
    smallest = float(temperature[temperature > 0].min()) if temperature.any() else 1.0
    arguments = {"logits": logits, "temperature": temperature}
    dims = {"vocab_size": logits.shape[1]}
    return Case(label, arguments, dims, reduction=1 + int(1 / smallest), magnitude=0.0)


def _truncated_case(
    kind: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    label: str = "",
    **columns: Tensor | None,
) -> Case:
    """Build a case of rows in which no token is near a truncation threshold."""
    truncations: dict[str, Any] = {"top_k": None, "top_p": None, "min_p": None, **columns}
    logits = torch.empty(shape, dtype=dtype)

    def draw(rows: int) -> Tensor:
        return random_logits(kind, (rows, shape[1]), dtype, generator)

    for row in range(shape[0]):
        row_truncations = {
            n: None if c is None else c[row : row + 1] for n, c in truncations.items()
        }

        def is_clear(logits: Tensor, limits: dict[str, Any] = row_truncations) -> Tensor:
            scaled = logits.double()
            scaled -= scaled.amax(-1, keepdim=True)
            return clearly_truncated(scaled, **limits)[1]

        logits[row : row + 1] = clear_rows(draw, is_clear, 1)
    arguments = {"logits": logits, **columns}
    return Case(label, arguments, {"vocab_size": shape[1]}, reduction=0)
