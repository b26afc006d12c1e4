"""Checkpoints of GPTQ: those of AutoGPTQ, GPTQModel, optimum and others that write their format.

Dimensions: I input features, O output features, G groups, P layers that are fused.

Source: the layout and the meaning of every tensor are those of AutoGPTQ 0.7 (``gptq``) and
GPTQModel 5 (``gptq_v2``).
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
from interposer_quantization._weights.int_packing import pack_words, unpack_words
from interposer_quantization._weights.packed_linear import PackedLinear, register_stored

_MEND = "quantize them alike, or none of them"
# A one in each code of a word, by bits.
_ONES = {4: 0x11111111, 8: 0x01010101}


class GPTQ(HeadScheme):
    """Codes of 4 or 8 bits, groups of inputs in any order, zero points or none."""

    method = "gptq"
    settings_class = Settings
    settings: Settings
    mend = _MEND

    def _method(self, stored: Weights) -> LinearMethod:
        """Return the method for linear layers that are stored so."""
        return GPTQLinear(stored)

    def _experts_at_once(
        self, stored: Weights, site: Site, spec: ExpertsSpec
    ) -> ExpertsMethod | None:
        return gptq_experts(stored)


class GPTQLinear(PackedLinear):
    """``qweight`` ``[I * bits / 32, O]``, words along inputs, and ``g_idx``, the inputs' groups.

    ``qzeros`` is ``[G, O * bits / 32]``, ``scales`` ``[G, O]``. Layers that are fused share their
    input, so the groups of its features must be the same ones.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights.bits, weights.inputs_per_scale, weights.symmetric)
        self.weights = weights
        self._less = _ONES[weights.bits] if weights.less_one else 0
        # Some writers name the first format and store the second. Where all weights are symmetric
        # there is no doubt about what is meant, so the other one's middle is taken as well.
        self.middles = (self.middle, self.middle + (1 if weights.less_one else -1))

    def weight_words(self, in_features: int, out_features: int) -> tuple[int, int, int]:
        """Return the shape of ``qweight`` and the dimension along which outputs lie."""
        return in_features // self.codes_per_word, out_features, 1

    def weight_codes(self, qweight: torch.Tensor) -> torch.Tensor:
        """Return the codes ``[O, I]`` uint8."""
        return unpack_words(qweight.T.contiguous(), self.bits)

    def zero_codes(self, qzeros: torch.Tensor) -> torch.Tensor:
        """Return the zero points ``[G, O]`` uint8; the first format stores them less one.

        GPTQModel takes the ones from whole words, and a code of 0 borrows from the next one: whole
        words give them back. Other writers have no zero point of 0, or spoil its word.
        """
        return unpack_words(qzeros + self._less, self.bits)

    def zero_words(self, zero_points: torch.Tensor) -> torch.Tensor:
        """Return ``qzeros`` that holds these zero points."""
        return pack_words(zero_points, self.bits) - self._less

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``g_idx`` ``[P * I]`` besides what every such layer has."""
        super().create_weights(layer, site, in_features, out_features, bias)
        size, num_parts = in_features // self.num_groups, len(self.parts)

        def grouped(order: torch.Tensor) -> torch.Tensor:
            return (order // size).to(torch.int32).repeat(num_parts)

        def in_order() -> torch.Tensor:
            return grouped(torch.arange(in_features))

        def sample(generator: torch.Generator) -> torch.Tensor:
            if self.weights.ordered is False:
                return grouped(torch.randperm(in_features, generator=generator))
            return in_order()

        empty = torch.empty(num_parts * in_features, dtype=torch.int32)
        # Some writers leave it out where groups follow each other, as a group of all inputs does.
        in_any_case = self.weights.ordered or self.num_groups == 1
        default = {"default": in_order} if in_any_case else {}
        numbered = {"num_groups": self.num_groups, "sample": sample, **default}
        register_stored(layer, "g_idx", empty, per_part=True, **numbered)

    def groups(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the group of each input ``[I]`` int64, or None where groups follow each other.

        Raises: CheckpointError: groups are not of one size, those of fused layers differ, or they
            don't follow each other though ``desc_act`` is false.
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
                    f"differs from {names[0]}, but {self.prefix} computes {', '.join(self.parts)} "
                    "as one product, whose input has one order",
                    "quantize these layers together, so that they share an order, or with "
                    "desc_act=False",
                )
        ordered = torch.arange(len(first), device=first.device) // size
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
    """Return the method for experts of which all matrices are stored so, None without an op."""
    if weights.ordered is False:
        return None
    return packed_experts(GPTQLinear(weights), indexed)
