"""The layers of a checkpoint that one layer fuses, and the parameters of their tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from interposer import Site
from interposer_ops.layers.linear import Linear


def parts_of(layer: nn.Module, site: Site, out_features: int) -> Mapping[str, int]:
    """Return the outputs of each layer of the checkpoint by its name, in their order."""
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
        stored_as: the checkpoint's name of the tensor, which is then held as it is stored, in
            whatever shape and dtype; empty for the layer's name with ``name``.
        chosen: the one tensor that may stand there where any other would be refused.
        attributes: what the loader is to know besides, such as ``per_part``.
    """
    parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
    if parameter is not None:
        if stored_as:
            attributes |= {"stored_as": stored_as, "any_form": True}
        if chosen is not None:
            attributes["sample"] = lambda _: chosen
        parameter.__dict__.update(attributes)
    layer.register_parameter(name, parameter)
