"""Scheme of AWQ checkpoints in the ``gemm`` layout of AutoAWQ.

Dimensions: I input features, O output features, G groups.

Source: the layout is that of AutoAWQ 0.2, ``WQLinear_GEMM``; the method is arXiv:2306.00978.
"""

from __future__ import annotations

import torch

from interposer import ExpertsMethod, ExpertsSpec, LinearMethod, Site
from interposer_quantization._awq.config import Settings, Weights
from interposer_quantization._experts.packed import packed_experts
from interposer_quantization._scheme import HeadScheme
from interposer_quantization._weights.int_packing import AWQ_ORDER, pack_int32, unpack_int32
from interposer_quantization._weights.packed_linear import PackedLinear

_BITS = 4
_MEND = "name all of them in 'modules_to_not_convert', or none"


class AWQ(HeadScheme):
    """Scheme of 4-bit weights with one scale and zero point per group of inputs."""

    method = "awq"
    settings_class = Settings
    settings: Settings
    mend = _MEND

    def _method(self, stored: Weights) -> LinearMethod:
        return AWQLinear(stored)

    def _fused_experts_method(
        self, stored: Weights, site: Site, spec: ExpertsSpec
    ) -> ExpertsMethod | None:
        return awq_experts(stored)


class AWQLinear(PackedLinear):
    """Linear method for ``qweight`` ``[I, O / 8]`` and ``qzeros`` ``[G, O / 8]``."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(_BITS, weights.inputs_per_scale, weights.symmetric)

    def packed_weight_shape(self, in_features: int, out_features: int) -> tuple[int, int, int]:
        """Return the two sizes of ``qweight`` and the output dimension."""
        return in_features, out_features // self.values_per_word, 1

    def unpack_weight(self, qweight: torch.Tensor) -> torch.Tensor:
        """Unpack ``qweight`` to quantized values ``[O, I]`` uint8."""
        # AWQ stores [I, O]; kernels take [O, I].
        return unpack_int32(qweight, _BITS, AWQ_ORDER).T.contiguous()

    def unpack_zero_points(self, qzeros: torch.Tensor) -> torch.Tensor:
        """Unpack ``qzeros`` to zero points ``[G, O]`` uint8."""
        return unpack_int32(qzeros, _BITS, AWQ_ORDER)

    def pack_zero_points(self, zero_points: torch.Tensor) -> torch.Tensor:
        """Pack zero points ``[G, O]`` uint8 into ``qzeros``."""
        return pack_int32(zero_points, _BITS, AWQ_ORDER)


def awq_experts(weights: Weights) -> ExpertsMethod | None:
    """Return the fused-op method for experts in this storage format, or None."""
    return packed_experts(AWQLinear(weights), False)
