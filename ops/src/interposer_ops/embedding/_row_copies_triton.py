# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Copies of rows: of a table, of chosen tokens, and of sequences padded or one after the other.

Dimensions: T rows, B sequences, L rows of the longest one. Nothing is computed, so that numbers
keep all their bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, FP32, INT64, Build, given, meta
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.parameters import parameters_for, per_device
from interposer_ops._triton.rows import RowTile, row_tile


@triton_kernel("embedding")
def embedding_triton(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Compute ``embedding``."""
    return _selected(weight, token_ids, 0)


@triton_kernel("vocab_parallel_embedding")
def vocab_parallel_embedding_triton(token_ids: Tensor, weight: Tensor, first_row: int) -> Tensor:
    """Compute ``vocab_parallel_embedding``."""
    return _selected(weight, token_ids, first_row)


@triton_kernel("select_rows")
def select_rows_triton(x: Tensor, indices: Tensor) -> Tensor:
    """Compute ``select_rows``."""
    return _selected(x, indices, 0)


@triton_kernel("pad_rows")
def pad_rows_triton(x: Tensor, starts: Tensor, max_rows: int) -> Tensor:
    """Compute ``pad_rows``."""
    num_sequences = starts.shape[0] - 1
    shape = (num_sequences, max_rows, *x.shape[1:])
    padded = torch.empty(shape, dtype=x.dtype, device=x.device)
    if padded.numel() == 0:
        return padded
    x, width, last, inner_stride = _row_form(x, 1)
    tile = _tile(x, width)
    num_rows = num_sequences * max_rows
    _pad[(tile.row_blocks(num_rows), tile.column_blocks(width))](
        x, starts, padded, num_rows, max_rows, x.stride(0), inner_stride,
        WIDTH=width, LAST=last, **tile.options,
    )  # fmt: skip
    return padded


@triton_kernel("unpad_rows")
def unpad_rows_triton(padded: Tensor, starts: Tensor, num_rows: int) -> Tensor:
    """Compute ``unpad_rows``."""
    rows = torch.empty((num_rows, *padded.shape[2:]), dtype=padded.dtype, device=padded.device)
    if rows.numel() == 0:
        return rows
    padded, width, last, inner_stride = _row_form(padded, 2)
    tile = _tile(padded, width)
    _unpad[(tile.row_blocks(num_rows), tile.column_blocks(width))](
        padded, starts, rows, num_rows,
        # Nothing is read of sequences without rows.
        padded.shape[0] if padded.shape[1] else 0, padded.stride(0), padded.stride(1), inner_stride,
        WIDTH=width, LAST=last, ROWS=tile.rows, COLUMNS=tile.columns,
        SEQUENCES=_sequences(padded.device), **tile.compiled,
    )  # fmt: skip
    return rows


def _selected(table: Tensor, indices: Tensor, first_row: int) -> Tensor:
    """Return the rows of ``table``, which is part of a larger one, and zeros for those elsewhere.

    Args:
        table: ``[V, ...]``, the rows from ``first_row`` on.
        indices: ``[T]`` int64.
    """
    num_rows = indices.shape[0]
    chosen = torch.empty((num_rows, *table.shape[1:]), dtype=table.dtype, device=table.device)
    if chosen.numel() == 0:
        return chosen
    table, width, last, inner_stride = _row_form(table, 1)
    tile = _tile(table, width)
    _select[(tile.row_blocks(num_rows), tile.column_blocks(width))](
        table, indices, chosen, num_rows, first_row, table.shape[0], indices.stride(0),
        table.stride(0), inner_stride,
        WIDTH=width, LAST=last, **tile.options,
    )  # fmt: skip
    return chosen


def _row_form(x: Tensor, outer: int) -> tuple[Tensor, int, int, int]:
    """Return ``x``, the elements of a row, how many of them follow each other, and their step.

    Args:
        x: ``[..., L, E]``, of which the last dimension is dense.
        outer: how many dimensions count rows.
    """
    if x.ndim > outer + 2:
        x = x.flatten(outer, -2)
    width = math.prod(x.shape[outer:])
    if x.ndim < outer + 2 or x.stride(-2) == x.shape[-1]:
        return x, width, width, 0
    return x, width, x.shape[-1], x.stride(-2)


def _tile(x: Tensor, width: int) -> RowTile:
    return row_tile("row_copy", x.device, width)


@per_device
def _sequences(device: torch.device) -> int:
    """Return how many sequences are looked at in one step."""
    return parameters_for("unpad_rows", device).blocks["sequences"]


@triton.jit
def _select(
    table, indices, chosen, num_rows, first_row, table_rows, index_stride, table_stride,
    inner_stride,
    WIDTH: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    there = row < num_rows
    index = tl.load(indices + row * index_stride, mask=there, other=0) - first_row
    kept = there & (index >= 0) & (index < table_rows)
    source = table + index * table_stride
    _copy(source, kept, chosen + row * WIDTH, there, inner_stride, WIDTH, LAST, COLUMNS)


@triton.jit
def _pad(
    x, starts, padded, num_rows, max_rows, x_stride, inner_stride,
    WIDTH: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    there = row < num_rows
    sequence = row // max_rows
    place = tl.load(starts + sequence, mask=there, other=0) + row % max_rows
    kept = there & (place < tl.load(starts + sequence + 1, mask=there, other=0))
    source = x + place * x_stride
    _copy(source, kept, padded + row * WIDTH, there, inner_stride, WIDTH, LAST, COLUMNS)


@triton.jit
def _unpad(
    padded, starts, rows, num_rows, num_sequences, sequence_stride, row_stride, inner_stride,
    WIDTH: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # As many sequences end at or before a row as come before its own.
    sequence = tl.zeros((ROWS,), tl.int64)
    for first in range(0, num_sequences, SEQUENCES):
        number = first + tl.arange(0, SEQUENCES)[None, :]
        counted = number < num_sequences
        end = tl.load(starts + 1 + number, mask=counted, other=0)
        sequence += tl.sum((counted & (end <= row[:, None])).to(tl.int64), axis=1)
    sequence = sequence[:, None]
    row = row[:, None]
    there = row < num_rows
    kept = there & (sequence < num_sequences)
    place = row - tl.load(starts + sequence, mask=kept, other=0)
    source = padded + sequence * sequence_stride + place * row_stride
    _copy(source, kept, rows + row * WIDTH, there, inner_stride, WIDTH, LAST, COLUMNS)


@triton.jit
def _copy(
    source, kept, target, there, inner_stride,
    WIDTH: tl.constexpr, LAST: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store rows that are ``there``: those that are ``kept`` from ``source``, else zeros."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < WIDTH
    place = column if LAST == WIDTH else column // LAST * inner_stride + column % LAST
    numbers = tl.load(source + place, mask=kept & inside, other=0.0)
    tl.store(target + column, numbers, mask=there & inside)


_TABLE, _INDICES = (BF16, 128256, 4096), (INT64, 64)
BUILDS = (
    Build("embedding_triton", "128256 rows, 4096 wide", given(_INDICES, _TABLE)),
    Build("vocab_parallel_embedding_triton", "4096 wide", given(_INDICES, _TABLE, 128256)),
    Build("select_rows_triton", "4096 wide", given((BF16, 4096, 4096), _INDICES)),
    Build(
        "select_rows_triton",
        "float32, 3 apart of 20",
        lambda: (meta(FP32, 4096, 3, 33)[..., :20], meta(*_INDICES)),
        "float32",
    ),
    Build("pad_rows_triton", "1280 wide", given((BF16, 4096, 1280), (INT64, 17), 512)),
    Build("unpad_rows_triton", "1280 wide", given((BF16, 16, 512, 1280), (INT64, 17), 4096)),
)
