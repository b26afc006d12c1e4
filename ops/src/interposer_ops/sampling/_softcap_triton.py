# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Capping of logits. T tokens, V vocabulary size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import as_rows, row_tile


@triton_kernel("logits_softcap")
def logits_softcap_triton(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Compute ``logits_softcap``."""
    y = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if y.numel() == 0:
        return y
    rows = as_rows(logits)
    num_rows, width = rows.shape
    tile = row_tile("softcap", logits.device, width)
    _softcap[(tile.row_blocks(num_rows), tile.column_blocks(width))](
        rows,
        y,
        num_rows,
        rows.stride(0),
        float(cap),
        WIDTH=width,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y


@triton.jit
def _softcap(
    logits,
    y,
    num_rows,
    stride,
    cap,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    x = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    result = cap * _tanh(tl.div_rn(x, tl.zeros_like(x) + cap))
    tl.store(y + row * WIDTH + column, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _tanh(x):
    """Return tanh(x), right to a few units of the last place, also where it is nearly x.

    Below 1 a quotient of polynomials, Lambert's continued fraction cut off after 13, which is
    off by less than 1e-9 of the result; from there on the formula with exp, which would cancel
    below.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 4.5.70.
    """
    size = tl.abs(x)
    square = x * x
    above = x * (135135.0 + square * (17325.0 + square * (378.0 + square)))
    below = 135135.0 + square * (62370.0 + square * (3150.0 + square * 28.0))
    large = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 1.0, tl.div_rn(above, below), tl.where(x < 0, -large, large))
