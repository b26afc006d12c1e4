"""Quantization of activations to int8 by vLLM's ops, which accept 2-D tensors only."""

from __future__ import annotations

import torch

from interposer_vllm._ops.library import op

__all__ = ["quantize_int8_per_token", "quantize_int8_static"]


def quantize_int8_static(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None
) -> torch.Tensor:
    """Quantize ``x`` to int8 by a static scale, without a zero point."""
    rows = x.contiguous()
    out = torch.empty(rows.shape, dtype=torch.int8, device=x.device)
    if rows.numel():
        op("_C::static_scaled_int8_quant")(_matrix(out), _matrix(rows), scale, None)
    return out


def quantize_int8_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row of ``x`` to int8 by a dynamic scale; return values and float32 scales."""
    rows = x.contiguous()
    out = torch.empty(rows.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((*rows.shape[:-1], 1), dtype=torch.float32, device=x.device)
    if rows.numel():
        op("_C::dynamic_scaled_int8_quant")(_matrix(out), _matrix(rows), _matrix(scale), None)
    # The op returns the scale 0 for a row of zeros; interposer's op promises a nonzero scale.
    return out, scale.masked_fill_(scale == 0, 1)


def _matrix(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, rows.shape[-1])
