"""Normalisation ops: RMSNorm, layer norm and L2 norm, of rows, groups or heads.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.norms._head_norms import gated_rms_norm, l2_norm, qk_norm
    from interposer_ops.norms._norms import (
        fused_add_gemma_rms_norm,
        fused_add_rms_norm,
        fused_add_rms_norm_quantize_fp8,
        gemma_rms_norm,
        layer_norm,
        rms_norm,
        rms_norm_quantize_fp8,
    )

# fmt: off
__all__ = [
    "fused_add_gemma_rms_norm", "fused_add_rms_norm", "fused_add_rms_norm_quantize_fp8",
    "gated_rms_norm", "gemma_rms_norm", "l2_norm", "layer_norm", "qk_norm", "rms_norm",
    "rms_norm_quantize_fp8",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops.norms._head_norms": "gated_rms_norm l2_norm qk_norm",
        "interposer_ops.norms._norms": (
            "fused_add_gemma_rms_norm fused_add_rms_norm fused_add_rms_norm_quantize_fp8 "
            "gemma_rms_norm layer_norm rms_norm rms_norm_quantize_fp8"
        ),
    },
)


def __dir__() -> list[str]:
    return __all__
