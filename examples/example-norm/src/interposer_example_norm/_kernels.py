"""RMS norm kernels made of a few torch calls.

Shapes: T tokens, H hidden size. Inputs may have further leading dimensions.
"""

from __future__ import annotations

import torch

# Up to this many elements, the overhead of each torch call costs more than the memory traffic that
# several calls would save.
_SMALL_NUMEL = 1 << 15


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of ``x`` to unit root mean square, then by ``weight``.

    Implements the op ``rms_norm``: y = x / sqrt(mean(x^2) + eps) * weight, in float32.

    Args:
        x: ``[T, H]``, float32 or bfloat16.
        weight: ``[H]``, dtype of ``x``.
        eps: added to the mean square.
    Returns: ``[T, H]``, dtype of ``x``.
    """
    if x.numel() <= _SMALL_NUMEL:
        return torch.rms_norm(x, weight.shape, weight, eps)
    return _unit_rms(x, eps).mul_(weight).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``residual`` to ``x`` and normalise the sum.

    Implements the op ``fused_add_rms_norm``.

    Args:
        x: ``[T, H]``, float32 or bfloat16.
        residual: ``[T, H]``, dtype of ``x`` or float32.
        weight: ``[H]``, dtype of ``x``.
        eps: added to the mean square.
    Returns: the normalised sum, in the dtype of ``x``, and the sum, each ``[T, H]``.
    """
    total = x + residual
    if total.dtype == weight.dtype:
        return rms_norm(total, weight, eps), total
    # A float32 residual makes the sum float32: torch.rms_norm wants one dtype for input and weight.
    is_small = total.numel() <= _SMALL_NUMEL
    unit = torch.rms_norm(total, weight.shape, None, eps) if is_small else _unit_rms(total, eps)
    return unit.mul_(weight).to(x.dtype), total


def _unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    x_float = x.float()
    # A dot product of each row with itself needs no buffer for the squares.
    mean_square = torch.linalg.vecdot(x_float, x_float) / x.shape[-1]
    scale = torch.rsqrt(mean_square + eps).unsqueeze(-1)
    # ``float()`` returns a float32 ``x`` itself, which must not be overwritten.
    return x_float * scale if x_float is x else x_float.mul_(scale)
