"""Ops of MoE layers: routing, permutation of tokens, and the expert MLPs.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.experts._expert_permutation import (
        moe_permute,
        moe_unpermute,
    )
    from interposer_ops.experts._experts import (
        SWIGLU_ALPHA,
        SWIGLU_LIMIT,
        activated,
        fused_experts,
        fused_experts_fp8,
        fused_experts_mxfp4,
        fused_experts_w4a16,
    )
    from interposer_ops.experts._routing import grouped_topk, topk_sigmoid, topk_softmax
    from interposer_ops.experts._sequential_experts import (
        fused_experts_in_turn,
        fused_experts_mxfp4_in_turn,
    )

# fmt: off
__all__ = [
    "SWIGLU_ALPHA", "SWIGLU_LIMIT", "activated", "fused_experts", "fused_experts_fp8",
    "fused_experts_in_turn", "fused_experts_mxfp4", "fused_experts_mxfp4_in_turn",
    "fused_experts_w4a16", "grouped_topk", "moe_permute", "moe_unpermute", "topk_sigmoid",
    "topk_softmax",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops.experts._expert_permutation": "moe_permute moe_unpermute",
        "interposer_ops.experts._experts": (
            "SWIGLU_ALPHA SWIGLU_LIMIT activated fused_experts fused_experts_fp8 "
            "fused_experts_mxfp4 fused_experts_w4a16"
        ),
        "interposer_ops.experts._routing": "grouped_topk topk_sigmoid topk_softmax",
        "interposer_ops.experts._sequential_experts": (
            "fused_experts_in_turn fused_experts_mxfp4_in_turn"
        ),
    },
)


def __dir__() -> list[str]:
    return __all__
