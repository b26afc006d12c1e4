# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernel for all activations, elementwise and gated.

I intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, E4M3, FP32, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import as_rows, row_tile
from interposer_ops._triton.small_floats import fp8_format, fp8_memory, quantize

_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


@triton_kernel("gelu")
def gelu_triton(x: Tensor, approximate: str) -> Tensor:
    """Compute ``gelu`` in Triton, by the error function or the tanh approximation."""
    return _launch_activation(x, _GELU[approximate], "single")


@triton_kernel("quick_gelu")
def quick_gelu_triton(x: Tensor) -> Tensor:
    """Compute ``quick_gelu`` in Triton: x * sigmoid(1.702 x) for each element."""
    return _launch_activation(x, "silu", "single", 1.702)


@triton_kernel("relu2")
def relu2_triton(x: Tensor) -> Tensor:
    """Compute ``relu2`` in Triton: max(x, 0)^2 for each element."""
    return _launch_activation(x, "relu2", "single")


@triton_kernel("silu_and_mul")
def silu_and_mul_triton(x: Tensor) -> Tensor:
    """Compute ``silu_and_mul`` in Triton: SiLU of the first half times the second half."""
    return _launch_activation(x, "silu", "gate first")


@triton_kernel("silu_and_mul_quantize_fp8")
def silu_and_mul_quantize_fp8_triton(x: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Compute ``silu_and_mul_quantize_fp8`` in Triton: gated SiLU, quantized by one scale."""
    return _launch_activation(x, "silu", "gate first", scale=scale, out_dtype=out_dtype)


@triton_kernel("gelu_and_mul")
def gelu_and_mul_triton(x: Tensor, approximate: str) -> Tensor:
    """Compute ``gelu_and_mul`` in Triton: GELU of the first half times the second half."""
    return _launch_activation(x, _GELU[approximate], "gate first")


@triton_kernel("swiglu_oai_and_mul")
def swiglu_oai_and_mul_triton(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Compute ``swiglu_oai_and_mul`` in Triton: the clamped SwiGLU of gpt-oss."""
    return _launch_activation(x, "silu", "pairs", alpha, limit)


def _launch_activation(
    x: Tensor, kind: str, order: str, alpha: float = 1.0, limit: float = 0.0,
    scale: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Launch the activation ``kind`` on the gates, multiply by any up elements, return the result.

    Args:
        order: layout of a row: ``single`` (gates only), ``gate first`` (gates in the first half, up
            elements in the second), or ``pairs`` (alternating gate and up elements).
        alpha: factor of the sigmoid's argument.
        limit: upper limit of gates, and limit of the magnitude of up elements.
        scale: divides the results before they are quantized to ``out_dtype``.
        out_dtype: an 8-bit float dtype; None to return the dtype of ``x``.
    """
    width = x.shape[-1] if order == "single" else x.shape[-1] // 2
    y = torch.empty((*x.shape[:-1], width), dtype=out_dtype or x.dtype, device=x.device)
    format_ = None if out_dtype is None else fp8_format(out_dtype)
    if y.numel() == 0:
        return y
    rows = as_rows(x)
    num_rows = rows.shape[0]
    tile = row_tile("activation", x.device, width)
    _activation[(tile.row_blocks(num_rows), tile.column_blocks(width))](
        rows, y if format_ is None else fp8_memory(y), scale, num_rows, rows.stride(0),
        float(alpha), float(limit), None if format_ is None else format_.largest,
        WIDTH=width, KIND=kind, ORDER=order, FORMAT=format_, **tile.options,
    )  # fmt: skip
    return y


@triton.jit
def _activation(
    x, y, divisor, num_rows, x_stride, alpha, limit, largest,
    WIDTH: tl.constexpr, KIND: tl.constexpr, ORDER: tl.constexpr, FORMAT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    x += row * x_stride
    if ORDER == "pairs":
        gate = tl.load(x + 2 * column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + 2 * column + 1, mask=inside, other=0.0).to(tl.float32)
        gate = tl.where(gate > limit, limit, gate)
        up = _clamp(up, limit) + 1.0
    else:
        gate = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        if ORDER == "gate first":
            up = tl.load(x + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    # Every comparison with a NaN is False, so that the NaN itself is kept.
    if KIND == "relu2":
        positive = tl.where(gate < 0, 0.0, gate)
        result = positive * positive
    elif KIND == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the sigmoid of 2 z.
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-2.0 * inner))
    else:
        result = gate / (1.0 + tl.exp(-alpha * gate))
    if ORDER != "single":
        result *= up
    dtype: tl.constexpr = y.dtype.element_ty
    if divisor is not None:
        code = quantize(result, tl.load(divisor), 0.0, largest, dtype, FORMAT)
        tl.store(y + row * WIDTH + column, code, mask=inside)
    else:
        tl.store(y + row * WIDTH + column, result.to(dtype), mask=inside)


@triton.jit
def _clamp(value, limit):
    return tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))


BUILDS = (
    *(
        Build(f"{op}_triton", label, given((BF16, 64, 2 * 11008), *options))
        for op, label, *options in (
            ("gelu", "erf", "none"),
            ("quick_gelu", "plain"),
            ("relu2", "plain"),
            ("silu_and_mul", "plain"),
            ("gelu_and_mul", "tanh", "tanh"),
            ("swiglu_oai_and_mul", "plain", 1.702, 7.0),
        )
    ),
    Build(
        "silu_and_mul_quantize_fp8_triton",
        "float8_e4m3fn",
        given((BF16, 64, 2 * 11008), (FP32, 1), E4M3),
        dims={"out_dtype": "float8_e4m3fn"},
    ),
)
