"""Routed experts whose plain matrices are quantized while they load.

Dimensions: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import nn

from interposer import ExpertsMethod, ExpertsSpec, Site
from interposer_ops.layers.expert_loop import ExpertLoop, tell_in_turn
from interposer_ops.layers.experts import PlainExperts, register_matrices, taken_matrices
from interposer_ops.layers.linear import Linear
from interposer_quantization._experts.stored import StoredExperts

_NAMES = ("gate_up_proj", "down_proj")


class OnlineExperts(StoredExperts):
    """Experts of which each matrix is a linear layer that is quantized while it loads."""

    def _method(self, site: Site, spec: ExpertsSpec) -> ExpertsMethod:
        if spec.projections is not None:
            return super()._method(site, spec)
        found = [self.stored(f"{site.prefix}.{name}") for name in _NAMES]
        return PlainExperts() if found == [None, None] else SplitExperts()


class SplitExperts(ExpertsMethod):
    """The matrices of ``PlainExperts`` stored together, each quantized as a linear layer.

    They are plain until the layer is finalized, and then quantized one after the other.
    """

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register the plain matrices and their biases.

        Raises: ConfigError: what the scheme's linear layers cannot hold.
        """
        self.spec, self.loop = spec, ExpertLoop(site, spec)
        first, second = (site.at(name) for name in _NAMES)
        hidden, inner = spec.hidden_size, spec.intermediate_size
        # They stand for those of each expert, and are no layers of the model.
        self.patterns = (
            Linear(first, hidden, 2 * inner, spec.biased),
            Linear(second, inner, hidden, spec.biased),
        )
        tell_in_turn(site, *self.patterns)
        register_matrices(layer, site, spec)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the loop and the quantized linear layers of all experts.

        Raises: CheckpointError: a matrix holds what is no finite number.
        """
        held = taken_matrices(layer, self.spec)
        pairs = [
            tuple(
                _filled(pattern, held[name][expert], _of(held[f"{name}_bias"], expert))
                for pattern, name in zip(self.patterns, ("gate_up", "down"), strict=True)
            )
            for expert in range(self.spec.num_experts)
        ]
        return self.loop, (tuple(pairs),)


def _filled(pattern: Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Return another layer like ``pattern``, finalized with these numbers."""
    layer = copy(pattern)
    layer._parameters = {}
    for name, tensor in (("weight", weight), ("bias", bias)):
        held = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, held)
    layer.finalize()
    return layer


def _of(biases: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if biases is None else biases[expert]
