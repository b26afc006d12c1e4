"""MoE architectures whose checkpoints stack the matrices of all experts.

In a file, gate and up projections are separate tensors.

Source: conversions of llama.cpp, and graphs of llama.cpp for values that the metadata lacks.

Shapes: E experts, I intermediate size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from interposer.errors import UnsupportedModelError
from interposer_gguf._architecture import Architecture, granite_multipliers
from interposer_gguf._conversions import INPUTS_FIRST
from interposer_gguf._entries import interleave_rows
from interposer_gguf._experts_config import experts_of
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._metadata import MetadataReader
from interposer_gguf._positions import layer_types_of, rope_of, rotated_of

# The file has neither the chunk size nor the use of QK norm. Both are as published.
_MAVERICK_EXPERTS = 128
_CHUNK = 8192


def _granite(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    return {**granite_multipliers(metadata, file), **experts_of(metadata)}


def _gpt_oss(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of gpt-oss, with a YaRN correction range that is not rounded."""
    rope = rope_of(file, metadata, rotated_of(metadata))
    return {
        **experts_of(metadata),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
        **layer_types_of(metadata),
    }


def _llama4(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of Llama 4; only the model of 128 experts has no QK norm."""
    if "attention.sliding_window" in metadata:
        raise UnsupportedModelError(
            metadata.path, "has attention.sliding_window, but Llama 4 has attention chunks instead"
        )
    return {
        **experts_of(metadata),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": metadata.integer("feed_forward_length"),
        "interleave_moe_layer_step": metadata.integer("interleave_moe_layer_step"),
        "attention_chunk_size": _CHUNK,
        "use_qk_norm": metadata.integer("expert_count") != _MAVERICK_EXPERTS,
    }


def _concatenate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.cat((gate, up), 1)


def _interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Interleave gates and ups to ``[E, H, 2 I]``, or to biases ``[E, 2 I]``."""
    # Checkpoints store matrices transposed, unlike biases.
    rows = interleave_rows(gate, up)
    return rows.mT.contiguous() if rows.ndim > 2 else rows


def _concatenate_transposed(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Concatenate gates and ups to ``[E, H, 2 I]``, gates first."""
    return torch.cat((gate, up), 1).mT.contiguous()


_GRANITE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.input_linear",
    "ffn_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}

_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_LLAMA4 = {
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_exps.weight": "feed_forward.experts.gate_up_proj",
    "ffn_up_exps.weight": "feed_forward.experts.gate_up_proj",
    "ffn_down_exps.weight": "feed_forward.experts.down_proj",
    "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
    "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
    "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
}
# Down projections are transposed in checkpoints, like the joined gates and ups.
_DOWN = {"ffn_down_exps.weight": INPUTS_FIRST}

STACKED: Mapping[str, Architecture] = {
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM",
        _GRANITE,
        permuted=True,
        fields=_granite,
        has_experts=True,
        joins={"ffn_gate_exps.weight": ("ffn_up_exps.weight", _concatenate)},
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        _GPT_OSS,
        fields=_gpt_oss,
        has_experts=True,
        joins={
            "ffn_gate_exps.weight": ("ffn_up_exps.weight", _interleave),
            "ffn_gate_exps.bias": ("ffn_up_exps.bias", _interleave),
        },
        conversions=_DOWN,
        interleaved_experts="mlp.experts",
    ),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        _LLAMA4,
        fields=_llama4,
        has_experts=True,
        joins={"ffn_gate_exps.weight": ("ffn_up_exps.weight", _concatenate_transposed)},
        conversions=_DOWN,
    ),
}
"""By the values of ``general.architecture``."""
