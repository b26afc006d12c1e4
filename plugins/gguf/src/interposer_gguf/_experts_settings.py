"""Fields and names that architectures with experts have in common."""

from __future__ import annotations

from typing import Any

from interposer.errors import UnsupportedModelError
from interposer_gguf._settings import Settings

SOFTMAX, SIGMOID = 1, 2
"""Numbers of ``expert_gating_func``."""

EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""Modules of a block by the names in the file: a router, and the matrices of each expert."""
SHARED = {
    **EXPERTS,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
"""The same with experts that every token visits."""
BALANCED = {**SHARED, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
"""The same with a bias of the scores by which experts are chosen."""


def experts_of(settings: Settings, scaled: bool = False) -> dict[str, Any]:
    """Return the fields of config.json that every family with experts has.

    Args:
        scaled: the family multiplies the weights of the chosen experts by a number.
    """
    scale = settings.number("expert_weights_scale", 1.0)
    # Some conversions write 0 where there is none.
    if not scaled and scale not in (0.0, 1.0):
        raise UnsupportedModelError(
            settings.path, f"has expert_weights_scale {scale}, which its family has not"
        )
    return {
        "num_local_experts": settings.integer("expert_count"),
        "num_experts_per_tok": settings.integer("expert_used_count"),
    }


def small_experts_of(settings: Settings) -> dict[str, Any]:
    """Return the same of experts whose size is not that of an MLP."""
    size = settings.integer("expert_feed_forward_length")
    return {**experts_of(settings), "moe_intermediate_size": size}


def grouped_experts_of(settings: Settings) -> dict[str, Any]:
    """Return the fields of families whose experts are in groups."""
    return {
        **experts_of(settings, scaled=True),
        "moe_intermediate_size": settings.integer("expert_feed_forward_length"),
        "n_shared_experts": settings.integer("expert_shared_count", 0),
        "first_k_dense_replace": settings.integer("leading_dense_block_count", 0),
        "n_group": settings.integer("expert_group_count", 1),
        "topk_group": settings.integer("expert_group_used_count", 1),
        "norm_topk_prob": settings.flag("expert_weights_norm", False),
        "routed_scaling_factor": settings.number("expert_weights_scale", 1.0) or 1.0,
    }


def scores_by_sigmoid(settings: Settings, default: int, other: int | None = None) -> bool:
    """Say whether the scores of experts are sigmoids.

    Raises: UnsupportedModelError: they are neither that nor what the number ``other`` stands for.
    """
    number = settings.integer("expert_gating_func", default) or default
    if number not in (SIGMOID, other):
        raise UnsupportedModelError(
            settings.path, f"has expert_gating_func {number}, which its family has not"
        )
    return number == SIGMOID
