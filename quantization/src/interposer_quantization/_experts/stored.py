"""Routed experts whose format is found by the names of their matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import ExpertsMethod, ExpertsSpec, Site
from interposer.errors import ConfigError
from interposer_ops.layers.experts import PlainExperts
from interposer_quantization._experts.separate import names_of_matrices


class StoredExperts(ExpertsMethod):
    """Experts that are stored as the settings have it of each of their matrices.

    Args:
        stored: what settings say of a matrix, by its full name; None for plain.
        method_of: the method for experts of which all matrices are stored so.
        mend: what to do where they differ.
    """

    def __init__(
        self,
        stored: Callable[[str], Any],
        method_of: Callable[[str, Any], ExpertsMethod],
        mend: str,
    ) -> None:
        self.stored = stored
        self.method_of = method_of
        self.mend = mend

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register what the method for these experts registers.

        Raises: ConfigError: matrices are stored in different ways, or in one without an op.
        """
        self.method = self._method(site, spec)
        self.method.create_weights(layer, site, spec)

    def dequantized(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the float64 matrices ``[E, 2 I, H]``, gates first, and ``[E, H, I]``."""
        return self.method.dequantized(layer)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return what the method for these experts returns.

        Raises: CheckpointError: a parameter holds what no weight can be computed with.
        """
        return self.method.finalize(layer)

    def _method(self, site: Site, spec: ExpertsSpec) -> ExpertsMethod:
        found = {name: self.stored(name) for name in names_of_matrices(site.prefix, spec)}
        first, *_ = [*found.items(), ("", None)]
        for name, how in found.items():
            if how != first[1]:
                listed = "\n".join(
                    f"  {each}: {'not quantized' if found[each] is None else found[each]}"
                    for each in (first[0], name)
                )
                raise ConfigError(
                    f"{site.prefix} holds experts that are quantized in different ways:\n{listed}\n"
                    f"Try: {self.mend}"
                )
        return PlainExperts() if first[1] is None else self.method_of(site.prefix, first[1])
