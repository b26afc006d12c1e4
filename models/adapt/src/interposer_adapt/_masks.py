"""Attention masks of adapted models: detection of supported patterns, and the ragged layout.

transformers calls the mask function of this module for interposer's attention. It returns the mask
that sdpa would get, so that every call can be delegated to sdpa. If kernels support the mask's
pattern, the tensor carries ``MaskFacts`` as an attribute. A model that changes the mask makes a new
tensor without the attribute, so that calls are delegated.

Kernels support four patterns: all keys, keys up to the query, and either within a window. Other
masks, such as image blocks, packed sequences and chunks, have no pattern here. ``find_pattern``
evaluates a known mask function at a few pairs of positions. ``read_mask`` compares every element of
a mask from an unknown function with each pattern; only masks in host memory are read, as reading
would synchronize with an accelerator.

``ragged_layout`` describes a padded batch as ragged sequences without moving data: padding, and
unused memory between the rows of a cache, become sequences with ignored results.

Dimensions: B sequences, N heads, K kv heads, D head size, T query tokens, U key tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from interposer_adapt._forwards import INTERCEPTOR

MaskFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Pattern:
    """The keys that each query attends to: all, those up to the query, or those within a window.

    Attributes:
        causal: no keys after the query's position.
        window: only keys less than this many positions away, None for no limit.
    """

    causal: bool
    window: int | None = None


# By code and constants of the function: one entry for each kind of layer and window size.
_PATTERNS: dict[Hashable, Pattern | None] = {}


def find_pattern(function: MaskFunction) -> Pattern | None:
    """Return the pattern of a transformers mask function, None for an unsupported pattern.

    A function that holds tensors depends on more than positions, and has no pattern.
    """
    constants: set[int] = set()
    key = _function_key(function, constants)
    if key is None:
        return None
    if key not in _PATTERNS:
        _PATTERNS[key] = _probe(function, sorted(constants))
    return _PATTERNS[key]


def _function_key(value: object, numbers: set[int]) -> Hashable | None:
    """Return a hashable key of a function's code and closure; None if the closure is not constant.

    Args:
        numbers: receives the integers in the closure, such as window sizes.
    """
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = [_function_key(cell, numbers) for cell in (*cells, *(value.__defaults__ or ()))]
        return None if None in parts else (value.__code__, *parts)
    if isinstance(value, tuple | list):
        parts = [_function_key(element, numbers) for element in value]
        return None if None in parts else ("tuple", *parts)
    if isinstance(value, bool | str):
        return ("constant", value)
    if isinstance(value, int):
        numbers.add(value)
        return ("constant", value)
    return None


def _probe(function: MaskFunction, numbers: list[int]) -> Pattern | None:
    """Return the pattern that agrees with the mask function at all relevant distances, if any."""
    # A pattern can change only near 0 and near multiples of the function's constants.
    probed = {*range(9)}
    for number in numbers:
        if number > 0:
            for multiple in (number, 2 * number, 3 * number):
                probed |= {multiple + step for step in range(-2, 3) if multiple + step >= 0}
    positions = torch.tensor(sorted(probed))
    queries, keys = positions[:, None], positions[None, :]
    zero = torch.zeros((), dtype=torch.int64)
    actual = torch.as_tensor(function(zero, zero, queries, keys)).expand(len(probed), len(probed))
    patterns = [Pattern(True), Pattern(False)]
    for number in numbers:
        # transformers' bidirectional windows include the distance number itself.
        patterns += [Pattern(True, number), Pattern(False, number + 1)]
    matching = [p for p in patterns if torch.equal(_visible(p, queries, keys), actual)]
    return matching[0] if matching else None


def _visible(pattern: Pattern, queries: Tensor, keys: Tensor) -> Tensor:
    distance = queries - keys
    visible = distance >= 0 if pattern.causal else torch.ones_like(distance, dtype=torch.bool)
    return visible if pattern.window is None else visible & (distance.abs() < pattern.window)


_FACTS = "_interposer_facts"

Run = tuple[int, int]
"""The first key of a sequence that is no padding, and the number of keys without a gap."""


@dataclass(frozen=True, slots=True)
class MaskFacts:
    """The pattern of a mask and its size in queries and keys.

    Attributes:
        runs: the keys of each sequence that are no padding, None if there is no padding.
    """

    pattern: Pattern
    num_queries: int
    num_keys: int
    runs: tuple[Run, ...] | None


def mask_facts(mask: Tensor) -> MaskFacts | None:
    """Return the ``MaskFacts`` attached to a mask, None for an unknown or changed mask."""
    return getattr(mask, _FACTS, None)


def make_mask_function(sdpa_mask: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Wrap transformers' mask function for sdpa: attach ``MaskFacts`` to each mask."""

    def mask_function(*args: Any, **settings: Any) -> Tensor | None:
        # transformers passes keywords; positional arguments mean another caller.
        interceptor = None if args or is_compiling() else INTERCEPTOR.get()
        if interceptor is not None:
            return interceptor.mask(make_mask, settings)
        return make_mask(*args, **settings)

    def make_mask(*args: Any, **settings: Any) -> Tensor | None:
        mask = sdpa_mask(*args, **settings)
        if mask is not None and not args and not is_compiling():
            facts = _facts(**settings)
            if facts is not None:
                setattr(mask, _FACTS, facts)
        return mask

    return mask_function


