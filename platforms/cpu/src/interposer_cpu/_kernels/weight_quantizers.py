"""Weight quantizers of the compiled library.

Dimensions: O output features, I input features, G inputs per scale.
"""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from interposer_cpu._kernels.interface import TYPES
from interposer_cpu.native import library
from interposer_ops.devices import host_memory


def quantize_weight_int8(
    weight: torch.Tensor, group_size: int, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the op ``quantize_weight_int8``: one scale per group of inputs."""
    quantized = _empty(tuple(weight.shape), torch.int8)
    return quantized, _quantize(weight, quantized, None, group_size, scale_dtype, 8)


def quantize_weight_int4(
    weight: torch.Tensor, group_size: int, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the op ``quantize_weight_int4``: one scale per group of inputs."""
    quantized = _empty((weight.shape[0], weight.shape[1] // 2), torch.uint8)
    return quantized, _quantize(weight, quantized, None, group_size, scale_dtype, 4)


def quantize_weight_int4_asymmetric(
    weight: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the op ``quantize_weight_int4_asymmetric``: scale and zero point per group."""
    quantized = _empty((weight.shape[0], weight.shape[1] // 2), torch.uint8)
    zeros = torch.empty(weight.shape[0], weight.shape[1] // group_size, dtype=torch.uint8)
    return quantized, _quantize(weight, quantized, zeros, group_size, torch.float32, 4), zeros


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # Quantized values are large and freed as soon as they are packed. In the heap, that would leave
    # holes; host_memory maps them separately.
    return torch.empty(shape, dtype=dtype) if is_compiling() else host_memory.empty(shape, dtype)


def _quantize(
    weight: torch.Tensor,
    quantized: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    scale_dtype: torch.dtype,
    bits: int,
) -> torch.Tensor:
    """Quantize ``weight`` into ``quantized`` and ``zeros``; return the scales ``[O, I / G]``."""
    rows = weight if weight.stride(1) == 1 else weight.contiguous()
    outputs, inputs = rows.shape
    scales = torch.empty(outputs, inputs // group_size, dtype=torch.float32)
    scale_type = TYPES[scale_dtype]
    if is_compiling():
        torch.ops.interposer_cpu.round_out(
            quantized,
            scales,
            quantized if zeros is None else zeros,
            rows,
            group_size,
            scale_type,
            bits,
            zeros is not None,
        )
        return scales
    library().round_weight(
        rows.data_ptr(),
        quantized.data_ptr(),
        scales.data_ptr(),
        0 if zeros is None else zeros.data_ptr(),
        TYPES[rows.dtype],
        scale_type,
        bits,
        outputs,
        inputs,
        rows.stride(0),
        group_size,
    )
    return scales
