"""Weights that vLLM loaded, as a linear method here takes them.

Dimensions: I input features, O output features, P layers of the checkpoint that are fused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from interposer.errors import ConfigError
from interposer_ops.layers.linear import Linear

__all__ = ["empty_layer", "fill", "parts_of"]

# The sizes of a packed weight. vLLM keeps those of one of the fused layers, whole even where it
# holds a slice; the sizes that the method was built with are those of what it holds.
_SIZES = "weight_shape"


def parts_of(prefix: str, sizes: list[int], fused: Mapping[str, list[str]]) -> dict[str, int]:
    """Return the names of the checkpoint's layers at ``prefix`` with their outputs.

    Args:
        sizes: outputs of what vLLM fuses there.
        fused: names of the checkpoint's layers by the last part of a prefix.
    """
    own = prefix.rpartition(".")[2]
    names = fused.get(own, [own])
    return dict(zip(names, sizes, strict=True)) if len(names) == len(sizes) else {own: sum(sizes)}


def empty_layer(parts: Mapping[str, int]) -> Linear:
    """Return a linear layer of ``parts`` without parameters, for a method to create them.

    Methods ask a layer of this class for the layers of the checkpoint that are fused.
    """
    layer: Any = Linear.__new__(Linear)
    nn.Module.__init__(layer)
    layer.parts = dict(parts)
    return cast(Linear, layer)


def fill(holder: Linear, loaded: Mapping[str, Tensor | None]) -> None:
    """Put what vLLM loaded into the parameters that a method here created, by name.

    Nothing is copied that has the right form.

    Args:
        holder: has ``parts``, and parameters as ``LinearMethod.create_weights`` describes them.
    Raises: ConfigError: vLLM stores the layer in another form.
    """
    wanted = {name: own for name, own in holder._parameters.items() if own is not None}
    strays = {name for name, held in loaded.items() if held is not None} - wanted.keys()
    if strays:
        raise ConfigError(f"vLLM holds {', '.join(sorted(strays))} besides, which no method reads")
    for name, own in wanted.items():
        data = _form(name, own, loaded.get(name), len(holder.parts))
        filled = nn.Parameter(data, requires_grad=False)
        vars(filled).update(vars(own))
        holder.register_parameter(name, filled)


def _form(name: str, own: nn.Parameter, held: Tensor | None, num_parts: int) -> Tensor:
    """Return ``held`` in the shape and dtype of ``own``."""
    facts: dict[str, Any] = vars(own)
    if name == _SIZES:
        sizes: Tensor = facts["sample"](torch.Generator())
        return sizes
    if held is None:
        if "default" not in facts:
            raise ConfigError(f"vLLM holds no {name}")
        default = facts["default"]
        return default() if callable(default) else torch.full(own.shape, default, dtype=own.dtype)
    if own.dtype != held.dtype and not (own.is_floating_point() and held.is_floating_point()):
        raise ConfigError(f"vLLM holds {name} as {held.dtype}, not {own.dtype}")
    data = held.detach()
    if facts.get("per_part") and data.numel() * num_parts == own.numel():
        data = data.reshape(-1).repeat(num_parts)
    if data.numel() != own.numel() or _without_ones(data) != _without_ones(own):
        raise ConfigError(f"vLLM holds {name} as {list(data.shape)}, not {list(own.shape)}")
    return data.reshape(own.shape).to(own.dtype)


def _without_ones(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]
