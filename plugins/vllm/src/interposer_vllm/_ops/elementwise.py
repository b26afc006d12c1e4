"""Activations and norms by vLLM's ops, which write results into given tensors.

Shapes: T tokens, H hidden size, I intermediate size.
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
    """Scale each row of ``x`` to unit root mean square, then by ``weight``."""
    rows = x.contiguous()
    out = torch.empty_like(rows)
    if rows.numel():
        op("_C::rms_norm")(out, rows, weight.contiguous(), eps)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``residual`` to ``x`` and normalise the sum; return the normalised sum and the sum.

    The op overwrites both operands, so copies are passed.
    """
    y = x.clone(memory_format=torch.contiguous_format)
    total = residual.clone(memory_format=torch.contiguous_format)
    if y.numel():
        op("_C::fused_add_rms_norm")(y, total, weight.contiguous(), eps)
    return y, total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Multiply SiLU of the first half of ``x`` by the second half."""
    return _gated("_C::silu_and_mul", x)


def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Multiply GELU of the first half of ``x`` by the second half."""
    return _gated(_GATED_GELU[approximate], x)


def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Apply the tanh approximation of GELU, the only GELU that the predicate accepts."""
    return _single("_C::gelu_tanh", x)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Apply x * sigmoid(1.702 x)."""
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
