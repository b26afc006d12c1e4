"""The MoE layer in the fused call of a decoder block."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import nn

from interposer_cpu._kernels.blocks import NativeGatedMLP
from interposer_cpu._kernels.expert_layers import ExpertWeights, NativeExperts
from interposer_cpu._kernels.fusion import (
    UNQUANTIZED,
    ForwardHooks,
    InputQuantization,
    InputQuantizations,
    is_declared,
)
from interposer_cpu._kernels.interface import FLOAT32, TYPES, float64_bits
from interposer_cpu._kernels.routing import SCORINGS
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.moe.parts import HasMoEParts, MoEParts
from interposer_ops.layers.moe.router import Routing

_ROUTINGS = ("topk_softmax", "grouped_topk")
# Words of an interposer_factor without a weight.
_NO_FACTOR = (0, *UNQUANTIZED.fields, 0)


class MoEHalf:
    """Describe the MoE layer of a decoder block to the native library.

    Attributes:
        parts: the layer's parts.
        routing: how the router chooses experts.
    """

    def __init__(self, layer: nn.Module, parts: MoEParts, routing: Routing) -> None:
        self.layer, self.parts, self.routing = layer, parts, routing
        shared: Any = parts.shared
        gated: tuple[Any, ...] = () if shared is None else (shared.gate_up_proj, shared.down_proj)
        # The projections that run for all tokens.
        self._projections = (*gated, *filter(None, (parts.shared_gate,)))
        others = () if shared is None else (shared, shared.activation)
        modules = (layer, parts.router, parts.experts, *others, *self._projections)
        self._hooks = ForwardHooks(modules)
        # Adapters of experts and tools that watch a layer set ``forward`` on the instance.
        self._instances = [vars(module) for module in modules]
        self._quantizations = InputQuantizations()
        # Addresses and constants from which the struct was built, and the struct.
        self._bound: tuple[tuple[Any, ...], array[int]] = ((), array("q"))

    @classmethod
    def of(cls, layer: Any, dtype: torch.dtype) -> MoEHalf | None:
        """Return the arguments of an MoE layer; None if the library lacks a part."""
        described: HasMoEParts = layer
        parts = described.moe_parts() if hasattr(layer, "moe_parts") else None
        routing = None if parts is None else parts.router.routing()
        if parts is None or routing is None or dtype not in TYPES:
            return None
        shared, gate = parts.shared, parts.shared_gate
        is_supported = (
            is_declared(parts.router.bound.function, "linear")
            and parts.router.dtype is FLOAT32
            and any(is_declared(routing.kernel, op) for op in _ROUTINGS)
            and routing.scoring in SCORINGS
            and type(parts.experts) is NativeExperts
            and (shared is None or _is_fused_mlp(shared))
            # torch's sigmoid of float32 differs from the library's in the last bit.
            and (gate is None or (type(gate) is Linear and dtype is not FLOAT32))
        )
        return cls(layer, parts, routing) if is_supported else None

    def __reduce__(self) -> tuple[type[MoEHalf], tuple[nn.Module, MoEParts, Routing]]:
        """Rebuild the object from the copied parts when a layer is copied."""
        return MoEHalf, (self.layer, self.parts, self.routing)

    def address(self) -> int | None:
        """Return the address of an interposer_moe_weights; None if the layer must be called."""
        if not self._hooks.is_empty() or any("forward" in d for d in self._instances):
            return None
        experts: Any = self.parts.experts
        weights: ExpertWeights | None = experts.weights()
        kernels = [projection.kernel for projection in self._projections]
        quantizations = self._quantizations.of(*kernels)
        if weights is None or None in quantizations:
            return None
        router: Any = self.parts.router
        bias = router.prepared_bias
        values = (
            router.operands[0][0].data_ptr(),
            0 if bias is None else bias.data_ptr(),
            weights.owner.data_ptr(),
            weights[1:],
            *map(_factor_words, self._projections, quantizations),
        )
        if values != self._bound[0]:
            self._bound = values, self._bind(*values)
        return self._bound[1].buffer_info()[0]

    def _bind(
        self, router: int, bias: int, experts: int, form: Any, *factors: tuple[int, ...]
    ) -> array[int]:
        """Build the C struct interposer_moe_weights from addresses and constants.

        Args:
            form: the fields of ``ExpertWeights`` after the owner.
            factors: words of the projections of the shared expert and its gate.
        """
        is_mixture, activation, fields = form
        shared: Any = self.parts.shared
        if shared is None:
            factors = (_NO_FACTOR, _NO_FACTOR)
        gate_up, down, gate = (*factors, _NO_FACTOR)[:3]
        routing = self.routing
        return array(
            "q",
            (
                router,
                bias,
                SCORINGS[routing.scoring],
                routing.renormalize,
                routing.num_groups,
                routing.top_groups,
                routing.top_k,
                float64_bits(routing.scale),
                experts if is_mixture else 0,
                0 if is_mixture else experts,
                *fields,
                activation,
                *gate_up,
                *down,
                0 if shared is None else shared.activation_number,
                *gate,
            ),
        )


def _is_fused_mlp(layer: Any) -> bool:
    """Check whether the library can compute a shared expert without an all-reduce."""
    return type(layer) is NativeGatedMLP and layer.is_fusable and type(layer.down_proj) is Linear


def _factor_words(projection: Linear, inputs: InputQuantization) -> tuple[int, ...]:
    """List the words of an interposer_factor: weight, input quantization and static scale."""
    operands = projection.operands
    scale = operands[-1].data_ptr() if inputs.is_static else 0
    return operands[0][0].data_ptr(), *inputs.fields, scale