def _facts(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] | None = None,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> MaskFacts | None:
    # A user's mask function may treat any position specially, so that probing a few proves nothing.
    if mask_function is None or use_vmap or not isinstance(q_offset, int):
        return None
    pattern = find_pattern(mask_function)
    if pattern is None:
        return None
    # Kernels align the last query with the last key.
    if (pattern.causal or pattern.window) and q_offset + q_length != kv_offset + kv_length:
        return None
    runs = None
    if attention_mask is not None:
        runs = _runs(attention_mask, kv_offset, kv_length)
        if runs is None:
            return None
        if all(run == (0, kv_length) for run in runs):
            runs = None
    return MaskFacts(pattern, q_length, kv_length, runs)


def _runs(padding: Tensor, first: int, length: int) -> tuple[Run, ...] | None:
    """Return the range of unpadded keys in each row of a mask; None if a row has several ranges.

    The run of a row that is all padding is empty.
    """
    rows = padding[:, first : first + length].bool()
    if rows.shape[1] < length:
        rows = torch.nn.functional.pad(rows, (0, length - rows.shape[1]))
    counts = rows.sum(1)
    starts = rows.int().argmax(1)
    ends = length - rows.flip(1).int().argmax(1)
    if not bool(((counts == 0) | (ends - starts == counts)).all()):
        return None
    return tuple(zip(starts.tolist(), counts.tolist(), strict=True))


def read_mask(mask: Tensor, batch: int, num_queries: int, num_keys: int) -> MaskFacts | None:
    """Return the facts of a mask tensor up to the last visible key; None for unknown patterns.

    Args:
        mask: ``[B or 1, 1, T, U]``, true where a query attends to a key.
    """
    if mask.dtype is not torch.bool or mask.ndim != 4 or mask.device.type != "cpu":
        return None
    if mask.shape[1:] != (1, num_queries, num_keys) or mask.shape[0] not in (1, batch):
        return None
    visible = mask[:, 0]
    # In all supported patterns the last query attends to the last visible key.
    last_row = visible[:, -1]
    counts = last_row.sum(1)
    ends = num_keys - last_row.flip(1).int().argmax(1)
    num_visible_keys = int(ends.max())
    if not int(counts.min()) or not num_visible_keys:
        return None
    if num_queries == 1:
        starts = ends - counts
        if not _is_range_mask(visible, starts, ends, num_keys):
            return None
        return _make_facts(Pattern(False), 1, num_visible_keys, batch, starts, counts)
    starts = visible.any(1).int().argmax(1)
    if _is_range_mask(visible, starts, ends, num_keys):
        return _make_facts(
            Pattern(False), num_queries, num_visible_keys, batch, starts, ends - starts
        )
    if int(ends.min()) != num_visible_keys:
        return None
    query_ends = ends[:, None] - torch.arange(num_queries - 1, -1, -1)
    if _is_range_mask(visible, starts[:, None], query_ends, num_keys):
        return _make_facts(
            Pattern(True), num_queries, num_visible_keys, batch, starts, ends - starts
        )
    # If a window hides keys, the last query attends to exactly one window of keys.
    window = int(counts.max())
    if _is_range_mask(
        visible, torch.maximum(starts[:, None], query_ends - window), query_ends, num_keys
    ):
        pattern = Pattern(True, window)
        return _make_facts(pattern, num_queries, num_visible_keys, batch, starts, ends - starts)
    return None


