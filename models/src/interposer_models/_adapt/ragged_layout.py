"""Conversion of padded batches to the ragged layout of ``ragged_attention``.

No data is moved: padding, and unused memory between the rows of a cache, become sequences with
ignored results.

Dimensions: B sequences, N heads, K kv heads, D head size, T query tokens, U key tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from interposer_models._adapt.masks import Run


class Layout(NamedTuple):
    """The starts of the sequences, and the lengths of the longest queries and keys."""

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
    """Return the layout of a batch.

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
    """Return ``[B, K, U, D]`` tensors as rows ``[rows, K, D]``, and the rows of one sequence.

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
