"""Conversion of weights that vLLM loaded into the parameters of a linear method.

Shapes: I input features, O output features, P fused layers of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from interposer.errors import ConfigError
from interposer_ops.layers.linear import Linear

__all__ = ["empty_layer", "fill", "narrow", "outputs_by_layer", "widen"]

# The sizes of a packed weight. vLLM keeps the unsharded sizes of one of the fused layers. The
# method needs the sizes of this worker's shard, and received these in ``create_weights``.
_SIZES = "weight_shape"


def outputs_by_layer(
    prefix: str, sizes: list[int], fused: Mapping[str, list[str]]
) -> dict[str, int]:
    """Return the output features of the checkpoint layers at ``prefix``, by name.

    Args:
        sizes: output features of the layers that vLLM fuses.
        fused: names of the checkpoint's layers, by the last part of a fused layer's prefix.
    """
    last_part = prefix.rpartition(".")[2]
    names = fused.get(last_part, [last_part])
    if len(names) != len(sizes):
        return {last_part: sum(sizes)}
    return dict(zip(names, sizes, strict=True))


def empty_layer(parts: Mapping[str, int]) -> Linear:
    """Create a linear layer of ``parts`` without parameters, to which a method adds parameters.

    Linear methods read the fused layers of the checkpoint from ``parts``.
    """
    layer: Any = Linear.__new__(Linear)
    nn.Module.__init__(layer)
    layer.parts = dict(parts)
    return cast(Linear, layer)


def fill(holder: Linear, loaded: Mapping[str, Tensor | None]) -> None:
    """Put the tensors that vLLM loaded into the parameters that a linear method created.

    A tensor of the right shape and dtype is not copied. If vLLM holds a parameter under two names,
    one of the two must match.

    Args:
        holder: has ``parts``, and parameters as described by ``LinearMethod.create_weights``.
        loaded: vLLM's parameters by name.
    Raises: ConfigError: vLLM stores the layer in another layout.
    """
    declared = {name: value for name, value in holder._parameters.items() if value is not None}
    matching_ids = {id(tensor) for name, tensor in loaded.items() if name in declared}
    unread = {
        name
        for name, tensor in loaded.items()
        if tensor is not None and name not in declared and id(tensor) not in matching_ids
    }
    if unread:
        raise ConfigError(f"vLLM also stores {', '.join(sorted(unread))}, which no method reads")
    for name, parameter in declared.items():
        data = _converted(name, parameter, loaded.get(name), len(holder.parts))
        filled = nn.Parameter(data, requires_grad=False)
        # The method's facts about a parameter, such as ``per_part``, are its attributes.
        vars(filled).update(vars(parameter))
        holder.register_parameter(name, filled)


def widen(layer: nn.Module, holder: Linear) -> dict[str, torch.dtype]:
    """Replace float parameters of ``layer`` by wider ones where ``holder`` declares wider dtypes.

    vLLM creates scales in the model's dtype, which would round the scales of most checkpoints.

    Returns: the former dtypes by name, for ``narrow``.
    """
    former_dtypes = {}
    for name, declared in holder._parameters.items():
        parameter = layer._parameters.get(name)
        if declared is None or parameter is None or not _is_wider(declared.dtype, parameter.dtype):
            continue
        former_dtypes[name] = parameter.dtype
        parameter.data = torch.empty(parameter.shape, dtype=declared.dtype, device=parameter.device)
    return former_dtypes


def narrow(layer: nn.Module, former_dtypes: Mapping[str, torch.dtype]) -> None:
    """Round each parameter of ``layer`` to the dtype of the parameter that vLLM had created."""
    for name, dtype in former_dtypes.items():
        parameter = layer.get_parameter(name)
        parameter.data = parameter.data.to(dtype)


def _is_wider(declared: torch.dtype, actual: torch.dtype) -> bool:
    floats = declared.is_floating_point and actual.is_floating_point
    return floats and declared.itemsize > actual.itemsize


def _converted(name: str, declared: nn.Parameter, loaded: Tensor | None, num_parts: int) -> Tensor:
    """Convert ``loaded`` to the shape and dtype of ``declared``; None gives the default value."""
    attributes: dict[str, Any] = vars(declared)
    if name == _SIZES:
        sizes: Tensor = attributes["sample"](torch.Generator())
        return sizes
    if loaded is None:
        if "default" not in attributes:
            raise ConfigError(f"vLLM holds no {name}")
        default = attributes["default"]
        return (
            default()
            if callable(default)
            else torch.full(declared.shape, default, dtype=declared.dtype)
        )
    if declared.dtype != loaded.dtype and not (
        declared.is_floating_point() and loaded.is_floating_point()
    ):
        raise ConfigError(f"vLLM holds {name} as {loaded.dtype}, not {declared.dtype}")
    data = loaded.detach()
    # vLLM has one value for all fused layers, the method expects one per layer.
    if attributes.get("per_part") and data.numel() * num_parts == declared.numel():
        data = data.reshape(-1).repeat(num_parts)
    # Only dimensions of size 1 may differ, such as [O] and [O, 1].
    if data.numel() != declared.numel() or _without_ones(data) != _without_ones(declared):
        raise ConfigError(f"vLLM holds {name} as {list(data.shape)}, not {list(declared.shape)}")
    return data.reshape(declared.shape).to(declared.dtype)


def _without_ones(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]
