"""The weights of linear layers and heads in one block format, with the matmul kernel.

Shapes: I input features, O output features, G groups of inputs.
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

# Elements that are unpacked at a time. An embedding has hundreds of millions, and unpacking all at
# once would need several times the memory of the weight.
_STEP_NUMEL = 1 << 22

Operands = tuple[Any, ...]


def parameter(tensor: torch.Tensor, **attributes: object) -> nn.Parameter:
    """Wrap a stored tensor as a parameter, with attributes such as ``parts``."""
    wrapped = nn.Parameter(tensor, requires_grad=False)
    wrapped.__dict__.update(attributes)
    return wrapped


def not_finite_error(layer: str, matmul: Matmul) -> CheckpointError:
    """Return the error for a layer with a scale or an offset that is not finite."""
    return not_finite_tensor_error(f"{layer}.{matmul.name}")


def not_finite_tensor_error(tensor: str) -> CheckpointError:
    """Return the error for the tensor ``tensor`` with a scale or offset that is not finite."""
    return CheckpointError(
        tensor,
        "holds a scale or an offset that is infinite or not a number",
        "copy the file again, or convert the model again",
    )


class Matmul(ABC):
    """Weight of one or more fused layers in one block format, and the matmul kernel.

    Attributes:
        name: name of the parameter.
        parts: names of the fused layers, in the order of rows.
        kernel: the bound matmul kernel; None for an embedding without a head.
    """

    def __init__(self, name: str, parts: tuple[str, ...], kernel: Any) -> None:
        self.name = name
        self.parts = parts
        self.kernel = kernel

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        """The kernel's function, called with inputs and operands."""
        function: Callable[..., torch.Tensor] = self.kernel.function
        return function

    @abstractmethod
    def empty(self, rows: int, in_features: int, site: Site) -> torch.Tensor:
        """Create an empty tensor for the parameter."""

    @abstractmethod
    def dequantized(self, stored: torch.Tensor) -> torch.Tensor:
        """Dequantize the parameter to float64 ``[O, I]``."""

    @abstractmethod
    def constants(self, stored: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
        """Return the op's constant arguments by name, in the order of the op's parameters."""

    def operands(self, stored: torch.Tensor, bias: torch.Tensor | None) -> Operands:
        """Return the prepared arguments that follow ``x`` in a call of ``function``."""
        constants = self.constants(stored, bias)
        prepared = self.kernel.prepared(**constants)
        return tuple(prepared[name] for name in constants)

    def sample(
        self, rows: int, in_features: int
    ) -> Callable[[torch.Generator], torch.Tensor] | None:
        """Return a function that draws random parameters, None if any values are valid."""
        return None

    def is_finite(self, rows: torch.Tensor) -> bool:
        """Return whether all dequantized values are finite."""
        return bool(rows.isfinite().all())


class PlainMatmul(Matmul):
    def empty(self, rows: int, in_features: int, site: Site) -> torch.Tensor:
        return torch.empty(rows, in_features, dtype=site.dtype)

    def dequantized(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.double()

    def constants(self, stored: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
        return {"weight": stored, "bias": bias}


class BlocksMatmul(Matmul):
    """A weight in blocks as stored in the file, ``[O, row]`` uint8."""

    def __init__(self, layout: BlockFormat, parts: tuple[str, ...], kernel: Any) -> None:
        super().__init__(layout.name, parts, kernel)
        self.layout = layout

    def empty(self, rows: int, in_features: int, site: Site) -> torch.Tensor:
        """Create an empty tensor for the parameter."""
        return torch.empty(rows, self.layout.row_bytes(in_features), dtype=torch.uint8)

    def dequantized(self, stored: torch.Tensor) -> torch.Tensor:
        """Dequantize the parameter to float64 ``[O, I]``."""
        return self.layout.dequantized(stored, torch.float64)

    def constants(self, stored: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
        """Return the constants of ``gguf_linear`` by name."""
        return {"weight": stored, "bias": bias, "stored_as": self.layout.name}

    def sample(
        self, rows: int, in_features: int
    ) -> Callable[[torch.Generator], torch.Tensor] | None:
        """Return a function that draws random rows with finite scales."""
        return partial(random_rows, self.layout, rows, in_features)

    def is_finite(self, rows: torch.Tensor) -> bool:
        """Return whether all scales and offsets are finite."""
        scale, offset = self.layout.scales(rows, torch.float32)
        return bool(scale.isfinite().all()) and (offset is None or bool(offset.isfinite().all()))


class GroupedMatmul(BlocksMatmul):
    """A weight with one scale per block and no offset, converted exactly for weight-only ops."""

    def constants(self, stored: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
        """Return quantized values ``[O, I]``, nibbles packed, with scales ``[O, G]`` float32."""
        layout, width = self.layout, self.layout.row_numbers(stored.shape[1])
        is_four_bit = layout.name == "q4_0"
        weight = torch.empty(
            (len(stored), width // 2 if is_four_bit else width),
            dtype=torch.uint8 if is_four_bit else torch.int8,
            device=stored.device,
        )
        groups = (len(stored), width // layout.group_size)
        scale = torch.empty(groups, dtype=torch.float32, device=stored.device)
        num_rows = max(1, _STEP_NUMEL // width)
        for start in range(0, len(stored), num_rows):
            rows = slice(start, start + num_rows)
            quantized = layout.quantized(stored[rows])
            if is_four_bit:
                # The op takes unsigned nibbles, of which 8 stands for 0.
                quantized = pack_nibbles((quantized - layout.lowest).view(torch.uint8))
            weight[rows] = quantized
            scale[rows] = layout.scales(stored[rows], torch.float32)[0]
        return {"weight": weight, "scale": scale, "bias": bias, "zero_points": None}


def bind_matmul(
    layout: BlockFormat | None,
    parts: tuple[str, ...],
    site: Site,
    in_features: int,
    rows: int,
    bias: bool,
) -> Matmul:
    """Bind the matmul kernel for a block format; ``layout`` None means unquantized weights.

    Raises: ConfigError: the block size does not divide the input features.
    """
    sizes: dict[str, Any] = {"in_features": in_features, "out_features": rows, "biased": bias}
    if layout is None:
        return PlainMatmul("weight", parts, site.bind_kernel(linear, **sizes))
    check_blocks(layout, site, in_features)
    if not is_grouped(layout):
        kernel = site.bind_kernel(gguf_linear, **sizes, stored_as=layout.name)
        return BlocksMatmul(layout, parts, kernel)
    sizes |= group_dims(layout, in_features)
    if layout.name == "q4_0":
        w4a16_kernel = site.bind_kernel(w4a16_linear, **sizes, scale_dtype="float32")
        return GroupedMatmul(layout, parts, w4a16_kernel)
    return GroupedMatmul(layout, parts, site.bind_kernel(w8a16_linear, **sizes))


def is_grouped(layout: BlockFormat) -> bool:
    """Return whether w4a16 and w8a16 ops represent the block format exactly."""
    return layout.name in ("q4_0", "q8_0")


def group_dims(layout: BlockFormat, width: int) -> dict[str, int | bool]:
    """Return the dims of w4a16 and w8a16 ops for rows of ``width`` values."""
    size = layout.group_size
    return {"group_size": size, "num_groups": width // size, "asymmetric": False}


def check_blocks(layout: BlockFormat, site: Site, width: int) -> None:
    """Raise ConfigError unless the block size divides rows of ``width`` values."""
    if width % layout.size:
        raise ConfigError(
            f"{site.prefix}: blocks of {layout.size} do not divide its {width} inputs. "
            "Try: convert the model again"
        )
