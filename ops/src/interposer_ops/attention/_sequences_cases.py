"""Sequences, options and error bounds shared by the test cases of attention.

Dimensions: T tokens, N heads, D head size, B sequences, M pages of the longest sequence, P pages, S
page size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import dtype_name
from interposer_ops.caches._paging_cases import SPARE_PAGES, scattered, starts_of
from interposer_testing.cases import longest_row, peak, uniform
from interposer_testing.workload import typical_sequences

Options = Mapping[str, Any]

_WINDOW_TOKENS, _SOFTCAP = 256, 30.0  # for samples, as dims say only that these exist
FEATURES: dict[str, Options] = {
    "": {},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": None},
    "float32 sinks": {"sinks": torch.float32},
    "softcap and sinks": {"softcap": 1.5, "sinks": None},
    "ALiBi": {"alibi": True},
    "large scores": {"query_peak": 60.0},
}
"""Options of the scores. ``sinks`` is the dtype of the sinks; None: the dtype of the query."""


@dataclass(frozen=True)
class Lengths:
    """Sequences as (cached tokens, query tokens), and the page size."""

    sequences: tuple[tuple[int, int], ...]
    page_size: int = 4

    @property
    def num_tokens(self) -> int:
        """T, the query tokens of all sequences."""
        return sum(tokens for _, tokens in self.sequences)

    @property
    def longest(self) -> int:
        """Largest number of cached tokens of a sequence."""
        return max((tokens for tokens, _ in self.sequences), default=0)

    @property
    def longest_query(self) -> int:
        """Largest number of query tokens of a sequence, at least 1."""
        return max((tokens for _, tokens in self.sequences), default=1)


_MIXED = ((9, 9), (7, 1), (12, 3), (1, 1))
LENGTHS = {
    "": Lengths(_MIXED),
    "one token": Lengths(((1, 1),)),
    "prefill": Lengths(((9, 9), (4, 4), (1, 1))),
    "prefill around page edges": Lengths(((3, 3), (4, 4), (5, 5), (8, 8))),
    "decode": Lengths(((1, 1), (4, 1), (5, 1), (13, 1))),
    "decode around page edges": Lengths(((15, 1), (16, 1), (17, 1)), page_size=16),
    "chunk after a prefix": Lengths(((11, 4), (8, 4), (6, 5))),
    "several pages": Lengths(((20, 1), (23, 9))),
    "page of one": Lengths(_MIXED, page_size=1),
    "page of 16": Lengths(_MIXED, page_size=16),
    "long": Lengths(((131, 1), (70, 33), (64, 1)), page_size=16),
    "sequence without a query": Lengths(((6, 2), (5, 0), (3, 1))),
    "no sequences": Lengths(()),
}


@dataclass(frozen=True)
class Paged:
    """The cache slots of the tokens of a batch.

    Attributes:
        arguments: ``page_table``, ``query_starts`` and ``seq_lens``.
        slots: slots of all cached tokens, int64.
        num_pages: P; some pages belong to no sequence.
    """

    lengths: Lengths
    arguments: dict[str, Tensor]
    slots: Tensor
    num_pages: int

    def filled(self, stored: Tensor, cache: Tensor | None = None) -> Tensor:
        """Build a cache ``[P, S, ...]`` with ``stored`` in the used slots and NaN elsewhere.

        Args:
            stored: one row per used slot.
            cache: a cache of NaN to fill; None: allocate a new one.
        """
        size = self.lengths.page_size
        if cache is None:
            empty = torch.full((self.num_pages, size, *stored.shape[1:]), torch.nan)
            cache = empty.to(stored.dtype)
        cache[self.slots // size, self.slots % size] = stored
        return cache


def paged(lengths: Lengths, generator: torch.Generator) -> Paged:
    """Assign shuffled cache pages to the sequences of a batch."""
    cached = [tokens for tokens, _ in lengths.sequences]
    table, slots = scattered(cached, lengths.page_size, generator)
    arguments = {
        "page_table": table,
        "query_starts": starts_of([tokens for _, tokens in lengths.sequences]),
        "seq_lens": torch.tensor(cached, dtype=torch.int64),
    }
    return Paged(lengths, arguments, slots, table.numel() + SPARE_PAGES)


def sampled_lengths(dims: Dims, num_tokens: int) -> Lengths:
    """Return the sequences of a typical step."""
    return Lengths(typical_sequences(num_tokens), int(dims["page_size"]))


def sampled_scores(dims: Dims) -> dict[str, Any]:
    """Return the score options, such as a softcap, that a sample's dims request."""
    return {
        "window_tokens": _WINDOW_TOKENS if dims["windowed"] else None,
        "softcap": _SOFTCAP if dims["softcapped"] else None,
        "alibi": bool(dims.get("alibi")),
        "causal": bool(dims.get("causal", True)),
        **({"sinks": None} if dims.get("sinks") else {}),
    }


