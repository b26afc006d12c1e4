"""Quantization of weights to FP8, with scales per row, per fused layer or per block.

Dimensions: I input features, O output features, P fused layers; R rows and C columns of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from interposer_ops.quantizers import row_chunks
from interposer_quantization._fp8.parameters import FORMAT

Quantize = Callable[[torch.Tensor, Sequence[int]], tuple[torch.Tensor, torch.Tensor]]
"""Function from a weight ``[O, I]`` and each fused layer's number of outputs to the quantized
weight and its scales."""

_LARGEST = torch.finfo(FORMAT).max


def quantized_rows(weight: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize weights to FP8 ``[O, I]`` with one scale per output, ``[O, 1]`` float32.

    scale = max|w_o| / 448, or 1 for a row of zeros; q = round(w / scale), ties to even.
    """
    quantized, scales = torch.empty_like(weight, dtype=FORMAT), []
    # In chunks of rows, so that the float32 copy stays small.
    for rows, start in row_chunks(weight):
        rows_f32 = rows.float()
        scale = _fitting(_peaks(rows_f32, 1))
        scales.append(scale)
        quantized[start : start + len(rows)] = _rounded(rows_f32 / scale)
    return quantized, torch.cat(scales)


def quantized_members(
    weight: torch.Tensor, sizes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize weights to FP8 ``[O, I]`` with one scale per fused layer, ``[P]`` float32."""
    quantized, scales = torch.empty_like(weight, dtype=FORMAT), []
    for member, quantized_member in zip(
        weight.split(list(sizes)), quantized.split(list(sizes)), strict=True
    ):
        # Two passes: the scale needs the peak of the whole fused layer.
        peaks = [_peaks(rows.float(), (0, 1)) for rows, _ in row_chunks(member)]
        scale = _fitting(torch.cat(peaks).amax().reshape(1))
        scales.append(scale)
        for rows, start in row_chunks(member):
            quantized_member[start : start + len(rows)] = _rounded(rows.float() / scale)
    return quantized, torch.cat(scales)


def quantized_blocks(block_rows: int, block_columns: int) -> Quantize:
    """Return a function that quantizes a weight to FP8 with one scale per R x C block.

    The scales are ``[ceil(O / R), ceil(I / C)]`` float32; the last blocks may be smaller.
    """

    def quantize(weight: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, scales = torch.empty_like(weight, dtype=FORMAT), []
        for rows, start in row_chunks(weight, block_rows):
            num_rows, num_columns = rows.shape
            padding = (0, -num_columns % block_columns, 0, -num_rows % block_rows)
            padded = functional.pad(rows.float(), padding)
            blocks = padded.unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows))
            scale = _fitting(_peaks(blocks, (1, 3)))
            scales.append(scale.flatten(2).flatten(0, 1))
            rounded = _rounded(blocks / scale).flatten(2).flatten(0, 1)
            quantized[start : start + num_rows] = rounded[:num_rows, :num_columns]
        return quantized, torch.cat(scales)

    return quantize


def _peaks(weight: torch.Tensor, dims: int | tuple[int, ...]) -> torch.Tensor:
    return weight.abs().amax(dims, keepdim=True)


def _fitting(peaks: torch.Tensor) -> torch.Tensor:
    """Return the scales that map each largest magnitude to the largest FP8 value."""
    # Without the clamp, magnitudes close to zero would underflow to a scale of zero.
    smallest = torch.finfo(torch.float32).tiny
    return torch.where(peaks > 0, (peaks / _LARGEST).clamp(min=smallest), 1.0)


def _rounded(quotients: torch.Tensor) -> torch.Tensor:
    return quotients.clamp(-_LARGEST, _LARGEST).to(FORMAT)