def _is_range_mask(visible: Tensor, starts: Tensor, ends: Tensor, num_keys: int) -> bool:
    """Return True if each query attends exactly to the keys from ``starts`` up to ``ends``."""
    keys = torch.arange(num_keys)
    if starts.ndim == 1:
        starts, ends = starts[:, None], ends[:, None]
    return torch.equal(
        visible, ((keys >= starts[..., None]) & (keys < ends[..., None])).expand_as(visible)
    )


def _make_facts(
    pattern: Pattern, num_queries: int, num_keys: int, batch: int, starts: Tensor, counts: Tensor
) -> MaskFacts:
    runs = tuple(zip(starts.tolist(), counts.tolist(), strict=True))
    if len(runs) < batch:
        runs *= batch
    is_unpadded = all(run == (0, num_keys) for run in runs)
    return MaskFacts(pattern, num_queries, num_keys, None if is_unpadded else runs)


class Layout(NamedTuple):
    """Offsets of the sequences in packed queries and keys, and the largest lengths of both."""

    query_starts: Tensor
    key_starts: Tensor
    max_queries: int
    max_keys: int


@lru_cache(maxsize=64)
def ragged_layout(
    batch: int,
    num_queries: int,
    num_keys: int,
    distance: int,
    runs: tuple[Run, ...] | None,
    causal: bool,
    device: torch.device,
) -> Layout:
    """Return the offsets of a padded batch's sequences in packed queries and keys.

    Args:
        distance: rows from the keys of one sequence to the keys of the next.
        runs: unpadded keys of each sequence, None without padding.
        causal: the last query is aligned with the last key.
    """
    queries, keys = [0], [0]

    def add(num_queries: int, num_keys: int) -> None:
        if num_queries or num_keys:
            queries.append(queries[-1] + num_queries)
            keys.append(keys[-1] + num_keys)

    for index in range(batch):
        first, count = (0, num_keys) if runs is None else runs[index]
        num_before, query_end = 0, num_queries
        if causal:
            # The position of the first query among the keys.
            start = num_keys - num_queries
            num_before = min(max(first - start, 0), num_queries)
            query_end = min(max(first + count - start, 0), num_queries)
        add(num_before, first)
        add(query_end - num_before, count)
        add(num_queries - query_end, num_keys - first - count)
        if index < batch - 1:
            add(0, distance - num_keys)
    max_keys = max((b - a for a, b in pairwise(keys)), default=1)
    query_starts, key_starts = (torch.tensor(starts, device=device) for starts in (queries, keys))
    return Layout(query_starts, key_starts, max(num_queries, 1), max(max_keys, 1))


def as_rows(tensors: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """Reshape ``[B, K, U, D]`` to rows ``[rows, K, D]``; also return the row stride of sequences.

    The result is a view if heads are adjacent in memory, as in a cache of rows.
    """
    rows = [tensor.transpose(1, 2) for tensor in tensors]
    batch, length = rows[0].shape[:2]
    if batch == 1:
        return [row[0] for row in rows], length
    distances = set()
    for row in rows:
        between, step, *heads = row.stride()
        dense = heads == [row.shape[3], 1] and between % step == 0
        distances.add(between // step if dense else 0)
    distance = distances.pop()
    if distances or distance < length:
        return [row.reshape(batch * length, *row.shape[2:]) for row in rows], length
    count = (batch - 1) * distance + length
    strided = [
        row.as_strided((count, *row.shape[2:]), (row.stride(1), *row.stride()[2:])) for row in rows
    ]
    return strided, distance
