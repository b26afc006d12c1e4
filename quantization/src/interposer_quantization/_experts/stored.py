"""Routed experts whose method depends on the storage format of each matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import ExpertsMethod, ExpertsSpec, Site
from interposer_ops.layers.moe.experts import PlainExperts
from interposer_ops.layers.moe.sequential_experts import LinearExperts
from interposer_quantization._experts.separate import matrix_names


class StoredExperts(ExpertsMethod):
    """Experts method that delegates to a fused op, or to one linear layer per matrix.

    The fused op is used if all matrices have the same storage and an op supports it.

    Args:
        stored: function from a matrix's full name to its storage, or None if not quantized.
        fused_method: function that returns the fused-op method for a storage at a site, or None.
    """

    def __init__(
        self,
        stored: Callable[[str], Any],
        fused_method: Callable[[Any, Site, ExpertsSpec], ExpertsMethod | None],
    ) -> None:
        self.stored = stored
        self.fused_method = fused_method

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Choose the method for the experts at this site and register the parameters.

        Raises: ConfigError: the format cannot store experts of such sizes.
        """
        self.method = self._method(site, spec)
        self.method.create_weights(layer, site, spec)

    def dequantized(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the float64 matrices ``[E, 2 I, H]``, gates first, and ``[E, H, I]``."""
        return self.method.dequantized(layer)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Finalize the chosen method; return function and constants.

        Raises: CheckpointError: a tensor holds values that no weight can be computed from.
        """
        return self.method.finalize(layer)

    def _method(self, site: Site, spec: ExpertsSpec) -> ExpertsMethod:
        first, *remaining = [self.stored(name) for name in matrix_names(site.prefix, spec)] or (
            [None]
        )
        # Matrices with different storages need a linear layer each.
        if any(storage != first for storage in remaining):
            return LinearExperts()
        if first is None:
            return PlainExperts()
        return self.fused_method(first, site, spec) or LinearExperts()
