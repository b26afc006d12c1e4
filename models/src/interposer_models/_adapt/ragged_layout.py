"""Padded batches as the sequences, one after the other, that ``ragged_attention`` takes.

Nothing is moved: padding, and memory between the rows of a cache, are sequences of their own, which
nobody asks for.

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
    """The starts of the sequences, and the lengths of the longest."""

    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int


@lru_cache(maxsize=64)
def layout(
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
        distance: rows of keys from one sequence to the next.
        runs: keys that are no padding, None for all.
        causal: queries stand where the last keys do.
    """
    queries, keys = [0], [0]

    def add(num_queries: int, num_keys: int) -> None:
        if num_queries or num_keys:
            queries.append(queries[-1] + num_queries)
            keys.append(keys[-1] + num_keys)

    for index in range(batch):
        first, count = (0, num_keys) if runs is None else runs[index]
        before, upto = 0, num_queries
        if causal:
            # The position of the first query among the keys.
            start = num_keys - num_queries
            before = min(max(first - start, 0), num_queries)
            upto = min(max(first + count - start, 0), num_queries)
        add(before, first)
        add(upto - before, count)
        add(num_queries - upto, num_keys - first - count)
        if index < batch - 1:
            add(0, distance - num_keys)
    most = max((b - a for a, b in pairwise(keys)), default=1)
    query_starts, key_starts = (torch.tensor(each, device=device) for each in (queries, keys))
    return Layout(query_starts, key_starts, max(num_queries, 1), max(most, 1))


def flat(tensors: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """Return ``[B, K, U, D]`` tensors as rows ``[rows, K, D]``, and the rows of one sequence.

    They stay where they are if heads follow each other in memory, as those of a cache of rows do.
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
