"""Routed experts whose format is found by the names of their matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import ExpertsMethod, ExpertsSpec, Site
from interposer_ops.layers.expert_loop import LinearExperts
from interposer_ops.layers.experts import PlainExperts
from interposer_quantization._experts.separate import names_of_matrices


class StoredExperts(ExpertsMethod):
    """Experts that are stored as the settings have it of each of their matrices.

    Where all of them are stored alike, and an op computes such experts at once, it does; else each
    is linear layers of the scheme.

    Args:
        stored: what settings say of a matrix, by its full name; None for plain.
        at_once: the method of such an op for experts at a site of which all matrices are stored so,
            None where there is none.
    """

    def __init__(
        self,
        stored: Callable[[str], Any],
        at_once: Callable[[Any, Site, ExpertsSpec], ExpertsMethod | None],
    ) -> None:
        self.stored = stored
        self.at_once = at_once

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register what the method for these experts registers.

        Raises: ConfigError: experts of these sizes cannot be stored that way.
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
        first, *others = [self.stored(name) for name in names_of_matrices(site.prefix, spec)] or (
            [None]
        )
        if any(other != first for other in others):
            return LinearExperts()
        if first is None:
            return PlainExperts()
        return self.at_once(first, site, spec) or LinearExperts()
