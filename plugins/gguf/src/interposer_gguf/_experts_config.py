"""Fields of config.json and tensor names that MoE architectures share."""

from __future__ import annotations

from typing import Any

from interposer.errors import UnsupportedModelError
from interposer_gguf._metadata import MetadataReader

SOFTMAX, SIGMOID = 1, 2
"""Values of ``expert_gating_func``."""

EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""Modules of an MoE block by the names in the file: router and routed experts."""
SHARED = {
    **EXPERTS,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
"""Modules of an MoE block with shared experts."""
BALANCED = {**SHARED, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
"""Modules of an MoE block with shared experts and a bias on the router's scores."""


def experts_of(metadata: MetadataReader, scaled: bool = False) -> dict[str, Any]:
    """Return the config fields that all MoE families have.

    Args:
        scaled: the family multiplies the weights of the chosen experts by a scale.
    """
    scale = metadata.number("expert_weights_scale", 1.0)
    # Some converters write 0 for a model without a scale.
    if not scaled and scale not in (0.0, 1.0):
        raise UnsupportedModelError(
            metadata.path, f"has expert_weights_scale {scale}, which its family does not support"
        )
    return {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }


def small_experts_of(metadata: MetadataReader) -> dict[str, Any]:
    """Return the config fields of MoE families with an own expert intermediate size."""
    size = metadata.integer("expert_feed_forward_length")
    return {**experts_of(metadata), "moe_intermediate_size": size}


def grouped_experts_of(metadata: MetadataReader) -> dict[str, Any]:
    """Return the config fields of MoE families whose routers choose groups of experts first."""
    return {
        **experts_of(metadata, scaled=True),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "n_shared_experts": metadata.integer("expert_shared_count", 0),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0) or 1.0,
    }


def scores_by_sigmoid(
    metadata: MetadataReader, default: int, alternative: int | None = None
) -> bool:
    """Return whether the router uses sigmoid rather than the function ``alternative``.

    Raises: UnsupportedModelError: the router uses a third function.
    """
    number = metadata.integer("expert_gating_func", default) or default
    if number not in (SIGMOID, alternative):
        raise UnsupportedModelError(
            metadata.path, f"has expert_gating_func {number}, which its family does not support"
        )
    return number == SIGMOID
