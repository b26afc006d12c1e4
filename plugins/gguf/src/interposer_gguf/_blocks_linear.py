"""Linear layers whose weights are blocks of GGUF files.

Dimensions: I input features, O output features.
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
from interposer_gguf._products import Operands, Product, not_numbers, parameter, product_of


class BlocksLinear(LinearMethod):
    """Rows of blocks ``[O, row]`` uint8 under the name of their format, or a plain ``weight``.

    Where layers that are fused are stored in different ways, as files of mixed formats have it,
    there is a parameter of each format for those layers that have it, and the products are joined.

    Args:
        formats: by the names of the fused layers; None for a plain one.
    """

    def __init__(self, formats: Mapping[str, BlockFormat | None]) -> None:
        self.formats = formats

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register a parameter for each format and, if asked for, ``bias``.

        Raises: ConfigError: blocks do not divide the inputs.
        """
        self.prefix = site.prefix
        self.sizes: Mapping[str, int] = getattr(layer, "parts", None) or {
            next(iter(self.formats)): out_features
        }
        self.products: list[Product] = []
        for stored_as in dict.fromkeys(self.formats[part] for part in self.sizes):
            parts = tuple(part for part in self.sizes if self.formats[part] is stored_as)
            rows = sum(self.sizes[part] for part in parts)
            product = product_of(stored_as, parts, site, in_features, rows, bias)
            self.products.append(product)
            stored = product.empty(rows, in_features, site)
            sample = product.sample(rows, in_features)
            layer.register_parameter(product.name, parameter(stored, parts=parts, sample=sample))
        offset = parameter(torch.empty(out_features, dtype=site.dtype)) if bias else None
        layer.register_parameter("bias", offset)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each code times its scale, plus its offset."""
        rows: dict[str, torch.Tensor] = {}
        for product in self.products:
            numbers = product.numbers(layer.get_parameter(product.name))
            rows.update(self._by_part(product, numbers, 0))
        return torch.cat([rows[part] for part in self.sizes])

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], Operands]:
        """Return the bound kernel with its constants, or the join of several.

        Raises: CheckpointError: a scale or an offset is infinite or not a number.
        """
        bias = layer._parameters["bias"]
        by_part = None if bias is None else dict(self._slices(bias))
        calls: list[tuple[Callable[..., torch.Tensor], int]] = []
        operands: list[Any] = []
        for product in self.products:
            stored = layer.get_parameter(product.name)
            self._check(product, stored)
            own: torch.Tensor | None = bias
            if by_part is not None and len(self.products) > 1:
                own = torch.cat([by_part[part] for part in product.parts])
            # What was stored goes before a kernel prepares its own: it is not needed twice.
            layer.register_parameter(product.name, None)
            taken = product.operands(stored, own)
            calls.append((product.function, len(taken)))
            operands += taken
        if len(self.products) == 1:
            return calls[0][0], tuple(operands)
        if bias is not None:
            layer.register_parameter("bias", None)
        return partial(_joined, tuple(calls), self._order()), tuple(operands)

    def _by_part(self, product: Product, rows: torch.Tensor, dim: int) -> dict[str, torch.Tensor]:
        sizes = [self.sizes[part] for part in product.parts]
        return dict(zip(product.parts, rows.split(sizes, dim), strict=True))

    def _slices(self, bias: torch.Tensor) -> zip[tuple[str, torch.Tensor]]:
        return zip(self.sizes, bias.split(list(self.sizes.values())), strict=True)

    def _order(self) -> tuple[tuple[int, int, int], ...]:
        """Return the product of each fused layer, and its first and last output there."""
        places = {}
        for index, product in enumerate(self.products):
            ends = list(accumulate(self.sizes[part] for part in product.parts))
            for part, end in zip(product.parts, ends, strict=True):
                places[part] = (index, end - self.sizes[part], end)
        return tuple(places[part] for part in self.sizes)

    def _check(self, product: Product, stored: torch.Tensor) -> None:
        for part, rows in self._by_part(product, stored, 0).items():
            if not product.is_finite(rows):
                parent = self.prefix.rpartition(".")[0]
                raise not_numbers(f"{parent}.{part}" if parent else part, product)


def _joined(
    calls: tuple[tuple[Callable[..., torch.Tensor], int], ...],
    order: tuple[tuple[int, int, int], ...],
    x: torch.Tensor,
    *operands: Any,
) -> torch.Tensor:
    """Return the outputs of several products in the order of the fused layers."""
    results, start = [], 0
    for function, count in calls:
        results.append(function(x, *operands[start : start + count]))
        start += count
    return torch.cat([results[index][..., begin:end] for index, begin, end in order], -1)
