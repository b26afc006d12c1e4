"""Weights that are rounded to 8-bit floats, with scales of rows, layers or blocks.

Dimensions: I input features, O output features, P layers of the checkpoint that are fused; R rows
and C columns of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from interposer_ops.quantizers import row_chunks
from interposer_quantization._fp8.parameters import FORMAT

Quantize = Callable[[torch.Tensor, Sequence[int]], tuple[torch.Tensor, torch.Tensor]]
"""A weight ``[O, I]`` and the outputs of each fused layer to the codes and their scales."""

_LARGEST = torch.finfo(FORMAT).max


def quantized_rows(weight: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes ``[O, I]`` with a scale for every output, ``[O, 1]`` float32.

    scale = max|w_o| / max, 1 for a row of zeros; q = round(w / scale), ties to even.
    """
    codes, scales = torch.empty_like(weight, dtype=FORMAT), []
    for rows, start in row_chunks(weight):
        wide = rows.float()
        scale = _fitting(_peaks(wide, 1))
        scales.append(scale)
        codes[start : start + len(rows)] = _rounded(wide / scale)
    return codes, torch.cat(scales)


def quantized_members(
    weight: torch.Tensor, sizes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes ``[O, I]`` with a scale for each of the fused layers, ``[P]`` float32."""
    codes, scales = torch.empty_like(weight, dtype=FORMAT), []
    for member, held in zip(weight.split(list(sizes)), codes.split(list(sizes)), strict=True):
        peaks = [_peaks(rows.float(), (0, 1)) for rows, _ in row_chunks(member)]
        scale = _fitting(torch.cat(peaks).amax().reshape(1))
        scales.append(scale)
        for rows, start in row_chunks(member):
            held[start : start + len(rows)] = _rounded(rows.float() / scale)
    return codes, torch.cat(scales)


def quantized_blocks(block_rows: int, block_columns: int) -> Quantize:
    """Return the function to codes ``[O, I]`` with a scale for every R rows by C columns.

    Its scales are ``[ceil(O / R), ceil(I / C)]`` float32; the last blocks may be smaller.
    """

    def quantize(weight: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = torch.empty_like(weight, dtype=FORMAT), []
        for rows, start in row_chunks(weight, block_rows):
            num_rows, num_columns = rows.shape
            missing = (0, -num_columns % block_columns, 0, -num_rows % block_rows)
            padded = functional.pad(rows.float(), missing)
            blocks = padded.unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows))
            scale = _fitting(_peaks(blocks, (1, 3)))
            scales.append(scale.flatten(2).flatten(0, 1))
            rounded = _rounded(blocks / scale).flatten(2).flatten(0, 1)
            codes[start : start + num_rows] = rounded[:num_rows, :num_columns]
        return codes, torch.cat(scales)

    return quantize


def _peaks(wide: torch.Tensor, dims: int | tuple[int, ...]) -> torch.Tensor:
    return wide.abs().amax(dims, keepdim=True)


def _fitting(peaks: torch.Tensor) -> torch.Tensor:
    """Return the scales with which the largest magnitudes become the largest code."""
    # Magnitudes that are almost zero would have a scale of zero, which nothing can be divided by.
    smallest = torch.finfo(torch.float32).tiny
    return torch.where(peaks > 0, (peaks / _LARGEST).clamp(min=smallest), 1.0)


def _rounded(quotients: torch.Tensor) -> torch.Tensor:
    return quotients.clamp(-_LARGEST, _LARGEST).to(FORMAT)
