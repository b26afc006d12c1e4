"""MoE layers whose experts are separate linear layers, fused into one native call.

Dimensions: T tokens, H hidden size, K chosen experts, E experts.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple, final

import torch
from torch.compiler import is_compiling

from interposer import ExpertsSpec, Site
from interposer_cpu._kernels.experts import EXPERT_ACTIVATIONS, routed_rows
from interposer_cpu._kernels.fusion import (
    UNQUANTIZED,
    ForwardHooks,
    activation_number,
    input_quantization,
    is_declared,
)
from interposer_cpu._kernels.interface import FLOAT32, TYPES
from interposer_cpu.native import library
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.moe.dispatcher import ExpertDispatcher
from interposer_ops.layers.moe.experts import ExpertActivation, Experts
from interposer_ops.layers.moe.sequential_experts import ExpertLoop

_LAYERS = (Linear, MergedLinear)


class ExpertWeights(NamedTuple):
    """Arguments of routed experts in the fused call of a decoder block.

    Attributes:
        owner: the packed weight of a fused-experts kernel, or a table of the addresses of all
            experts' layers, int64 ``[E, 2]``.
        is_mixture: ``owner`` is a packed weight.
        fields: fields of the input quantizations of the first and the second projection.
    """

    owner: torch.Tensor
    is_mixture: bool
    activation: int
    fields: tuple[int, ...] = (*UNQUANTIZED.fields, *UNQUANTIZED.fields)


@final
class NativeExperts(Experts):
    """Experts that compute an ``ExpertLoop`` in one call, with float32 between the projections.

    Falls back to the standard layer for a fused-experts kernel, a dispatcher, hooks, projections
    of other classes, and kernels that are not declared in ``fusion``.
    """

    def __init__(
        self, site: Site, spec: ExpertsSpec, dispatcher: ExpertDispatcher | None = None
    ) -> None:
        super().__init__(site, spec, dispatcher)
        self._fused: _FusedExperts | None = None

    def finalize(self) -> None:
        """Finalize the linear layers, then fuse the experts into one call if possible."""
        super().finalize()
        self._fused = None
        if self.dispatcher is None and type(self.kernel) is ExpertLoop:
            self._fused = _FusedExperts.of(self.kernel, self.operands[0])

    def weights(self) -> ExpertWeights | None:
        """Return the arguments of a fused call; None if the layer must be called."""
        fused = self._fused
        if fused is not None:
            if not fused.hooks.is_empty() or (table := fused.table()) is None:
                return None
            return ExpertWeights(table, False, fused.activation, fused.fields)
        number = EXPERT_ACTIVATIONS.get(self.spec.activation)
        is_supported = self.dispatcher is None and is_declared(self.kernel, "fused_experts")
        if not is_supported or number is None:
            return None
        return ExpertWeights(self.operands[0], True, number)

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor
    ) -> torch.Tensor:
        """Sum the outputs of each token's top K experts, scaled by ``weights``.

        Args:
            x: ``[T, H]``.
            weights: ``[T, K]``.
            expert_ids: ``[T, K]``.
        """
        fused = self._fused
        if (
            fused is None
            or is_compiling()
            or x.dtype not in TYPES
            or weights.dtype is not FLOAT32
            or not fused.hooks.is_empty()
            or (table := fused.table()) is None
        ):
            return super().forward(x, weights, expert_ids)
        x, weights, expert_ids = routed_rows(x, weights, expert_ids)
        count, width = x.shape
        out = torch.empty(count, width, dtype=x.dtype)
        library().expert_layers(
            table.data_ptr(),
            *fused.fields,
            x.data_ptr(),
            out.data_ptr(),
            weights.data_ptr(),
            expert_ids.data_ptr(),
            TYPES[x.dtype],
            fused.activation,
            len(table),
            count,
            expert_ids.shape[1],
            x.stride(0),
            weights.stride(0),
            expert_ids.stride(0),
        )
        return out


class _FusedExperts:
    """The linear layers of all experts and a table of their packed weights' addresses.

    Attributes:
        fields: fields of the input quantizations of the first and the second projection.
    """

    def __init__(self, layers: list[Any], activation: int) -> None:
        self.layers, self.activation = layers, activation
        self.hooks = ForwardHooks(layers)
        self.fields: tuple[int, ...] = ()
        self._exchanges = -1  # value of Linear.exchanges when the table was read
        self._table: torch.Tensor | None = None

    def __reduce__(self) -> tuple[type[_FusedExperts], tuple[list[Any], int]]:
        """Rebuild the object from the copied layers when a layer is copied."""
        return _FusedExperts, (self.layers, self.activation)

    @classmethod
    def of(cls, loop: ExpertLoop, pairs: tuple[Any, ...]) -> _FusedExperts | None:
        """Fuse the (gate_up, down) layers ``pairs``; None if one call cannot compute them all."""
        activate: Any = loop.activate
        layers = list(chain.from_iterable(pairs))
        if type(activate) is not ExpertActivation or not all(type(x) in _LAYERS for x in layers):
            return None
        number = activation_number(activate.activate, activate.options)
        return None if number is None else cls(layers, number)

    def table(self) -> torch.Tensor | None:
        """Return packed weights' addresses, int64 ``[E, 2]``; None if a kernel is unsupported.

        Weights can be exchanged without any notice to this layer, so the addresses are looked up
        after each exchange anywhere.
        """
        if self._exchanges != Linear.exchanges:
            self._exchanges, self._table = Linear.exchanges, self._read()
        return self._table

    def _read(self) -> torch.Tensor | None:
        # layers alternates between first and second projections. One call has one quantization
        # for all first projections and one for all second projections.
        by_half = [
            {input_quantization(layer.kernel) for layer in self.layers[half::2]} for half in (0, 1)
        ]
        if any(len(distinct) > 1 or None in distinct for distinct in by_half):
            return None
        quantizations: list[Any] = [*by_half[0], *by_half[1]]
        if any(quantization.is_static for quantization in quantizations):
            return None
        self.fields = (*quantizations[0].fields, *quantizations[1].fields)
        addresses = [layer.operands[0][0].data_ptr() for layer in self.layers]
        return torch.tensor(addresses, dtype=torch.int64).view(-1, 2)
