"""Shared parts of the compressed-tensors linear layers: sizes, scales and kernel constants.

Dimensions: I input features, O output features, G groups, P fused layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from interposer import BoundKernel, Site
from interposer.errors import CheckpointError, ConfigError
from interposer_quantization._fp8.parameters import Members, register, register_per_part


def count_groups(site: Site, in_features: int, size: int) -> int:
    """Return the number of groups of ``size`` inputs in a layer.

    Raises: ConfigError: the group size does not divide the inputs.
    """
    num_groups, remainder = divmod(in_features, size)
    if remainder or not num_groups:
        raise ConfigError(
            f"{site.prefix}: groups of {size} do not divide its {in_features} inputs. "
            "Try: quantize with a group size that does, or leave the layer plain"
        )
    return num_groups


def register_scales(layer: nn.Module, name: str, members: Members, columns: int | None) -> None:
    """Register the float32 scales ``name``: ``[O, columns]``, or ``[P]`` if ``columns`` is None."""
    if columns is None:
        register_per_part(layer, name, len(members.sizes))
        return
    rows = sum(members.sizes.values())
    register(layer, **{name: torch.empty(rows, columns, dtype=torch.float32)})


def scales_by_output(scales: torch.Tensor, members: Members) -> torch.Tensor:
    """Return scales ``[O, G]`` unchanged; expand ``[P]`` to ``[O, 1]``."""
    return scales if scales.ndim == 2 else members.per_output(scales).unsqueeze(1)


def shared_scalar(members: Members, numbers: torch.Tensor, name: str, why: str) -> torch.Tensor:
    """Return the number ``[1]`` that all fused layers share, from ``numbers`` ``[P]``.

    Args:
        name: of the tensor that holds the numbers.
        why: advice for the error message.
    Raises: CheckpointError: the numbers differ.
    """
    if not (numbers == numbers[0]).all():
        listed = ", ".join(
            f"{members.tensor(member, name)} = {float(number):.9g}"
            for member, number in zip(members.sizes, numbers, strict=True)
        )
        first = members.tensor(next(iter(members.sizes)), name)
        problem = f"fused layers must have the same {name}, but differ: {listed}"
        raise CheckpointError(first, problem, why)
    return numbers[:1]


def drop_parameters_except(layer: nn.Module, tensors: Iterable[object]) -> None:
    """Unregister the parameters of ``layer`` that are not among ``tensors``."""
    # By identity: ``in`` would compare the elements of tensors.
    tensor_ids = {id(tensor) for tensor in tensors}
    for name, parameter in list(layer._parameters.items()):
        if parameter is not None and id(parameter) not in tensor_ids:
            layer.register_parameter(name, None)


def prepare_operands(
    layer: nn.Module,
    bound_kernel: BoundKernel[Any, Any],
    constants: Mapping[str, torch.Tensor | None],
) -> tuple[Any, ...]:
    """Let the kernel prepare the constants, and free every parameter that is no longer needed.

    Parameters whose values the constants replace are freed first: at most two copies of the weight
    exist at a time.
    """
    drop_parameters_except(layer, constants.values())
    prepared = bound_kernel.prepared(**constants)
    operands = tuple(prepared[name] for name in constants)
    drop_parameters_except(layer, operands)
    return operands
