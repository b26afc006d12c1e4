"""Checkpoints of AWQ: those of AutoAWQ and others that write its ``gemm`` layout.

Dimensions: I input features, O output features, G groups.

Source: the layout is that of AutoAWQ 0.2, ``WQLinear_GEMM``; the method is arXiv:2306.00978.
"""

from __future__ import annotations

import torch

from interposer import ExpertsMethod, ExpertsSpec, LinearMethod, Site
from interposer_quantization._awq.config import Settings, Weights
from interposer_quantization._experts.packed import packed_experts
from interposer_quantization._scheme import HeadScheme
from interposer_quantization._weights.int_packing import AWQ_ORDER, pack_words, unpack_words
from interposer_quantization._weights.packed_linear import PackedLinear

_BITS = 4
_MEND = "name all of them in 'modules_to_not_convert', or none"


class AWQ(HeadScheme):
    """Codes of 4 bits, one scale and zero point per group of inputs."""

    method = "awq"
    settings_class = Settings
    settings: Settings
    mend = _MEND

    def _method(self, stored: Weights) -> LinearMethod:
        """Return the method for linear layers that are stored so."""
        return AWQLinear(stored)

    def _experts_at_once(
        self, stored: Weights, site: Site, spec: ExpertsSpec
    ) -> ExpertsMethod | None:
        return awq_experts(stored)


class AWQLinear(PackedLinear):
    """``qweight`` ``[I, O / 8]`` and ``qzeros`` ``[G, O / 8]``, words along outputs."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(_BITS, weights.inputs_per_scale, weights.symmetric)

    def weight_words(self, in_features: int, out_features: int) -> tuple[int, int, int]:
        """Return the shape of ``qweight`` and the dimension along which outputs lie."""
        return in_features, out_features // self.codes_per_word, 1

    def weight_codes(self, qweight: torch.Tensor) -> torch.Tensor:
        """Return the codes ``[O, I]`` uint8."""
        return unpack_words(qweight, _BITS, AWQ_ORDER).T.contiguous()

    def zero_codes(self, qzeros: torch.Tensor) -> torch.Tensor:
        """Return the zero points ``[G, O]`` uint8."""
        return unpack_words(qzeros, _BITS, AWQ_ORDER)

    def zero_words(self, zero_points: torch.Tensor) -> torch.Tensor:
        """Return ``qzeros`` that holds these zero points."""
        return pack_words(zero_points, _BITS, AWQ_ORDER)


def awq_experts(weights: Weights) -> ExpertsMethod | None:
    """Return the method for experts of which all matrices are stored so, None without an op."""
    return packed_experts(AWQLinear(weights), False)
