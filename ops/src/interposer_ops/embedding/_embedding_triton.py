# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernel that copies rows of a table bit by bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, INT64, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import row_tile


@triton_kernel("embedding")
def embedding_triton(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Compute ``embedding`` in Triton: copy the table rows of the token ids."""
    num_rows, width = token_ids.shape[0], weight.shape[1]
    rows = torch.empty((num_rows, width), dtype=weight.dtype, device=weight.device)
    if rows.numel() == 0:
        return rows
    tile = row_tile("row_copy", weight.device, width)
    _select[(tile.row_blocks(num_rows), tile.column_blocks(width))](
        weight, token_ids, rows, num_rows, token_ids.stride(0), weight.stride(0),
        WIDTH=width, **tile.options,
    )  # fmt: skip
    return rows


@triton.jit
def _select(
    table, indices, rows, num_rows, index_stride, table_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = row < num_rows
    index = tl.load(indices + row * index_stride, mask=row_mask, other=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = row_mask & (column < WIDTH)
    numbers = tl.load(table + index * table_stride + column, mask=inside, other=0.0)
    tl.store(rows + row * WIDTH + column, numbers, mask=inside)


BUILDS = (
    Build(
        "embedding_triton",
        "128256 rows, 4096 wide",
        given((INT64, 64), (BF16, 128256, 4096)),
    ),
)
