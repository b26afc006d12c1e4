"""Fused layers of the checkpoint, and registration of their tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from interposer import Site
from interposer_ops.layers.linear import Linear


def parts_of(layer: nn.Module, site: Site, out_features: int) -> Mapping[str, int]:
    """Return the number of outputs by the checkpoint's layer name, in output order."""
    if isinstance(layer, Linear):
        return layer.parts
    return {site.prefix.rpartition(".")[2]: out_features}


def register(
    layer: nn.Module,
    name: str,
    tensor: torch.Tensor | None,
    stored_as: str = "",
    chosen: torch.Tensor | None = None,
    **attributes: object,
) -> None:
    """Register a parameter that a checkpoint stores.

    Args:
        stored_as: the tensor's name in the checkpoint; the loader then keeps the stored shape and
            dtype. Empty for the name of the layer and ``name``.
        chosen: the only valid value of the tensor, for random weights.
        attributes: more attributes for the loader, such as ``per_part``.
    """
    parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
    if parameter is not None:
        if stored_as:
            attributes |= {"stored_as": stored_as, "any_form": True}
        if chosen is not None:
            # Random test weights use the only valid value.
            attributes["sample"] = lambda _: chosen
        parameter.__dict__.update(attributes)
    layer.register_parameter(name, parameter)
