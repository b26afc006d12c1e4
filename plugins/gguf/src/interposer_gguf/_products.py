"""Products with the rows of one format, which linear layers and heads consist of.

Dimensions: I input features, O output features, G groups of inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from interposer import Site
from interposer.errors import CheckpointError, ConfigError
from interposer_gguf._block_formats import BlockFormat
from interposer_gguf._cases import random_rows
from interposer_gguf._linear import gguf_linear
from interposer_ops.linear import linear
from interposer_ops.quantized_linear import w4a16_linear, w8a16_linear
from interposer_ops.quantizers import pack_nibbles

# Numbers whose codes are unpacked at a time: an embedding has hundreds of millions.
_STEP = 1 << 22

Operands = tuple[Any, ...]


def parameter(tensor: torch.Tensor, **attributes: object) -> nn.Parameter:
    """Return a parameter that a file stores, with attributes such as ``parts``."""
    stored = nn.Parameter(tensor, requires_grad=False)
    stored.__dict__.update(attributes)
    return stored


def not_numbers(layer: str, product: Product) -> CheckpointError:
    """Return the error for rows of a layer that stand for no numbers."""
    return not_numbers_of(f"{layer}.{product.name}")


def not_numbers_of(tensor: str) -> CheckpointError:
    """Return the same for a tensor."""
    return CheckpointError(
        tensor,
        "holds a scale or an offset that is infinite or not a number",
        "copy the file again, or convert the model again",
    )


class Product(ABC):
    """The product with the rows of one format.

    Attributes:
        name: of the parameter.
        parts: the fused layers whose rows they are, in order.
        bound: the kernel; None where rows are looked up only.
    """

    def __init__(self, name: str, parts: tuple[str, ...], bound: Any) -> None:
        self.name = name
        self.parts = parts
        self.bound = bound

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        """Return what is called with inputs and operands."""
        function: Callable[..., torch.Tensor] = self.bound.function
        return function

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
        """Return the sampler of such a parameter, None where any numbers will do."""
        return None

    def is_finite(self, rows: torch.Tensor) -> bool:
        """Say whether rows stand for numbers."""
        return bool(rows.isfinite().all())


class PlainProduct(Product):
    def empty(self, rows: int, in_features: int, site: Site) -> torch.Tensor:
        return torch.empty(rows, in_features, dtype=site.dtype)

    def numbers(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.double()

    def constants(self, stored: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
        return {"weight": stored, "bias": bias}


class BlocksProduct(Product):
    """Blocks as they stand in the file, ``[O, row]`` uint8."""

    def __init__(self, layout: BlockFormat, parts: tuple[str, ...], bound: Any) -> None:
        super().__init__(layout.name, parts, bound)
        self.layout = layout

    def empty(self, rows: int, in_features: int, site: Site) -> torch.Tensor:
        """Return an empty parameter."""
        return torch.empty(rows, self.layout.row_bytes(in_features), dtype=torch.uint8)

    def numbers(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the float64 rows ``[O, I]``."""
        return self.layout.dequantized(stored, torch.float64)

    def constants(self, stored: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
        """Return the constants of ``gguf_linear`` by name."""
        return {"weight": stored, "bias": bias, "stored_as": self.layout.name}

    def sample(
        self, rows: int, in_features: int
    ) -> Callable[[torch.Generator], torch.Tensor] | None:
        """Return a sampler of rows whose scales are numbers."""
        return partial(random_rows, self.layout, rows, in_features)

    def is_finite(self, rows: torch.Tensor) -> bool:
        """Say whether every scale and offset is a number."""
        scale, offset = self.layout.scales(rows, torch.float32)
        return bool(scale.isfinite().all()) and (offset is None or bool(offset.isfinite().all()))


class GroupedProduct(BlocksProduct):
    """Blocks that an op for groups of integers represents exactly: no offsets, one scale each."""

    def constants(self, stored: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
        """Return the codes ``[O, I]``, or two a byte, with scales ``[O, G]`` float32."""
        layout, width = self.layout, self.layout.row_numbers(stored.shape[1])
        narrow = layout.name == "q4_0"
        weight = torch.empty(
            (len(stored), width // 2 if narrow else width),
            dtype=torch.uint8 if narrow else torch.int8,
            device=stored.device,
        )
        groups = (len(stored), width // layout.group_size)
        scale = torch.empty(groups, dtype=torch.float32, device=stored.device)
        step = max(1, _STEP // width)
        for start in range(0, len(stored), step):
            place = slice(start, start + step)
            codes = layout.codes(stored[place])
            if narrow:
                codes = pack_nibbles((codes - layout.lowest).view(torch.uint8))
            weight[place] = codes
            scale[place] = layout.scales(stored[place], torch.float32)[0]
        return {"weight": weight, "scale": scale, "bias": bias, "zero_points": None}


def product_of(
    layout: BlockFormat | None,
    parts: tuple[str, ...],
    site: Site,
    in_features: int,
    rows: int,
    bias: bool,
) -> Product:
    """Return the product with the rows of a format, None for plain ones.

    Raises: ConfigError: blocks do not divide the inputs.
    """
    sizes: dict[str, Any] = {"in_features": in_features, "out_features": rows, "biased": bias}
    if layout is None:
        return PlainProduct("weight", parts, site.bind_kernel(linear, **sizes))
    check_blocks(layout, site, in_features)
    if not is_grouped(layout):
        bound = site.bind_kernel(gguf_linear, **sizes, stored_as=layout.name)
        return BlocksProduct(layout, parts, bound)
    sizes |= group_dims(layout, in_features)
    if layout.name == "q4_0":
        four = site.bind_kernel(w4a16_linear, **sizes, scale_dtype="float32")
        return GroupedProduct(layout, parts, four)
    return GroupedProduct(layout, parts, site.bind_kernel(w8a16_linear, **sizes))


def is_grouped(layout: BlockFormat) -> bool:
    """Say whether ops for groups of integers represent the blocks exactly."""
    return layout.name in ("q4_0", "q8_0")


def group_dims(layout: BlockFormat, width: int) -> dict[str, int | bool]:
    """Return what these ops state of rows of so many numbers."""
    size = layout.group_size
    return {"group_size": size, "num_groups": width // size, "asymmetric": False}


def check_blocks(layout: BlockFormat, site: Site, width: int) -> None:
    """Raise ConfigError unless blocks divide rows of so many numbers."""
    if width % layout.size:
        raise ConfigError(
            f"{site.prefix}: blocks of {layout.size} do not divide its {width} inputs. "
            "Try: convert the model again"
        )
