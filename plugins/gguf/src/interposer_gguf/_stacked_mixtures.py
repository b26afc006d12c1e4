"""The architectures whose checkpoints store the matrices of all experts together.

In a file, gates and what they act on are tensors of their own.

Source: the conversions of llama.cpp and its graphs, which say what the metadata leaves out.

Dimensions: E experts, I intermediate size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from interposer.errors import UnsupportedModelError
from interposer_gguf._architecture import Architecture, multiplied
from interposer_gguf._entries import in_turn
from interposer_gguf._experts_settings import experts_of
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._positions import layer_types_of, rope_of, rotated_of
from interposer_gguf._restoration import INPUTS_FIRST
from interposer_gguf._settings import Settings

_LARGEST_LLAMA = 128
_CHUNK = 8192


def _granite(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    return {**multiplied(settings, file), **experts_of(settings)}


def _gpt_oss(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return the fields of gpt-oss; where its long angles begin is not rounded, as published."""
    rope = rope_of(file, settings, rotated_of(settings))
    return {
        **experts_of(settings),
        "intermediate_size": settings.integer("expert_feed_forward_length"),
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
        **layer_types_of(settings),
    }


def _llama4(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return the fields of Llama 4; queries and keys are normed but in the one of 128 experts."""
    if "attention.sliding_window" in settings:
        raise UnsupportedModelError(
            settings.path, "has attention.sliding_window, which Llama 4 has not: it has chunks"
        )
    return {
        **experts_of(settings),
        "intermediate_size": settings.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": settings.integer("feed_forward_length"),
        "interleave_moe_layer_step": settings.integer("interleave_moe_layer_step"),
        "attention_chunk_size": _CHUNK,
        "use_qk_norm": settings.integer("expert_count") != _LARGEST_LLAMA,
    }


def _gates_first(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.cat((gate, up), 1)


def _turns(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``[E, H, 2 I]``, or biases ``[E, 2 I]``: a gate, then what it acts on."""
    both = in_turn(gate, up)
    return both.mT.contiguous() if both.ndim > 2 else both


def _halves(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``[E, H, 2 I]``, gates first."""
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
_DOWN = {"ffn_down_exps.weight": INPUTS_FIRST}

STACKED: Mapping[str, Architecture] = {
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM",
        _GRANITE,
        permuted=True,
        fields=_granite,
        mixture=True,
        joined={"ffn_gate_exps.weight": ("ffn_up_exps.weight", _gates_first)},
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        _GPT_OSS,
        fields=_gpt_oss,
        mixture=True,
        joined={
            "ffn_gate_exps.weight": ("ffn_up_exps.weight", _turns),
            "ffn_gate_exps.bias": ("ffn_up_exps.bias", _turns),
        },
        restored=_DOWN,
        alternating="mlp.experts",
    ),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        _LLAMA4,
        fields=_llama4,
        mixture=True,
        joined={"ffn_gate_exps.weight": ("ffn_up_exps.weight", _halves)},
        restored=_DOWN,
    ),
}
"""By the values of ``general.architecture``."""
