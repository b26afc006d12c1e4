"""Linear layers whose weights are blocks of GGUF files.

Dimensions: I input features, O output features, G groups of inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from interposer import LinearMethod, Site
from interposer.errors import CheckpointError, ConfigError
from interposer_gguf.block_formats import BlockFormat
from interposer_gguf.cases import random_rows
from interposer_gguf.linear import gguf_linear
from interposer_ops.linear import linear
from interposer_ops.small_floats import pack_nibbles
from interposer_ops.weight_only_linear import w4a16_linear, w8a16_linear

__all__ = ["BlocksLinear"]

Operands = tuple[Any, ...]


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
        self.products: list[_Product] = []
        for stored_as in dict.fromkeys(self.formats[part] for part in self.sizes):
            parts = tuple(part for part in self.sizes if self.formats[part] is stored_as)
            if stored_as is not None and in_features % stored_as.size:
                raise ConfigError(
                    f"{site.prefix}: blocks of {stored_as.size} do not divide its {in_features} "
                    "inputs. Try: convert the model again"
                )
            rows = sum(self.sizes[part] for part in parts)
            product = _product(stored_as, parts, site, in_features, rows)
            self.products.append(product)
            parameter = _parameter(product.empty(rows, in_features, site))
            parameter.__dict__.update(parts=parts, sample=product.sample(rows, in_features))
            layer.register_parameter(product.name, parameter)
        offset = _parameter(torch.empty(out_features, dtype=site.dtype)) if bias else None
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

    def _by_part(self, product: _Product, rows: torch.Tensor, dim: int) -> dict[str, torch.Tensor]:
        sizes = [self.sizes[part] for part in product.parts]
        return dict(zip(product.parts, rows.split(sizes, dim), strict=True))

    def _slices(self, bias: torch.Tensor) -> zip[tuple[str, torch.Tensor]]:
        return zip(self.sizes, bias.split(list(self.sizes.values())), strict=True)

    def _order(self) -> tuple[tuple[int, int, int], ...]:
        """Return for each fused layer which product it stands in, and where it begins and ends."""
        places = {}
        for index, product in enumerate(self.products):
            ends = list(accumulate(self.sizes[part] for part in product.parts))
            for part, end in zip(product.parts, ends, strict=True):
                places[part] = (index, end - self.sizes[part], end)
        return tuple(places[part] for part in self.sizes)

    def _check(self, product: _Product, stored: torch.Tensor) -> None:
        for part, rows in self._by_part(product, stored, 0).items():
            if not product.is_finite(rows):
                parent = self.prefix.rpartition(".")[0]
                raise CheckpointError(
                    f"{parent}.{part}.{product.name}" if parent else f"{part}.{product.name}",
                    "holds a scale or an offset that is infinite or not a number",
                    "copy the file again, or convert the model again",
                )


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


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class _Product(ABC):
    """The product with the rows of one format.

    Attributes:
        name: of the parameter.
        parts: the fused layers whose rows they are, in order.
        function: the bound kernel.
    """

    def __init__(self, name: str, parts: tuple[str, ...], bound: Any) -> None:
        self.name = name
        self.parts = parts
        self.bound = bound
        self.function: Callable[..., torch.Tensor] = bound.function

    @abstractmethod
    def empty(self, rows: int, in_features: int, site: Site) -> torch.Tensor:
        """Return an empty parameter."""

    @abstractmethod
    def numbers(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the float64 rows ``[O, I]``."""

    @abstractmethod
    def constants(self, stored: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
        """Return the op's constant tensors by name, in the order of its parameters."""

    def operands(self, stored: torch.Tensor, bias: torch.Tensor | None) -> Operands:
        """Return what follows ``x`` in a call."""
        constants = self.constants(stored, bias)
        prepared = self.bound.prepared(**constants)
        return tuple(prepared[name] for name in constants)

    def sample(
        self, rows: int, in_features: int
    ) -> Callable[[torch.Generator], torch.Tensor] | None:
        """Return what draws such a parameter, or None where any numbers may stand."""
        return None

    def is_finite(self, rows: torch.Tensor) -> bool:
        """Say whether rows stand for numbers."""
        return bool(rows.isfinite().all())


class _PlainProduct(_Product):
    def empty(self, rows: int, in_features: int, site: Site) -> torch.Tensor:
        return torch.empty(rows, in_features, dtype=site.dtype)

    def numbers(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.double()

    def constants(self, stored: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
        return {"weight": stored, "bias": bias}


class _BlocksProduct(_Product):
    def __init__(self, layout: BlockFormat, parts: tuple[str, ...], bound: Any) -> None:
        super().__init__(layout.name, parts, bound)
        self.layout = layout

    def empty(self, rows: int, in_features: int, site: Site) -> torch.Tensor:
        return torch.empty(rows, self.layout.row_bytes(in_features), dtype=torch.uint8)

    def numbers(self, stored: torch.Tensor) -> torch.Tensor:
        return self.layout.dequantized(stored, torch.float64)

    def constants(self, stored: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
        return {"weight": stored, "bias": bias, "stored_as": self.layout.name}

    def sample(
        self, rows: int, in_features: int
    ) -> Callable[[torch.Generator], torch.Tensor] | None:
        return partial(random_rows, self.layout, rows, in_features)

    def is_finite(self, rows: torch.Tensor) -> bool:
        scale, offset = self.layout.scales(rows, torch.float32)
        return bool(scale.isfinite().all()) and (offset is None or bool(offset.isfinite().all()))


class _GroupedProduct(_BlocksProduct):
    """Blocks that an op for groups of integers represents exactly: no offsets, one scale each."""

    def constants(self, stored: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
        """Return the codes ``[O, I]``, or two a byte, with scales ``[O, G]`` float32."""
        codes = self.layout.codes(stored)
        if self.layout.name == "q4_0":
            weight = pack_nibbles((codes - self.layout.lowest).view(torch.uint8))
        else:
            weight = codes.contiguous()
        scale = self.layout.scales(stored, torch.float32)[0].contiguous()
        return {"weight": weight, "scale": scale, "bias": bias, "zero_points": None}


def _product(
    layout: BlockFormat | None, parts: tuple[str, ...], site: Site, in_features: int, rows: int
) -> _Product:
    dims: dict[str, Any] = {"in_features": in_features, "out_features": rows}
    if layout is None:
        return _PlainProduct("weight", parts, site.bind_kernel(linear, **dims))
    if layout.name not in ("q4_0", "q8_0"):
        bound = site.bind_kernel(gguf_linear, **dims, stored_as=layout.name)
        return _BlocksProduct(layout, parts, bound)
    size = layout.group_size
    dims.update(group_size=size, num_groups=in_features // size, asymmetric=False)
    if layout.name == "q4_0":
        four = site.bind_kernel(w4a16_linear, **dims, scale_dtype="float32")
        return _GroupedProduct(layout, parts, four)
    return _GroupedProduct(layout, parts, site.bind_kernel(w8a16_linear, **dims))
