# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels that normalise rows or groups of a row; one source for all norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, E4M3, FP16, FP32, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import as_rows, row_tile
from interposer_ops._triton.small_floats import fp8_format, fp8_memory, quantize


@triton_kernel("rms_norm")
def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``rms_norm``; a row stays in registers where it fits a tile."""
    return normalise("rms_norm", "rms", x, weight, eps)[0]


@triton_kernel("gemma_rms_norm")
def gemma_rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``gemma_rms_norm`` in Triton: RMS norm scaled by ``1 + weight``."""
    return normalise("rms_norm", "plus one", x, weight, eps)[0]


@triton_kernel("fused_add_rms_norm")
def fused_add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute ``fused_add_rms_norm`` in Triton: residual add and RMS norm in one launch."""
    return normalise("fused_add_rms_norm", "rms", x, weight, eps, residual=residual)


@triton_kernel("fused_add_gemma_rms_norm")
def fused_add_gemma_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute ``fused_add_gemma_rms_norm`` in Triton: residual add, then Gemma's RMS norm."""
    return normalise("fused_add_rms_norm", "plus one", x, weight, eps, residual=residual)


@triton_kernel("rms_norm_quantize_fp8")
def rms_norm_quantize_fp8_triton(
    x: Tensor, weight: Tensor, scale: Tensor, eps: float, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute ``rms_norm_quantize_fp8`` in Triton: RMS norm, quantized by one scale."""
    return normalise("rms_norm_quantize", "rms", x, weight, eps, scale=scale, out_dtype=out_dtype)[
        0
    ]


@triton_kernel("fused_add_rms_norm_quantize_fp8")
def fused_add_rms_norm_quantize_fp8_triton(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``fused_add_rms_norm_quantize_fp8`` in Triton: residual add, norm, quantizer."""
    return normalise(
        "fused_add_rms_norm_quantize", "rms", x, weight, eps, residual=residual, scale=scale,
        out_dtype=out_dtype,
    )  # fmt: skip


@triton_kernel("layer_norm")
def layer_norm_triton(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute ``layer_norm``: first the mean, then the variance of the centred row."""
    return normalise("layer_norm", "layer", x, weight, eps, bias=bias)[0]


def normalise(
    tuning: str, kind: str, x: Tensor, weight: Tensor | None, eps: float, *,
    group_size: int | None = None, residual: Tensor | None = None,
    gate: Tensor | None = None, bias: Tensor | None = None,
    scale: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the normalised rows and, with a residual, the sum of rows and residual.

    Args:
        tuning: name of the file of launch parameters.
        kind: the norm, see ``norm_rows``.
        group_size: elements of a row that share one norm; None for the row.
        scale: divides the normalised rows before they are quantized to ``out_dtype``.
        out_dtype: an 8-bit float dtype; None to return the dtype of ``x``.
    """
    y = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    format_ = None if out_dtype is None else fp8_format(out_dtype)
    memory = total = y if format_ is None else fp8_memory(y)
    if residual is not None:
        dtype = torch.promote_types(x.dtype, residual.dtype)
        total = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y, total
    rows = as_rows(x)
    stream, gates = (None if tensor is None else as_rows(tensor) for tensor in (residual, gate))
    # No norm has both a residual and a gate, so that one stride is enough.
    paired = stream if gates is None else gates
    size = group_size or rows.shape[1]
    num_groups = y.numel() // size
    tile = row_tile(tuning, x.device, size)
    _norm_groups[(tile.row_blocks(num_groups),)](
        rows, stream, gates, weight, bias, scale, memory, total, num_groups, rows.stride(0),
        0 if paired is None else paired.stride(0), eps,
        None if format_ is None else format_.largest,
        PER_ROW=rows.shape[1] // size, SIZE=size, KIND=kind, FORMAT=format_, **tile.options,
    )  # fmt: skip
    return y, total


@triton.jit
def _norm_groups(
    x, residual, gate, weight, bias, divisor, y, total, num_groups, x_stride, other_stride, eps,
    largest,
    PER_ROW: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr, FORMAT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row, first = group // PER_ROW, (group % PER_ROW) * SIZE
    if divisor is not None:
        divisor = tl.load(divisor)
    if residual is not None:
        residual += row * other_stride + first
        total += group * SIZE
    if gate is not None:
        gate += row * other_stride + first
    if PER_ROW > 1 and weight is not None:
        weight += first
    norm_rows(
        x + row * x_stride + first, residual, gate, weight, bias, divisor, y + group * SIZE, total,
        group < num_groups, eps, largest, SIZE, KIND, FORMAT, COLUMNS,
    )  # fmt: skip


@triton.jit
def norm_rows(
    x, residual, gate, weight, bias, divisor, y, total, row_mask, eps, largest,
    SIZE: tl.constexpr, KIND: tl.constexpr, FORMAT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Normalise the rows that begin at the pointers ``x``.

    Args:
        row_mask: ``[ROWS, 1]``, False for rows past the end.
        KIND: "rms" scales to root mean square 1; "plus one" does too, by ``weight + 1``; "gate
            first" and "norm first" do too, with a gate before or after the norm; "l2" scales to
            length 1; "layer" shifts to mean 0 and scales to variance 1.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    # The length of a row is the root of the sum of squares, not of the mean.
    scale_of_sum: tl.constexpr = 1.0 if KIND == "l2" else 1.0 / SIZE
    # A row that fits the tile is read once; a longer row is read again in each pass.
    if COLUMNS >= SIZE:
        inside = row_mask & (column < SIZE)
        value = _norm_input(x, residual, gate, total, column, inside, KIND)
        if residual is not None:
            tl.store(total + column, value.to(total.dtype.element_ty), mask=inside)
        if KIND == "layer":
            mean = tl.sum(value, axis=1, keep_dims=True) * scale_of_sum
            value = tl.where(inside, value - mean, 0.0)
        scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) * scale_of_sum + eps)
        result = _apply_affine_and_gate(
            value * scale, gate, weight, bias, column, inside, SIZE, KIND
        )
        _store(y + column, result, inside, divisor, largest, FORMAT)
    else:
        zeros = tl.zeros_like(row_mask).to(tl.float32) + tl.zeros([1, COLUMNS], tl.float32)
        if KIND == "layer":
            sums = zeros
            for start in range(0, SIZE, COLUMNS):
                inside = row_mask & (start + column < SIZE)
                sums += _norm_input(x, residual, gate, total, start + column, inside, KIND)
            mean = tl.sum(sums, axis=1, keep_dims=True) * scale_of_sum
        squares = zeros
        for start in range(0, SIZE, COLUMNS):
            position = start + column
            inside = row_mask & (position < SIZE)
            value = _norm_input(x, residual, gate, total, position, inside, KIND)
            if residual is not None:
                tl.store(total + position, value.to(total.dtype.element_ty), mask=inside)
            if KIND == "layer":
                value = tl.where(inside, value - mean, 0.0)
            squares += value * value
        scale = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) * scale_of_sum + eps)
        for start in range(0, SIZE, COLUMNS):
            position = start + column
            inside = row_mask & (position < SIZE)
            # The sum is computed again: a load of ``total`` could miss the store of another thread.
            value = _norm_input(x, residual, gate, total, position, inside, KIND)
            if KIND == "layer":
                value -= mean
            result = _apply_affine_and_gate(
                value * scale, gate, weight, bias, position, inside, SIZE, KIND
            )
            _store(y + position, result, inside, divisor, largest, FORMAT)


