# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Norms of the heads or groups of a row, each by itself, by one source.

T tokens, N heads, K kv heads, D head size, H hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interposer_ops._triton.build import BF16, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import as_rows, row_tile


@triton_kernel("qk_norm")
def qk_norm_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``qk_norm``, both in one launch."""
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = key.shape[1]
    y = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_y = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    if y.numel() + key_y.numel() == 0:
        return y, key_y
    tile = row_tile("head_norm", query.device, head_size)
    query_blocks = tile.row_blocks(num_tokens * num_heads)
    _norm_heads[(query_blocks + tile.row_blocks(num_tokens * num_kv_heads),)](
        query, key, query_weight, key_weight, y, key_y, num_tokens, query.stride(0), key.stride(0),
        eps, query_blocks,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, SIZE=head_size, **tile.options,
    )  # fmt: skip
    return y, key_y


@triton_kernel("l2_norm")
def l2_norm_triton(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``l2_norm``."""
    return _normalised(x, None, None, eps, x.shape[-1], "l2")


@triton_kernel("gated_rms_norm")
def gated_rms_norm_triton(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> torch.Tensor:
    """Compute ``gated_rms_norm``."""
    kind = "norm first" if norm_before_gate else "gate first"
    return _normalised(x, gate, weight, eps, group_size, kind)


def _normalised(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    group_size: int,
    kind: str,
) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows = as_rows(x)
    gates = None if gate is None else as_rows(gate)
    num_groups = y.numel() // group_size
    tile = row_tile("head_norm", x.device, group_size)
    _norm_groups[(tile.row_blocks(num_groups),)](
        rows, gates, weight, y, num_groups, rows.stride(0), 0 if gates is None else gates.stride(0),
        eps,
        PER_ROW=x.shape[-1] // group_size, SIZE=group_size, KIND=kind, **tile.options,
    )  # fmt: skip
    return y


@triton.jit
def _norm_heads(
    query, key, query_weight, key_weight, y, key_y, num_tokens, query_stride, key_stride, eps,
    query_blocks,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block < query_blocks:
        head = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        token = head // NUM_HEADS
        x = query + token * query_stride + (head % NUM_HEADS) * SIZE
        there, target = token < num_tokens, y + head * SIZE
        _norm_rows(x, None, query_weight, target, there, eps, SIZE, "rms", COLUMNS)
    else:
        head = (block - query_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        token = head // NUM_KV_HEADS
        x = key + token * key_stride + (head % NUM_KV_HEADS) * SIZE
        there, target = token < num_tokens, key_y + head * SIZE
        _norm_rows(x, None, key_weight, target, there, eps, SIZE, "rms", COLUMNS)


@triton.jit
def _norm_groups(
    x, gate, weight, y, num_groups, x_stride, gate_stride, eps,
    PER_ROW: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row, first = group // PER_ROW, (group % PER_ROW) * SIZE
    x += row * x_stride + first
    if gate is not None:
        gate += row * gate_stride + first
    if weight is not None:
        weight += first
    y += group * SIZE
    _norm_rows(x, gate, weight, y, group < num_groups, eps, SIZE, KIND, COLUMNS)


@triton.jit
def _norm_rows(
    x, gate, weight, y, there, eps,
    SIZE: tl.constexpr, KIND: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Normalise the row at each of a column of pointers, to the length or root mean square of 1."""
    column = tl.arange(0, COLUMNS)[None, :]
    share: tl.constexpr = 1.0 if KIND == "l2" else 1.0 / SIZE
    if COLUMNS >= SIZE:
        inside = there & (column < SIZE)
        value = _given(x, gate, column, inside, KIND)
        scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) * share + eps)
        result = _finished(value * scale, gate, weight, column, inside, KIND)
        tl.store(y + column, result.to(y.dtype.element_ty), mask=inside)
    else:
        squares = tl.zeros_like(there).to(tl.float32) + tl.zeros([1, COLUMNS], tl.float32)
        for start in range(0, SIZE, COLUMNS):
            inside = there & (start + column < SIZE)
            value = _given(x, gate, start + column, inside, KIND)
            squares += value * value
        scale = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) * share + eps)
        for start in range(0, SIZE, COLUMNS):
            place = start + column
            inside = there & (place < SIZE)
            value = _given(x, gate, place, inside, KIND)
            result = _finished(value * scale, gate, weight, place, inside, KIND)
            tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _given(x, gate, column, inside, KIND: tl.constexpr):
    """Return what is normalised."""
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == "gate first":
        value *= _opening(gate, column, inside)
    return value


@triton.jit
def _finished(value, gate, weight, column, inside, KIND: tl.constexpr):
    """Return what becomes of a normalised row."""
    if weight is not None:
        value *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == "norm first":
        value *= _opening(gate, column, inside)
    return value


@triton.jit
def _opening(gate, column, inside):
    closed = tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
    return closed / (1.0 + tl.exp(-closed))


def _gated(label: str, width: int, group_size: int, norm_before_gate: bool) -> Build:
    rows, options = (BF16, 64, width), (1e-5, group_size, norm_before_gate)
    return Build("gated_rms_norm_triton", label, given(rows, rows, (BF16, width), *options))


_WEIGHT = (BF16, 128)
BUILDS = (
    Build(
        "qk_norm_triton",
        "32 and 8 heads of 128",
        given((BF16, 64, 32, 128), (BF16, 64, 8, 128), _WEIGHT, _WEIGHT, 1e-6),
    ),
    Build("l2_norm_triton", "16 heads of 128", given((BF16, 64, 16, 128), 1e-6)),
    _gated("groups of 128", 4096, 128, True),
    _gated("one of 8192", 8192, 8192, False),
    _gated("one of 14336", 14336, 14336, False),
)