def sampled_storage(dims: Dims, dtype: torch.dtype) -> dict[str, Any]:
    """Return the cache options that a sample's dims request; an 8-bit cache has scales."""
    name = str(dims.get("cache_dtype") or dtype_name(dtype))
    scaled = bool(dims.get("scaled", name != dtype_name(dtype)))
    per_head = scaled and dims.get("per_head")
    return {"cache_dtype": getattr(torch, name), "scaled": "heads" if per_head else scaled}


def random_query(
    shape: tuple[int, ...], options: Options, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Return random queries with magnitudes up to the option ``query_peak``, 1 by default."""
    peak_value = options.get("query_peak", 1.0)
    return uniform(shape, dtype, generator, -peak_value, peak_value)


def random_scale(shape: tuple[int, ...], options: Options, generator: torch.Generator) -> Tensor:
    """Return random quantization scales that map numbers up to 1 to the whole 8-bit range."""
    smallest = 0.008 if options.get("cache_dtype") == torch.int8 else 0.004
    return uniform(shape, torch.float32, generator, smallest, 0.02)


def score_arguments(
    heads: int, head_size: int, options: Options, dtype: torch.dtype, generator: torch.Generator
) -> tuple[dict[str, Any], dict[str, bool]]:
    """Build the score arguments of an op, ``scale`` to ``alibi_slopes``, and the matching dims."""
    sinks = slopes = None
    if "sinks" in options:
        sinks = uniform((heads,), options["sinks"] or dtype, generator, -1.0, 2.0)
    if options.get("alibi"):
        # Steeper than real ALiBi slopes, so that short test sequences show the bias.
        slopes = 2.0 ** -torch.arange(heads, dtype=torch.float32)
    window_tokens, softcap = options.get("window_tokens"), options.get("softcap")
    arguments = {
        "scale": score_scale(head_size),
        "causal": options.get("causal", True),
        "window_tokens": window_tokens,
        "softcap": softcap,
        "sinks": sinks,
        "alibi_slopes": slopes,
    }
    values = {"windowed": window_tokens, "softcapped": softcap, "sinks": sinks, "alibi": slopes}
    dims = {name: value is not None for name, value in values.items()}
    return arguments, {**dims, "causal": bool(arguments["causal"])}


def score_scale(head_size: int) -> float:
    """Return three times the usual softmax scale, so that random scores differ noticeably."""
    return 3 * head_size**-0.5  # type: ignore[no-any-return]


def bounded_case(
    label: str,
    arguments: Mapping[str, Any],
    dims: Dims,
    keys: Tensor,
    longest: int,
    key_scale: Tensor | None = None,
    *,
    width: int,
) -> Case:
    """Build a case with keys and values up to 1, and compute the error bounds.

    Scores are kept in float32. The absolute error of a score is the relative error of its softmax
    weight, and weights multiply stored values, which are at most 1, or 1.125 if 8-bit rounding
    raised them. The same error applies to the log-sum-exp.

    Args:
        keys: stored keys; unused slots are NaN, or -128 for integers.
        longest: largest number of keys of a query.
        width: elements of a query and a key.
    """
    query, slopes = arguments["query"], arguments.get("alibi_slopes")
    stored_keys = keys.float().nan_to_num()
    if not keys.is_floating_point():
        stored_keys = stored_keys.masked_fill(stored_keys == -128, 0.0)
    largest_key = longest_row(stored_keys) * (1 if key_scale is None else peak(key_scale))
    largest_score = arguments["scale"] * longest_row(query) * largest_key
    if slopes is not None:
        largest_score += longest * peak(slopes)
    # e5m2 has two fraction bits: rounding raises a value by at most an eighth.
    largest_value = 1.0 if keys.dtype == query.dtype else 1.125
    return Case(
        label,
        arguments,
        dims,
        reduction=width + longest,
        magnitude=(1 + largest_score) * largest_value,
        rounded=largest_value,
    )
