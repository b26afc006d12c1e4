"""Parameters of linear layers of 8-bit floats, and the checks of their scales.

Dimensions: I input features, O output features, P layers of the checkpoint that are fused.
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
    """The layers of the checkpoint in one layer: those that it fuses, or one.

    Attributes:
        sizes: outputs by the name that the checkpoint uses, in the order of the outputs.
    """

    def __init__(self, layer: nn.Module, site: Site, out_features: int) -> None:
        parent, _, name = site.prefix.rpartition(".")
        self.sizes = dict(layer.parts) if isinstance(layer, Linear) else {name: out_features}
        self._parent = f"{parent}." if parent else ""

    def tensor(self, member: str, name: str) -> str:
        """Return the name under which the checkpoint stores the tensor ``name`` of ``member``."""
        return f"{self._parent}{member}.{name}"

    def per_output(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return ``[O]``: each of ``numbers`` ``[P]`` for every output of its member."""
        sizes = torch.tensor(list(self.sizes.values()), device=numbers.device)
        return numbers.repeat_interleave(sizes)

    def check(self, scales: torch.Tensor, name: str) -> None:
        """Raise CheckpointError if a scale is not a positive number, naming the stored tensor.

        Args:
            scales: dimension 0 is divided among the members as their outputs are, or holds one
                for each.
            name: of the tensor.
        """
        total, length = sum(self.sizes.values()), len(scales)
        single = length == len(self.sizes)
        rows = [1 if single else size * length // total for size in self.sizes.values()]
        for member, stored in zip(self.sizes, scales.split(rows), strict=True):
            wrong = ~(stored.isfinite() & (stored > 0))
            if wrong.any():
                place = tuple(int(i) for i in wrong.nonzero()[0])
                where = f" at {list(place)}" if stored.numel() > 1 else ""
                raise CheckpointError(
                    self.tensor(member, name),
                    f"{int(wrong.sum())} of {stored.numel()} scales are not positive numbers, "
                    f"the first is {float(stored[place])}{where}",
                    "copy the checkpoint again, or quantize the model again",
                )


def check_block_rows(site: Site, members: Members, rows: int) -> None:
    """Raise ConfigError if a block of ``rows`` would lie across two fused layers."""
    sizes = members.sizes
    if len(sizes) > 1 and any(size % rows for size in sizes.values()):
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"{site.prefix}: blocks of {rows} rows do not divide the outputs of the "
            f"layers that are fused there: {listed}. "
            "Try: blocks that do, or name them in 'modules_to_not_convert' or 'ignore'"
        )


def register(layer: nn.Module, **tensors: torch.Tensor | None) -> None:
    """Register ``tensors`` as parameters of ``layer`` by name."""
    for name, tensor in tensors.items():
        parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, parameter)


def register_passing(layer: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Register a parameter that ``finalize`` reads and keeps nothing of."""
    parameter = nn.Parameter(tensor, requires_grad=False)
    parameter.passing = True  # type: ignore[attr-defined]
    layer.register_parameter(name, parameter)


def register_per_part(layer: nn.Module, name: str, num_parts: int) -> None:
    """Register the parameter ``name`` ``[P]`` float32, one number for each fused layer."""
    parameter = nn.Parameter(torch.empty(num_parts, dtype=torch.float32), requires_grad=False)
    parameter.per_part = True  # type: ignore[attr-defined]
    layer.register_parameter(name, parameter)
