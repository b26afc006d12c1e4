"""Linear layers with weights in GGUF blocks.

Shapes: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from interposer import LinearMethod, Site
from interposer_gguf._block_formats import BlockFormat
from interposer_gguf._matmuls import Matmul, Operands, bind_matmul, not_finite_error, parameter


class BlocksLinear(LinearMethod):
    """Weights in blocks ``[O, row]`` uint8 named after the block format, or a float ``weight``.

    Files of mixed quantization may store fused layers in different formats. Then each format has
    one parameter and one matmul, and the outputs are concatenated.

    Args:
        formats: block format of each fused layer by name; None for an unquantized layer.
    """

    def __init__(self, formats: Mapping[str, BlockFormat | None]) -> None:
        self.formats = formats

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register a parameter for each format, and ``bias`` if requested.

        Raises: ConfigError: the block size does not divide the input features.
        """
        self.prefix = site.prefix
        self.sizes: Mapping[str, int] = getattr(layer, "parts", None) or {
            next(iter(self.formats)): out_features
        }
        self.matmuls: list[Matmul] = []
        # One matmul per format, in the order of first use.
        for stored_as in dict.fromkeys(self.formats[part] for part in self.sizes):
            parts = tuple(part for part in self.sizes if self.formats[part] is stored_as)
            rows = sum(self.sizes[part] for part in parts)
            matmul = bind_matmul(stored_as, parts, site, in_features, rows, bias)
            self.matmuls.append(matmul)
            stored = matmul.empty(rows, in_features, site)
            sample = matmul.sample(rows, in_features)
            layer.register_parameter(matmul.name, parameter(stored, parts=parts, sample=sample))
        bias_parameter = parameter(torch.empty(out_features, dtype=site.dtype)) if bias else None
        layer.register_parameter("bias", bias_parameter)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: quantized value * scale + offset."""
        values_by_part: dict[str, torch.Tensor] = {}
        for matmul in self.matmuls:
            values = matmul.dequantized(layer.get_parameter(matmul.name))
            values_by_part.update(self._by_part(matmul, values, 0))
        return torch.cat([values_by_part[part] for part in self.sizes])

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], Operands]:
        """Return the bound kernel with operands, or a function that joins several kernels.

        Raises: CheckpointError: a scale or an offset is infinite or not a number.
        """
        bias = layer._parameters["bias"]
        by_part = None if bias is None else dict(self._slices(bias))
        calls: list[tuple[Callable[..., torch.Tensor], int]] = []
        operands: list[Any] = []
        for matmul in self.matmuls:
            stored = layer.get_parameter(matmul.name)
            self._check(matmul, stored)
            matmul_bias: torch.Tensor | None = bias
            # With several matmuls, the layers of one matmul need not be adjacent in the bias.
            if by_part is not None and len(self.matmuls) > 1:
                matmul_bias = torch.cat([by_part[part] for part in matmul.parts])
            # Release the stored weight before the kernel prepares its own, to save peak memory.
            layer.register_parameter(matmul.name, None)
            matmul_operands = matmul.operands(stored, matmul_bias)
            calls.append((matmul.function, len(matmul_operands)))
            operands += matmul_operands
        if len(self.matmuls) == 1:
            return calls[0][0], tuple(operands)
        if bias is not None:
            layer.register_parameter("bias", None)
        return partial(_concatenated, tuple(calls), self._order()), tuple(operands)

    def _by_part(self, matmul: Matmul, rows: torch.Tensor, dim: int) -> dict[str, torch.Tensor]:
        sizes = [self.sizes[part] for part in matmul.parts]
        return dict(zip(matmul.parts, rows.split(sizes, dim), strict=True))

    def _slices(self, bias: torch.Tensor) -> zip[tuple[str, torch.Tensor]]:
        return zip(self.sizes, bias.split(list(self.sizes.values())), strict=True)

    def _order(self) -> tuple[tuple[int, int, int], ...]:
        """Return each fused layer's matmul index and output range within the matmul."""
        ranges_by_part = {}
        for index, matmul in enumerate(self.matmuls):
            ends = list(accumulate(self.sizes[part] for part in matmul.parts))
            for part, end in zip(matmul.parts, ends, strict=True):
                ranges_by_part[part] = (index, end - self.sizes[part], end)
        return tuple(ranges_by_part[part] for part in self.sizes)

    def _check(self, matmul: Matmul, stored: torch.Tensor) -> None:
        for part, rows in self._by_part(matmul, stored, 0).items():
            if not matmul.is_finite(rows):
                parent = self.prefix.rpartition(".")[0]
                raise not_finite_error(f"{parent}.{part}" if parent else part, matmul)


def _concatenated(
    calls: tuple[tuple[Callable[..., torch.Tensor], int], ...],
    order: tuple[tuple[int, int, int], ...],
    x: torch.Tensor,
    *operands: Any,
) -> torch.Tensor:
    """Return the outputs of several matmuls in the order of the fused layers."""
    results, start = [], 0
    for function, count in calls:
        results.append(function(x, *operands[start : start + count]))
        start += count
    return torch.cat([results[index][..., begin:end] for index, begin, end in order], -1)
