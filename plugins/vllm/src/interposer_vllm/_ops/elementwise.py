"""Activations and norms by vLLM's ops, which write into tensors that they are given.

Dimensions: T tokens, H hidden size, I intermediate size.
"""

from __future__ import annotations

import torch

from interposer_vllm._ops.library import op

__all__ = [
    "fused_add_rms_norm",
    "gelu",
    "gelu_and_mul",
    "quick_gelu",
    "rms_norm",
    "silu_and_mul",
]

_GATED_GELU = {"none": "_C::gelu_and_mul", "tanh": "_C::gelu_tanh_and_mul"}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``rms_norm``."""
    rows = x.contiguous()
    out = torch.empty_like(rows)
    if rows.numel():
        op("_C::rms_norm")(out, rows, weight.contiguous(), eps)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``fused_add_rms_norm``, on copies: the op writes over both of its operands."""
    y = x.clone(memory_format=torch.contiguous_format)
    total = residual.clone(memory_format=torch.contiguous_format)
    if y.numel():
        op("_C::fused_add_rms_norm")(y, total, weight.contiguous(), eps)
    return y, total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Compute ``silu_and_mul``."""
    return _gated("_C::silu_and_mul", x)


def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Compute ``gelu_and_mul``."""
    return _gated(_GATED_GELU[approximate], x)


def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Compute ``gelu`` by its approximation; no other is accepted."""
    return _single("_C::gelu_tanh", x)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute ``quick_gelu``."""
    return _single("_C::gelu_quick", x)


def _gated(name: str, x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    if out.numel():
        op(name)(out, x.contiguous())
    return out


def _single(name: str, x: torch.Tensor) -> torch.Tensor:
    rows = x.contiguous()
    out = torch.empty_like(rows)
    if rows.numel():
        op(name)(out, rows)
    return out
