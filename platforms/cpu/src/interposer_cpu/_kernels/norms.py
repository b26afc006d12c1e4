"""RMS norms and layer norm of the compiled library. H is the hidden size.

For one row, the Python call costs more than the arithmetic. So ``rms_norm``, the most frequent op,
calls the library without helper functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import empty_like
from torch.compiler import is_compiling

from interposer_cpu._kernels.fusion import fused
from interposer_cpu._kernels.interface import TYPES
from interposer_cpu._kernels.rows import row_layout
from interposer_cpu.native import library

# Bits of the library's op: has a weight, has a bias, subtracts the mean.
_WEIGHTED, _BIASED, _CENTRED = 1, 2, 4

Pair = tuple[torch.Tensor, torch.Tensor]


@fused("rms_norm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the op ``rms_norm``: scale rows to unit root mean square, times ``weight``."""
    if x.is_contiguous() and not is_compiling():
        out = empty_like(x)
        library().rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            TYPES[x.dtype],
            x.numel(),
            weight.numel(),
            eps,
        )
        return out
    return _normalize(x, weight, None, eps, 0.0, centred=False)


def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the op ``gemma_rms_norm``: RMS norm scaled by ``1 + weight``."""
    return _normalize(x, weight, None, eps, 1.0, centred=False)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Compute the op ``layer_norm``: mean 0, variance 1, times ``weight``, plus ``bias``."""
    return _normalize(x, weight, bias, eps, 0.0, centred=True)


@fused("fused_add_rms_norm")
def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Pair:
    """Compute the op ``fused_add_rms_norm``: add to the residual, then RMS norm."""
    return _add_and_normalize(x, residual, weight, eps, 0.0)


def fused_add_gemma_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Pair:
    """Compute the op ``fused_add_gemma_rms_norm``: add to the residual, then Gemma's RMS norm."""
    return _add_and_normalize(x, residual, weight, eps, 1.0)


def prepare(weight: torch.Tensor) -> dict[str, Any]:
    """Make the weight of an RMS norm contiguous."""
    return {"weight": weight.contiguous()}


def prepare_affine(weight: torch.Tensor | None, bias: torch.Tensor | None) -> dict[str, Any]:
    """Make weight and bias of ``layer_norm`` contiguous."""
    parts = {"weight": weight, "bias": bias}
    return {name: None if part is None else part.contiguous() for name, part in parts.items()}


def _add_and_normalize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, shift: float
) -> Pair:
    kind = residual.dtype
    if not (x.is_contiguous() and residual.is_contiguous()):
        # empty_like keeps the strides of x, as the reference does.
        dense = _add_and_normalize(x.contiguous(), residual.contiguous(), weight, eps, shift)
        return empty_like(x).copy_(dense[0]), empty_like(x, dtype=kind).copy_(dense[1])
    out, total = empty_like(x), empty_like(residual)
    if is_compiling():
        width = x.shape[-1]
        rows = (tensor.view(-1, width) for tensor in (out, total, x, residual))
        torch.ops.interposer_cpu.add_rms_norm_out(*rows, weight, eps, shift)
        return out, total
    library().add_rms_norm(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        total.data_ptr(),
        TYPES[x.dtype],
        TYPES[kind],
        x.numel(),
        weight.numel(),
        eps,
        shift,
    )
    return out, total


def _normalize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    shift: float,
    *,
    centred: bool,
) -> torch.Tensor:
    layout = row_layout(x)
    if layout is None:
        dense = _normalize(x.contiguous(), weight, bias, eps, shift, centred=centred)
        return empty_like(x).copy_(dense)
    out = empty_like(x, memory_format=torch.contiguous_format)
    if is_compiling():
        # The op takes no None: the rows stand for absent tensors, and the bits say which are
        # present.
        rows, results = x.reshape(-1, layout[2]), out.view(-1, layout[2])
        parts = _WEIGHTED * (weight is not None) + _BIASED * (bias is not None)
        torch.ops.interposer_cpu.normalise_out(
            results,
            rows,
            rows if weight is None else weight,
            rows if bias is None else bias,
            parts + _CENTRED * centred,
            eps,
            shift,
        )
        return out
    library().normalise(
        x.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        TYPES[x.dtype],
        centred,
        *layout,
        eps,
        shift,
    )
    return out
