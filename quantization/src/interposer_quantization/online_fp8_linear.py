"""A linear layer whose plain weight becomes 8-bit floats when it is finalized.

Dimensions: I input features, O output features, P layers of the checkpoint that are fused; R rows
and C columns of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from interposer import LinearMethod, Site
from interposer.errors import CheckpointError
from interposer_quantization.fp8_parameters import FORMAT, Members, register

__all__ = ["OnlineFp8Linear", "quantized_blocks", "quantized_members", "quantized_rows"]

Quantize = Callable[[torch.Tensor, Sequence[int]], tuple[torch.Tensor, torch.Tensor]]
"""A weight ``[O, I]`` and the outputs of each fused layer to the codes and their scales."""

_LARGEST = torch.finfo(FORMAT).max
# Numbers that are widened at a time, so that what is computed with is small beside a weight.
_AT_A_TIME = 1 << 22


class OnlineFp8Linear(LinearMethod):
    """``weight`` ``[O, I]`` in the model's dtype, which is quantized and dropped by ``finalize``.

    Attributes:
        method: of the layer that holds the quantized weight.
        scale_name: name of the parameter in which that layer holds the scales.
    """

    def __init__(self, method: LinearMethod, scale_name: str, quantize: Quantize) -> None:
        self.method = method
        self.scale_name = scale_name
        self.quantize = quantize

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``weight`` and, if asked for, ``bias``, as plain checkpoints have them.

        Raises: ConfigError: what ``method`` cannot hold.
        """
        self.method.create_weights(layer, site, in_features, out_features, bias)
        self.members = Members(layer, site, out_features)
        weight = torch.empty(out_features, in_features, dtype=site.dtype)
        register(layer, weight=weight, **{self.scale_name: None})

    def dequantized(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the float64 weight ``[O, I]`` that the codes and scales of ``weight`` mean."""
        return self.method.dequantized(self._quantized(layer))

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: each rounded number times its scale."""
        return self.method.dequantized_input(layer, x)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return kernel and constants of the layer with the quantized weight.

        Raises: CheckpointError: the weight holds what is no finite number.
        """
        layer._parameters.update(self._quantized(layer)._parameters)
        return self.method.finalize(layer)

    def _quantized(self, layer: nn.Module) -> nn.Module:
        """Return the parameters of a layer of ``method``."""
        weight = layer.get_parameter("weight").data
        self._check(weight)
        codes, scales = self.quantize(weight, tuple(self.members.sizes.values()))
        quantized = nn.Module()
        register(quantized, weight=codes, **{self.scale_name: scales})
        return quantized

    def _check(self, weight: torch.Tensor) -> None:
        sizes = self.members.sizes
        for member, part in zip(sizes, weight.split(list(sizes.values())), strict=True):
            for rows in _chunks(part):
                wrong = ~rows.isfinite()
                if wrong.any():
                    raise CheckpointError(
                        self.members.tensor(member, "weight"),
                        f"holds {float(rows[wrong][0])}, which no 8-bit float can stand for",
                        "copy the checkpoint again",
                    )


def quantized_rows(weight: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes ``[O, I]`` with a scale for every output, ``[O, 1]`` float32.

    scale = max|w_o| / max, 1 for a row of zeros; q = round(w / scale), ties to even.
    """
    codes, scales = torch.empty_like(weight, dtype=FORMAT), []
    for rows, held in zip(_chunks(weight), _chunks(codes), strict=True):
        wide = rows.float()
        scale = _fitting(_peaks(wide, 1))
        scales.append(scale)
        held.copy_(_rounded(wide / scale))
    return codes, torch.cat(scales)


def quantized_members(
    weight: torch.Tensor, sizes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes ``[O, I]`` with a scale for each of the fused layers, ``[P]`` float32."""
    codes, scales = torch.empty_like(weight, dtype=FORMAT), []
    for member, held in zip(weight.split(list(sizes)), codes.split(list(sizes)), strict=True):
        peaks = [_peaks(rows.float(), (0, 1)) for rows in _chunks(member)]
        scale = _fitting(torch.cat(peaks).amax().reshape(1))
        scales.append(scale)
        for rows, codes_of_rows in zip(_chunks(member), _chunks(held), strict=True):
            codes_of_rows.copy_(_rounded(rows.float() / scale))
    return codes, torch.cat(scales)


def quantized_blocks(block_rows: int, block_columns: int) -> Quantize:
    """Return the function to codes ``[O, I]`` with a scale for every R rows by C columns.

    Its scales are ``[ceil(O / R), ceil(I / C)]`` float32; the last blocks may be smaller.
    """

    def quantize(weight: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = torch.empty_like(weight, dtype=FORMAT), []
        chunks = _chunks(weight, block_rows), _chunks(codes, block_rows)
        for rows, held in zip(*chunks, strict=True):
            num_rows, num_columns = rows.shape
            missing = (0, -num_columns % block_columns, 0, -num_rows % block_rows)
            padded = functional.pad(rows.float(), missing)
            blocks = padded.unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows))
            scale = _fitting(_peaks(blocks, (1, 3)))
            scales.append(scale.flatten(2).flatten(0, 1))
            held.copy_(_rounded(blocks / scale).flatten(2).flatten(0, 1)[:num_rows, :num_columns])
        return codes, torch.cat(scales)

    return quantize


def _chunks(weight: torch.Tensor, multiple: int = 1) -> Iterator[torch.Tensor]:
    """Yield views of some rows at a time, a multiple of ``multiple`` except for the last ones."""
    rows = max(1, _AT_A_TIME // max(1, weight.shape[1] * multiple)) * multiple
    yield from weight.split(rows)


def _peaks(wide: torch.Tensor, dims: int | tuple[int, ...]) -> torch.Tensor:
    return wide.abs().amax(dims, keepdim=True)


def _fitting(peaks: torch.Tensor) -> torch.Tensor:
    """Return the scales with which the largest magnitudes become the largest code."""
    # Magnitudes that are almost zero would have a scale of zero, which nothing can be divided by.
    smallest = torch.finfo(torch.float32).tiny
    return torch.where(peaks > 0, (peaks / _LARGEST).clamp(min=smallest), 1.0)


def _rounded(quotients: torch.Tensor) -> torch.Tensor:
    return quotients.clamp(-_LARGEST, _LARGEST).to(FORMAT)
