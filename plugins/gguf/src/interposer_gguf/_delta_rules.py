"""Architectures of Qwen with gated delta rules, and with attention in every fourth layer.

In files of Qwen3.5 the value heads are in another order than in checkpoints: adjacent value heads
belong to different key heads.

Shapes: G key heads, R value heads per key head.

Source: conversions of llama.cpp, and graphs of llama.cpp for values that the metadata lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from interposer.errors import CheckpointError
from interposer_gguf._architecture import Architecture
from interposer_gguf._conversions import (
    CHANNELS,
    DECAY,
    GROUPED_CHANNELS,
    GROUPED_COLUMNS,
    GROUPED_DECAY,
    GROUPED_LAST,
    GROUPED_ROWS,
    RowSplit,
)
from interposer_gguf._experts_config import EXPERTS, small_experts_of
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._metadata import MetadataReader


def _delta(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    count = metadata.integer("block_count") - metadata.integer("nextn_predict_layers", 0)
    heads, groups = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.group_count")
    width, key, interval = metadata.integer("ssm.inner_size"), "attention.recurrent_layers", 4
    if heads < 1 or groups < 1 or heads % groups or width % heads:
        raise CheckpointError(
            metadata.path,
            f"has ssm.inner_size {width}, ssm.time_step_rank {heads} and ssm.group_count {groups}, "
            "each must be a multiple of the next",
        )
    if metadata.is_list(key):
        recurrent = metadata.per_layer(key, bool, count)
    else:
        interval = max(metadata.integer("full_attention_interval", interval), 1)
        recurrent = [(index + 1) % interval > 0 for index in range(count)]
    kinds = ("full_attention", "linear_attention")
    return {
        "layer_types": [kinds[is_recurrent] for is_recurrent in recurrent],
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": width // heads,
        "linear_num_key_heads": groups,
        "linear_num_value_heads": heads,
    }


def _delta_experts(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of the MoE models; router weights are renormalized."""
    return {
        **_delta(metadata, file),
        **small_experts_of(metadata),
        "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
    }


def _beta_and_decay(rows: torch.Tensor, config: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Split rows grouped by key head into the beta rows and the decay rows of all value heads."""
    groups = int(config["linear_num_key_heads"])
    beta, decay = rows.unflatten(0, (groups, 2, -1)).unbind(1)
    return beta.flatten(0, 1), decay.flatten(0, 1)


def _mixed_and_gate(rows: torch.Tensor, config: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Split rows grouped by key head into QKV rows and gate rows."""
    groups, key = int(config["linear_num_key_heads"]), int(config["linear_key_head_dim"])
    values = int(config["linear_num_value_heads"]) // groups * int(config["linear_value_head_dim"])
    parts = rows.unflatten(0, (groups, -1)).split((key, key, values, values), 1)
    *query_key_value, gate = (part.flatten(0, 1) for part in parts)
    return torch.cat(query_key_value), gate


_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_EXPERTS = {
    **_NAMES,
    **EXPERTS,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GROUPED = {
    "attn_qkv.weight": GROUPED_LAST,
    "attn_gate.weight": GROUPED_ROWS,
    "ssm_alpha.weight": GROUPED_ROWS,
    "ssm_beta.weight": GROUPED_ROWS,
    "ssm_dt.bias": GROUPED_ROWS,
    "ssm_a": GROUPED_DECAY,
    "ssm_conv1d.weight": GROUPED_CHANNELS,
    "ssm_out.weight": GROUPED_COLUMNS,
}
_NORMS: dict[str, Any] = {"norm_offset": 1.0, "norms_without_offset": ("linear_attn.norm.weight",)}
_ROWS = ("mlp.shared_expert_gate.weight",)

DELTA_RULES: Mapping[str, Architecture] = {
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM", _NAMES, fields=_delta, conversions=_GROUPED, **_NORMS
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        _EXPERTS,
        fields=_delta_experts,
        has_experts=True,
        conversions=_GROUPED,
        row_vectors=_ROWS,
        **_NORMS,
    ),
    # Files split the projections that checkpoints of Qwen3-Next fuse. Checkpoints of Qwen3.5 split
    # these projections, too, so a file loads as the family of Qwen3.5.
    "qwen3next": Architecture(
        "Qwen3_5MoeForCausalLM",
        _EXPERTS,
        fields=_delta_experts,
        has_experts=True,
        conversions={"ssm_a": DECAY, "ssm_conv1d.weight": CHANNELS},
        splits={
            "ssm_ba.weight": RowSplit(
                ("linear_attn.in_proj_b", "linear_attn.in_proj_a"), _beta_and_decay
            ),
            "ssm_in.weight": RowSplit(
                ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"), _mixed_and_gate
            ),
        },
        row_vectors=_ROWS,
        **_NORMS,
    ),
}
"""By the values of ``general.architecture``."""
