"""Common parts of the linear layers of compressed-tensors: sizes, scales and constants.

Dimensions: I input features, O output features, G groups, P layers of the checkpoint that are
fused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from interposer import BoundKernel, Site
from interposer.errors import CheckpointError, ConfigError
from interposer_quantization._fp8.parameters import Members, register, register_per_part


def number_of_groups(site: Site, in_features: int, size: int) -> int:
    """Return how many groups of ``size`` the inputs have.

    Raises: ConfigError: the groups do not divide the inputs.
    """
    num_groups, rest = divmod(in_features, size)
    if rest or not num_groups:
        raise ConfigError(
            f"{site.prefix}: groups of {size} do not divide its {in_features} inputs. "
            "Try: quantize with a group size that does, or leave the layer plain"
        )
    return num_groups


def register_scales(layer: nn.Module, name: str, members: Members, columns: int | None) -> None:
    """Register the float32 scales ``name``: ``[O, columns]``, or ``[P]`` without columns."""
    if columns is None:
        register_per_part(layer, name, len(members.sizes))
        return
    rows = sum(members.sizes.values())
    register(layer, **{name: torch.empty(rows, columns, dtype=torch.float32)})


def scales_by_output(scales: torch.Tensor, members: Members) -> torch.Tensor:
    """Return scales ``[O, G]`` as they are, and ``[P]`` as ``[O, 1]``."""
    return scales if scales.ndim == 2 else members.per_output(scales).unsqueeze(1)


DIFFERENT = "layers that run as one product differ in what they share: {listed}"


def common_number(
    members: Members, numbers: torch.Tensor, name: str, why: str, problem: str = DIFFERENT
) -> torch.Tensor:
    """Return the number ``[1]`` that all fused layers have, of ``numbers`` ``[P]``.

    Args:
        name: of the tensor that holds them.
        why: what the layers would have to share, and what to do.
        problem: what is wrong; ``{name}`` stands for ``name``, ``{listed}`` for the numbers.
    Raises: CheckpointError: they are different.
    """
    if not (numbers == numbers[0]).all():
        listed = ", ".join(
            f"{members.tensor(member, name)} = {float(number):.9g}"
            for member, number in zip(members.sizes, numbers, strict=True)
        )
        first = members.tensor(next(iter(members.sizes)), name)
        raise CheckpointError(first, problem.format(name=name, listed=listed), why)
    return numbers[:1]


def released(layer: nn.Module, held: Iterable[object]) -> None:
    """Drop the parameters of ``layer`` that are not among ``held``."""
    kept = {id(each) for each in held}
    for name, parameter in list(layer._parameters.items()):
        if parameter is not None and id(parameter) not in kept:
            layer.register_parameter(name, None)


def final_operands(
    layer: nn.Module, bound: BoundKernel[Any, Any], constants: Mapping[str, torch.Tensor | None]
) -> tuple[Any, ...]:
    """Return the operands of the kernel, prepared if it wants them so, and hold nothing else.

    What constants were derived from goes first, so that there are never three copies.
    """
    released(layer, constants.values())
    prepared = bound.prepared(**constants)
    operands = tuple(prepared[name] for name in constants)
    released(layer, operands)
    return operands
