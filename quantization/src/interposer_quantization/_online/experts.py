"""Routed experts with unquantized matrices that are quantized during loading.

Dimensions: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import nn

from interposer import ExpertsMethod, ExpertsSpec, Site
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.moe.experts import PlainExperts, register_matrices, take_matrices
from interposer_ops.layers.moe.sequential_experts import ExpertLoop, note_sequential
from interposer_quantization._experts.stored import StoredExperts

_NAMES = ("gate_up_proj", "down_proj")


class OnlineExperts(StoredExperts):
    """Experts method in which each matrix is a linear layer with online quantization."""

    def _method(self, site: Site, spec: ExpertsSpec) -> ExpertsMethod:
        # The checkpoint stores each matrix by itself, so the base class handles them.
        if spec.projections is not None:
            return super()._method(site, spec)
        storages = [self.stored(f"{site.prefix}.{name}") for name in _NAMES]
        return PlainExperts() if storages == [None, None] else SplitExperts()


class SplitExperts(ExpertsMethod):
    """Experts method that splits stacked expert tensors into one quantized linear layer per matrix.

    The matrices stay unquantized until ``finalize``, which quantizes one matrix after the other.
    """

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register the unquantized matrices and biases.

        Raises: ConfigError: the scheme's linear layers do not support the layer's sizes.
        """
        self.spec, self.loop = spec, ExpertLoop(site, spec)
        first, second = (site.at(name) for name in _NAMES)
        hidden, inner = spec.hidden_size, spec.intermediate_size
        # Templates that are copied for each expert; they are not layers of the model.
        self.patterns = (
            Linear(first, hidden, 2 * inner, spec.biased),
            Linear(second, inner, hidden, spec.biased),
        )
        note_sequential(site, *self.patterns)
        register_matrices(layer, site, spec)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the expert loop and the quantized linear layers of all experts.

        Raises: CheckpointError: a matrix has a value that is not finite.
        """
        matrices = take_matrices(layer, self.spec)
        pairs = [
            tuple(
                _expert_linear(
                    pattern, matrices[name][expert], _bias_of(matrices[f"{name}_bias"], expert)
                )
                for pattern, name in zip(self.patterns, ("gate_up", "down"), strict=True)
            )
            for expert in range(self.spec.num_experts)
        ]
        return self.loop, (tuple(pairs),)


def _expert_linear(template: Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Return a finalized copy of the template layer with the expert's weights."""
    layer = copy(template)
    # copy() shares the dict of parameters with the template.
    layer._parameters = {}
    for name, tensor in (("weight", weight), ("bias", bias)):
        parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, parameter)
    layer.finalize()
    return layer


def _bias_of(biases: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if biases is None else biases[expert]
