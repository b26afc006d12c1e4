"""Scheme of GPTQ checkpoints, as written by AutoGPTQ, GPTQModel, optimum and others.

Dimensions: I input features, O output features, G groups, P fused layers.

Source: the tensor layouts are those of AutoGPTQ 0.7 (``gptq``) and GPTQModel 5 (``gptq_v2``).
"""

from __future__ import annotations

import torch
from torch import nn

from interposer import ExpertsMethod, ExpertsSpec, LinearMethod, Site
from interposer.errors import CheckpointError
from interposer_quantization._experts.packed import packed_experts
from interposer_quantization._gptq.config import Settings, Weights
from interposer_quantization._scheme import HeadScheme
from interposer_quantization._weights.input_groups import check_groups
from interposer_quantization._weights.int_packing import pack_int32, unpack_int32
from interposer_quantization._weights.packed_linear import PackedLinear, register_stored

_MEND = "quantize all of these layers with the same settings, or none of them"
# An int32 in which every packed value is 1, by bits.
_ONES = {4: 0x11111111, 8: 0x01010101}


class GPTQ(HeadScheme):
    """Scheme of 4-bit or 8-bit weights with groups in any order, with or without zero points."""

    method = "gptq"
    settings_class = Settings
    settings: Settings
    mend = _MEND

    def _method(self, stored: Weights) -> LinearMethod:
        return GPTQLinear(stored)

    def _fused_experts_method(
        self, stored: Weights, site: Site, spec: ExpertsSpec
    ) -> ExpertsMethod | None:
        return gptq_experts(stored)


class GPTQLinear(PackedLinear):
    """Linear method for ``qweight`` ``[I * bits / 32, O]``, packed along inputs, and ``g_idx``.

    ``qzeros`` is ``[G, O * bits / 32]``, ``scales`` ``[G, O]``. Fused layers share one input, so
    all must have the same ``g_idx``.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights.bits, weights.inputs_per_scale, weights.symmetric)
        self.weights = weights
        self._less = _ONES[weights.bits] if weights.zeros_minus_one else 0
        # Some writers declare the first format but store the second. Symmetric weights have only
        # one possible zero point, so the midpoint of either format is accepted.
        self.middles = (self.middle, self.middle + (1 if weights.zeros_minus_one else -1))

    def packed_weight_shape(self, in_features: int, out_features: int) -> tuple[int, int, int]:
        """Return the two sizes of ``qweight`` and the output dimension."""
        return in_features // self.values_per_word, out_features, 1

    def unpack_weight(self, qweight: torch.Tensor) -> torch.Tensor:
        """Unpack ``qweight`` to quantized values ``[O, I]`` uint8."""
        return unpack_int32(qweight.T.contiguous(), self.bits)

    def unpack_zero_points(self, qzeros: torch.Tensor) -> torch.Tensor:
        """Unpack ``qzeros`` to zero points ``[G, O]`` uint8; the v1 format stores each minus 1.

        GPTQModel subtracts 0x111... from each packed int32, so a zero point of 0 borrows from its
        neighbour. Adding the constant to the packed int32 undoes the borrow. Other writers either
        have no zero point of 0 or corrupt that int32.
        """
        return unpack_int32(qzeros + self._less, self.bits)

    def pack_zero_points(self, zero_points: torch.Tensor) -> torch.Tensor:
        """Pack zero points ``[G, O]`` uint8 into ``qzeros``."""
        return pack_int32(zero_points, self.bits) - self._less

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``g_idx`` ``[P * I]`` and the tensors of ``PackedLinear``."""
        super().create_weights(layer, site, in_features, out_features, bias)
        size, num_parts = in_features // self.num_groups, len(self.parts)

        def groups_of(order: torch.Tensor) -> torch.Tensor:
            return (order // size).to(torch.int32).repeat(num_parts)

        def in_order() -> torch.Tensor:
            return groups_of(torch.arange(in_features))

        def sample(generator: torch.Generator) -> torch.Tensor:
            if self.weights.ordered is False:
                return groups_of(torch.randperm(in_features, generator=generator))
            return in_order()

        empty = torch.empty(num_parts * in_features, dtype=torch.int32)
        # Some writers omit g_idx if groups are consecutive; one group of all inputs always is.
        can_be_omitted = self.weights.ordered or self.num_groups == 1
        default = {"default": in_order} if can_be_omitted else {}
        attributes = {"num_groups": self.num_groups, "sample": sample, **default}
        register_stored(layer, "g_idx", empty, per_part=True, **attributes)

    def groups(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the group of each input ``[I]`` int64, or None if groups are consecutive.

        Raises: CheckpointError: groups differ in size or between fused layers, or they are not
            consecutive although ``desc_act`` is false.
        """
        by_part = layer.get_parameter("g_idx").view(len(self.parts), -1)
        first, size = by_part[0].long(), by_part.shape[1] // self.num_groups
        names = self.tensor_names("g_idx")
        for name, groups in zip(names, by_part, strict=True):
            check_groups(name, groups, self.num_groups)
        for name, groups in zip(names, by_part, strict=True):
            if not torch.equal(groups, by_part[0]):
                raise CheckpointError(
                    name,
                    f"differs from {names[0]}, but {self.prefix} fuses {', '.join(self.parts)}, "
                    "which share one input and must have the same groups",
                    "quantize these layers with the same groups, or with desc_act=False",
                )
        ordered = torch.arange(len(first), device=first.device) // size
        # With consecutive groups, the kernel needs no permutation of its inputs.
        if torch.equal(first, ordered):
            return None
        if self.weights.ordered:
            raise CheckpointError(
                names[0],
                "holds groups that don't follow each other, though desc_act is false",
                "set desc_act to true in quantization_config if the groups are right",
            )
        return first


def gptq_experts(weights: Weights, indexed: bool = True) -> ExpertsMethod | None:
    """Return the fused-op method for experts in this storage format, or None."""
    # The fused op cannot permute the inputs of each expert.
    if weights.ordered is False:
        return None
    return packed_experts(GPTQLinear(weights), indexed)