@triton.jit
def _norm_input(x, residual, gate, total, column, inside, KIND: tl.constexpr):
    """Load the norm's input; a sum with the residual is rounded to the dtype of ``total``."""
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty).to(tl.float32)
    if KIND == "gate first":
        value *= _gate_factor(gate, column, inside)
    return value


@triton.jit
def _apply_affine_and_gate(
    value, gate, weight, bias, column, inside, SIZE: tl.constexpr, KIND: tl.constexpr
):
    """Apply weight, bias and gate to a normalised row."""
    if weight is not None:
        factor = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
        value *= factor + 1.0 if KIND == "plus one" else factor
    if bias is not None:
        value += tl.load(bias + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if KIND == "norm first":
        value *= _gate_factor(gate, column, inside)
    return value


@triton.jit
def _gate_factor(gate, column, inside):
    gates = tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
    return gates / (1.0 + tl.exp(-gates))


@triton.jit
def _store(target, value, inside, divisor, largest, FORMAT: tl.constexpr):
    dtype: tl.constexpr = target.dtype.element_ty
    if divisor is not None:
        code = quantize(value, divisor, 0.0, largest, dtype, FORMAT)
        tl.store(target, code, mask=inside)
    else:
        tl.store(target, value.to(dtype), mask=inside)


def _norm(dtype: torch.dtype, width: int) -> Callable[[], tuple[Any, ...]]:
    return given((dtype, 64, width), (dtype, width), 1e-6)


def _added_norm(width: int) -> Callable[[], tuple[Any, ...]]:
    return given((BF16, 64, width), (FP32, 64, width), (BF16, width), 1e-6)


def _quantized_norm(width: int, *stream: tuple[torch.dtype, int, int]) -> Build:
    arguments = given((BF16, 64, width), *stream, (BF16, width), (FP32, 1), 1e-6, E4M3)
    dims = {"out_dtype": "float8_e4m3fn"}
    label = f"float8_e4m3fn, {width} wide"
    op = f"{'fused_add_' if stream else ''}rms_norm_quantize_fp8_triton"
    return Build(op, label, arguments, dims=dims)


BUILDS = (
    Build("rms_norm_triton", "bfloat16, 4096 wide", _norm(BF16, 4096)),
    Build("rms_norm_triton", "float32, 128 wide", _norm(FP32, 128), "float32"),
    Build("rms_norm_triton", "float16, 20000 wide", _norm(FP16, 20000), "float16"),
    Build("fused_add_rms_norm_triton", "4096 wide", _added_norm(4096)),
    Build("fused_add_rms_norm_triton", "18432 wide", _added_norm(18432)),
    Build("gemma_rms_norm_triton", "3584 wide", _norm(BF16, 3584)),
    Build("fused_add_gemma_rms_norm_triton", "3584 wide", _added_norm(3584)),
    Build("layer_norm_triton", "4096 wide", given((BF16, 64, 4096), *[(BF16, 4096)] * 2, 1e-5)),
    _quantized_norm(4096),
    _quantized_norm(14336),
    _quantized_norm(4096, (FP32, 64, 4096)),
)
