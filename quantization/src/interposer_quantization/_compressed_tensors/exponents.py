"""Scales that are stored as exponents of two, as the microscaling formats have them."""

from __future__ import annotations

import torch
from torch import nn

from interposer.errors import CheckpointError
from interposer_quantization._fp8.parameters import Members
from interposer_quantization._weights.packed_linear import register_stored

_NAN = 255
_BIAS = 127
_SAMPLED = 4


def register_exponents(layer: nn.Module, name: str, rows: int, columns: int) -> None:
    """Register the biased exponents ``name`` ``[rows, columns]`` uint8."""

    def sample(generator: torch.Generator) -> torch.Tensor:
        low, high = _BIAS - _SAMPLED, _BIAS + _SAMPLED
        return torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.uint8)

    empty = torch.empty(rows, columns, dtype=torch.uint8)
    register_stored(layer, name, empty, sample=sample)


def check_exponents(members: Members, exponents: torch.Tensor, name: str) -> None:
    """Raise CheckpointError if an exponent ``[O, G]`` stands for no number."""
    for member, stored in zip(
        members.sizes, exponents.split(list(members.sizes.values())), strict=True
    ):
        wrong = stored == _NAN
        if wrong.any():
            place = [int(index) for index in wrong.nonzero()[0]]
            raise CheckpointError(
                members.tensor(member, name),
                f"{int(wrong.sum())} of {stored.numel()} scales are {_NAN}, which is not a number, "
                f"the first at {place}",
                "copy the checkpoint again, or quantize the model again",
            )
