"""Sequences, options and bounds that the cases of attention share.

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

_WINDOW_TOKENS, _SOFTCAP = 256, 30.0  # of samples; the dims do not tell how large they are
FEATURES: dict[str, Options] = {
    "": {},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": None},
    "float32 sinks": {"sinks": torch.float32},
    "softcap and sinks": {"softcap": 1.5, "sinks": None},
    "ALiBi": {"alibi": True},
    "large scores": {"query_peak": 60.0},
}
"""Options of the scores; ``sinks`` is their dtype, None that of the query."""


@dataclass(frozen=True)
class Lengths:
    """Sequences as (tokens in the cache, tokens of the query), and the tokens of a page."""

    sequences: tuple[tuple[int, int], ...]
    page_size: int = 4

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return sum(tokens for _, tokens in self.sequences)

    @property
    def longest(self) -> int:
        """Return the most tokens that a sequence has in the cache."""
        return max((tokens for tokens, _ in self.sequences), default=0)

    @property
    def longest_query(self) -> int:
        """Return the most tokens of a query, at least 1."""
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
    """The places of the tokens of a batch.

    Attributes:
        arguments: ``page_table``, ``query_starts`` and ``seq_lens``.
        slots: of all cached tokens, int64.
        num_pages: P; some pages belong to no sequence.
    """

    lengths: Lengths
    arguments: dict[str, Tensor]
    slots: Tensor
    num_pages: int

    def filled(self, stored: Tensor, cache: Tensor | None = None) -> Tensor:
        """Return a cache ``[P, S, ...]`` with ``stored`` in the slots and NaN elsewhere.

        Args:
            stored: one row for each slot.
            cache: of NaN, to fill; a new one without it.
        """
        size = self.lengths.page_size
        if cache is None:
            empty = torch.full((self.num_pages, size, *stored.shape[1:]), torch.nan)
            cache = empty.to(stored.dtype)
        cache[self.slots // size, self.slots % size] = stored
        return cache


def paged(lengths: Lengths, generator: torch.Generator) -> Paged:
    """Return the sequences over shuffled pages."""
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
    """Return the options of the scores that a sample's dims state."""
    return {
        "window_tokens": _WINDOW_TOKENS if dims["windowed"] else None,
        "softcap": _SOFTCAP if dims["softcapped"] else None,
        "alibi": bool(dims.get("alibi")),
        "causal": bool(dims.get("causal", True)),
        **({"sinks": None} if dims.get("sinks") else {}),
    }


def sampled_storage(dims: Dims, dtype: torch.dtype) -> dict[str, Any]:
    """Return the options of the cache that a sample's dims state: one of 8 bits has a scale."""
    name = str(dims.get("cache_dtype") or dtype_name(dtype))
    scaled = bool(dims.get("scaled", name != dtype_name(dtype)))
    per_head = scaled and dims.get("per_head")
    return {"cache_dtype": getattr(torch, name), "scaled": "heads" if per_head else scaled}


def random_query(
    shape: tuple[int, ...], options: Options, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Return numbers up to the ``query_peak`` of ``options``, 1 without it."""
    most = options.get("query_peak", 1.0)
    return uniform(shape, dtype, generator, -most, most)


def random_scale(shape: tuple[int, ...], options: Options, generator: torch.Generator) -> Tensor:
    """Return scales by which numbers up to 1 fill the range of 8 bits."""
    least = 0.008 if options.get("cache_dtype") == torch.int8 else 0.004
    return uniform(shape, torch.float32, generator, least, 0.02)


def score_arguments(
    heads: int, head_size: int, options: Options, dtype: torch.dtype, generator: torch.Generator
) -> tuple[dict[str, Any], dict[str, bool]]:
    """Return the arguments from ``scale`` to ``alibi_slopes``, and what dims state of them."""
    sinks = slopes = None
    if "sinks" in options:
        sinks = uniform((heads,), options["sinks"] or dtype, generator, -1.0, 2.0)
    if options.get("alibi"):
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
    given = {"windowed": window_tokens, "softcapped": softcap, "sinks": sinks, "alibi": slopes}
    stated = {name: value is not None for name, value in given.items()}
    return arguments, {**stated, "causal": bool(arguments["causal"])}


def score_scale(head_size: int) -> float:
    """Return three times the usual factor, so that random scores differ enough to matter."""
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
    """Return the case of values up to 1, with its bounds.

    Scores stay in float32. The error of one is one of its weight, and weights act on values, as
    large as any sum of them that is stored: 1, or an eighth more where 8 bits rounded them up. It
    is also the error of the logarithm.

    Args:
        keys: as they are stored; NaN, or -128 of integers, where there is none.
        longest: the most keys of a query.
        width: elements of a query and a key.
    """
    query, slopes = arguments["query"], arguments.get("alibi_slopes")
    held = keys.float().nan_to_num()
    if not keys.is_floating_point():
        held = held.masked_fill(held == -128, 0.0)
    largest_key = longest_row(held) * (1 if key_scale is None else peak(key_scale))
    largest_score = arguments["scale"] * longest_row(query) * largest_key
    if slopes is not None:
        largest_score += longest * peak(slopes)
    largest_value = 1.0 if keys.dtype == query.dtype else 1.125
    return Case(
        label,
        arguments,
        dims,
        reduction=width + longest,
        magnitude=(1 + largest_score) * largest_value,
        rounded=largest_value,
    )
