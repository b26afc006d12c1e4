"""Quantizers of activations to int8 by vLLM's ops. H hidden size.

The ops end the process where rows are no matrix.
"""

from __future__ import annotations

import torch

from interposer_vllm._ops.library import op

__all__ = [
    "quantize_int8_per_token",
    "quantize_int8_per_token_asymmetric",
    "quantize_int8_static",
]


def quantize_int8_static(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None
) -> torch.Tensor:
    """Compute ``quantize_int8_static``."""
    rows = x.contiguous()
    out = torch.empty(rows.shape, dtype=torch.int8, device=x.device)
    if rows.numel():
        op("_C::static_scaled_int8_quant")(_matrix(out), _matrix(rows), scale, zero_point)
    return out


def quantize_int8_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``quantize_int8_per_token``."""
    rows = x.contiguous()
    out = torch.empty(rows.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((*rows.shape[:-1], 1), dtype=torch.float32, device=x.device)
    if rows.numel():
        op("_C::dynamic_scaled_int8_quant")(_matrix(out), _matrix(rows), _matrix(scale), None)
    return out, scale


def quantize_int8_per_token_asymmetric(
    x: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``quantize_int8_per_token_asymmetric``."""
    rows = x.contiguous()
    shape = (*rows.shape[:-1], 1)
    out = torch.empty(rows.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    zero_point = torch.empty(shape, dtype=torch.int32, device=x.device)
    if rows.numel():
        op("_C::dynamic_scaled_int8_quant")(*map(_matrix, (out, rows, scale, zero_point)))
    return out, scale, zero_point


def _matrix(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, rows.shape[-1])
