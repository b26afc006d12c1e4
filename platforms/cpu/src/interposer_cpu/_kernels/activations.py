"""Gated activations of the compiled library. T tokens, I intermediate size."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from interposer_cpu._kernels.fusion import fused
from interposer_cpu._kernels.interface import GELU, SILU, TYPES
from interposer_cpu._kernels.rows import row_layout
from interposer_cpu.native import library


@fused("activation", read=lambda: SILU)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Compute the op ``silu_and_mul``: ``[..., 2 I]`` to ``[..., I]``."""
    return _gated(x, SILU)


@fused("activation", read=lambda approximate: GELU[approximate])
def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Compute the op ``gelu_and_mul``: ``[..., 2 I]`` to ``[..., I]``."""
    return _gated(x, GELU[approximate])


def _gated(x: torch.Tensor, activation: int) -> torch.Tensor:
    dtype, ndim = x.dtype, x.ndim
    # The most frequent case first: at decode, Python overhead is a large share of the call.
    if ndim == 2 and x.is_contiguous() and not is_compiling():
        count, columns = x.shape
        width = columns >> 1
        out = torch.empty(count, width, dtype=dtype)
        start = x.data_ptr()
        up = start + width * dtype.itemsize
        kind = TYPES[dtype]
        library().gate(start, up, out.data_ptr(), kind, activation, count, width, columns)
        return out
    layout = row_layout(x)
    if layout is None or layout[1] > 1:
        dense = _gated(x.contiguous(), activation)
        return torch.empty_like(x[..., : x.shape[-1] // 2]).copy_(dense)
    count, _, columns, step, _ = layout
    width = columns // 2
    out = torch.empty((*x.shape[:-1], width), dtype=dtype)
    if is_compiling():
        rows = x.reshape(-1, columns)
        torch.ops.interposer_cpu.gate_out(out.view(-1, width), rows, activation)
        return out
    start = x.data_ptr()
    up = start + width * dtype.itemsize
    library().gate(start, up, out.data_ptr(), TYPES[dtype], activation, count, width, step)
    return out
