"""Parameters of FP8 linear layers, and checks of their scales.

Dimensions: I input features, O output features, P fused layers.
"""

from __future__ import annotations

import torch
from torch import nn

from interposer import Site
from interposer.errors import CheckpointError, ConfigError
from interposer_ops.layers.linear import Linear

FORMAT = torch.float8_e4m3fn
FORMAT_NAME = "float8_e4m3fn"


class Members:
    """The checkpoint layers that one model layer fuses; one layer if nothing is fused.

    Attributes:
        sizes: number of outputs by the checkpoint's layer name, in output order.
    """

    def __init__(self, layer: nn.Module, site: Site, out_features: int) -> None:
        parent, _, name = site.prefix.rpartition(".")
        self.sizes = dict(layer.parts) if isinstance(layer, Linear) else {name: out_features}
        self._parent = f"{parent}." if parent else ""

    def tensor(self, member: str, name: str) -> str:
        """Return the checkpoint's name of the tensor ``name`` of the fused layer ``member``."""
        return f"{self._parent}{member}.{name}"

    def per_output(self, numbers: torch.Tensor) -> torch.Tensor:
        """Expand one number per fused layer ``[P]`` to one per output ``[O]``."""
        sizes = torch.tensor(list(self.sizes.values()), device=numbers.device)
        return numbers.repeat_interleave(sizes)

    def check(self, scales: torch.Tensor, name: str) -> None:
        """Raise CheckpointError with the tensor's name if a scale is not a positive number.

        Args:
            scales: dimension 0 has one entry per fused layer, or is split in proportion to the
                outputs of the fused layers.
            name: of the tensor.
        """
        total, length = sum(self.sizes.values()), len(scales)
        is_one_per_member = length == len(self.sizes)
        rows = [1 if is_one_per_member else size * length // total for size in self.sizes.values()]
        for member, member_scales in zip(self.sizes, scales.split(rows), strict=True):
            is_wrong = ~(member_scales.isfinite() & (member_scales > 0))
            if is_wrong.any():
                index = tuple(int(i) for i in is_wrong.nonzero()[0])
                position = f" at {list(index)}" if member_scales.numel() > 1 else ""
                raise CheckpointError(
                    self.tensor(member, name),
                    f"{int(is_wrong.sum())} of {member_scales.numel()} scales are not positive "
                    f"numbers, the first is {float(member_scales[index])}{position}",
                    "copy the checkpoint again, or quantize the model again",
                )


def check_block_rows(site: Site, members: Members, rows: int) -> None:
    """Raise ConfigError if a block of ``rows`` rows crosses the boundary of two fused layers."""
    sizes = members.sizes
    if len(sizes) > 1 and any(size % rows for size in sizes.values()):
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"{site.prefix}: blocks of {rows} rows do not divide the outputs of the "
            f"layers that are fused there: {listed}. "
            "Try: blocks that do, or name them in 'modules_to_not_convert' or 'ignore'"
        )


def register(layer: nn.Module, **tensors: torch.Tensor | None) -> None:
    """Register ``tensors`` as parameters of ``layer``."""
    for name, tensor in tensors.items():
        parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, parameter)


def register_transient(layer: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Register a parameter that is needed only until ``finalize``."""
    parameter = nn.Parameter(tensor, requires_grad=False)
    # The loader then uses the file's tensor without a copy where it can.
    parameter.passing = True  # type: ignore[attr-defined]
    layer.register_parameter(name, parameter)


def register_per_part(layer: nn.Module, name: str, num_parts: int) -> None:
    """Register the parameter ``name`` ``[P]`` float32 with one number per fused layer."""
    parameter = nn.Parameter(torch.empty(num_parts, dtype=torch.float32), requires_grad=False)
    # The loader fills one entry per fused layer.
    parameter.per_part = True  # type: ignore[attr-defined]
    layer.register_parameter(name, parameter)
