"""Quantizers by the compiled library. H hidden size."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from interposer_cpu.native import library
from interposer_cpu.native_rows import FLOAT32, TYPES, distances

__all__ = ["quantize_int8_per_token"]

_INT8 = torch.int8


def quantize_int8_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the op ``quantize_int8_per_token``."""
    form = distances(x)
    if form is None or form[1] > 1:
        codes, scales = quantize_int8_per_token(x.contiguous())
        return torch.empty_like(x, dtype=_INT8).copy_(codes), scales
    count, _, width, step, _ = form
    if x.ndim == 2:
        codes = torch.empty(count, width, dtype=_INT8)
        scales = torch.empty(count, 1, dtype=FLOAT32)
    else:
        codes = torch.empty(x.shape, dtype=_INT8)
        scales = torch.empty((*x.shape[:-1], 1), dtype=FLOAT32)
    if is_compiling():
        rows = x.reshape(-1, width)
        torch.ops.interposer_cpu.code_out(codes.view(-1, width), scales.view(-1, 1), rows)
        return codes, scales
    library().code(
        x.data_ptr(), codes.data_ptr(), scales.data_ptr(), TYPES[x.dtype], count, width, step
    )
    return codes, scales
