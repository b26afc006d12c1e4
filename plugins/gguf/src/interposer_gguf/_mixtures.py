"""The architectures with experts that are read.

In a file, the matrices of a layer's experts are three tensors ``[E, outputs, inputs]``.

Source: the tables of gguf-py (gguf/constants.py), the conversions of llama.cpp and its graphs,
which say what the metadata leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer.errors import UnsupportedModelError
from interposer_gguf._architecture import Architecture
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._settings import Settings


def _experts(settings: Settings, scaled: bool = False) -> dict[str, Any]:
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


def _small(settings: Settings) -> dict[str, Any]:
    """Return the same of experts whose size is not that of an MLP."""
    size = settings.integer("expert_feed_forward_length")
    return {**_experts(settings), "moe_intermediate_size": size}


def _qwen3(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return Qwen3's fields; all its weights are renormalized, as llama.cpp computes them."""
    return {**_small(settings), "norm_topk_prob": True}


_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}

MIXTRAL = Architecture(
    "MixtralForCausalLM",
    _MIXTRAL,
    permuted=True,
    fields=lambda settings, file: _experts(settings),
    mixture=True,
)
"""What ``llama`` stands for in files with experts."""

MIXTURES: Mapping[str, Architecture] = {
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _NAMES, fields=_qwen3, mixture=True),
}
"""By the values of ``general.architecture``."""
