"""Scales stored as E8M0 exponents, as in the microscaling formats."""

from __future__ import annotations

import torch
from torch import nn

from interposer.errors import CheckpointError
from interposer_quantization._fp8.parameters import Members
from interposer_quantization._weights.packed_linear import register_stored

# E8M0: a scale is 2^(e - 127).
_NAN = 255
_BIAS = 127
_SAMPLED = 4


def register_exponents(layer: nn.Module, name: str, rows: int, columns: int) -> None:
    """Register the parameter ``name`` ``[rows, columns]`` uint8 of biased exponents."""

    def sample(generator: torch.Generator) -> torch.Tensor:
        # Exponents close to the bias keep random test weights close to 1.
        low, high = _BIAS - _SAMPLED, _BIAS + _SAMPLED
        return torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.uint8)

    empty = torch.empty(rows, columns, dtype=torch.uint8)
    register_stored(layer, name, empty, sample=sample)


def check_exponents(members: Members, exponents: torch.Tensor, name: str) -> None:
    """Raise CheckpointError if an E8M0 scale ``[O, G]`` is the NaN code."""
    for member, member_exponents in zip(
        members.sizes, exponents.split(list(members.sizes.values())), strict=True
    ):
        is_nan = member_exponents == _NAN
        if is_nan.any():
            position = [int(index) for index in is_nan.nonzero()[0]]
            raise CheckpointError(
                members.tensor(member, name),
                f"{int(is_nan.sum())} of {member_exponents.numel()} scales are {_NAN}, which is "
                f"not a number, the first at {position}",
                "copy the checkpoint again, or quantize the model again",
            )
