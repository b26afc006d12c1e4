"""Activations of the compiled library, gated and plain. T tokens, I intermediate size."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from interposer_cpu._kernels.fusion import fused
from interposer_cpu._kernels.interface import GELU, QUICK_GELU, SILU, TYPES
from interposer_cpu._kernels.rows import row_layout
from interposer_cpu.native import library


@fused("activation", read=lambda: SILU)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Compute the op ``silu_and_mul``: ``[..., 2 I]`` to ``[..., I]``."""
    return _activate(x, SILU)


@fused("activation", read=lambda approximate: GELU[approximate])
def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Compute the op ``gelu_and_mul``: ``[..., 2 I]`` to ``[..., I]``."""
    return _activate(x, GELU[approximate])


def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Compute the op ``gelu``: ``[..., I]`` to ``[..., I]``."""
    return _activate(x, GELU[approximate], is_gated=False)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute the op ``quick_gelu``: ``[..., I]`` to ``[..., I]``."""
    return _activate(x, QUICK_GELU, is_gated=False)


def _activate(x: torch.Tensor, activation: int, *, is_gated: bool = True) -> torch.Tensor:
    """Return ``activation(gate) * up`` for ``[gate, up] = x``, or ``activation(x)``."""
    dtype, ndim = x.dtype, x.ndim
    # The most frequent case first: at decode, Python overhead is a large share of the call.
    if ndim == 2 and x.is_contiguous() and not is_compiling():
        count, columns = x.shape
        step = columns
    else:
        layout = row_layout(x)
        if layout is None or layout[1] > 1:
            dense = _activate(x.contiguous(), activation, is_gated=is_gated)
            return torch.empty_like(x[..., : dense.shape[-1]]).copy_(dense)
        count, _, columns, step, _ = layout
    width = columns >> 1 if is_gated else columns
    out = torch.empty((*x.shape[:-1], width), dtype=dtype)
    if is_compiling():
        rows = x.reshape(-1, columns)
        torch.ops.interposer_cpu.gate_out(out.view(-1, width), rows, activation)
        return out
    start = x.data_ptr()
    up = start + width * dtype.itemsize if is_gated else 0
    library().gate(start, up, out.data_ptr(), TYPES[dtype], activation, count, width, step)
    return out
