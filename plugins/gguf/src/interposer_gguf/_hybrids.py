"""Architectures with recurrent layers: state spaces and convolutions, some with attention.

Source: tables of gguf-py (gguf/constants.py), conversions of llama.cpp, and graphs of llama.cpp for
values that the metadata lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer.errors import CheckpointError, UnsupportedModelError
from interposer_gguf._architecture import LAYER_EPSILON, RMS_EPSILON, Architecture
from interposer_gguf._conversions import CHANNELS, DECAY, VECTOR
from interposer_gguf._experts_config import grouped_experts_of
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._metadata import MetadataReader


def _heads(metadata: MetadataReader) -> tuple[int, int]:
    """Return the number of state-space heads, and the size of a head.

    Raises: CheckpointError: the heads do not divide the width.
    """
    heads, width = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    if heads < 1 or width % heads:
        raise CheckpointError(
            metadata.path, f"has ssm.inner_size {width}, not a multiple of its {heads} heads"
        )
    return heads, width // heads


def _has_tensor(file: GGUFFile, name: str) -> bool:
    return any(stored.endswith(f".{name}") for stored in file.tensors)


def _has_attention(metadata: MetadataReader) -> list[bool]:
    """Return one boolean per layer: whether the layer has kv heads, and so attention."""
    # MTP blocks, which come last, are not loaded.
    count = metadata.integer("block_count") - metadata.integer("nextn_predict_layers", 0)
    return [heads > 0 for heads in metadata.per_layer("attention.head_count_kv", int, count)]


def _mamba2(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    (heads, size), width = _heads(metadata), metadata.integer("embedding_length")
    return {
        "num_attention_heads": heads,
        "head_dim": size,
        "expand": heads * size // width,
        "state_size": metadata.integer("ssm.state_size"),
        "n_groups": metadata.integer("ssm.group_count"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_bias": _has_tensor(file, "ssm_in.bias"),
        "use_conv_bias": _has_tensor(file, "ssm_conv1d.bias"),
    }


def _bamba(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the state-space config fields of Bamba and Falcon-H1."""
    heads, size = _heads(metadata)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_n_groups": metadata.integer("ssm.group_count"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_conv_bias": _has_tensor(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has_tensor(file, "ssm_in.bias"),
    }


def _granite_hybrid(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of Bamba; hybrid Granite models, which have no RoPE, are refused."""
    if not metadata.flag("rope.scaling.finetuned", True):
        raise UnsupportedModelError(
            metadata.path, "is a hybrid Granite model: of 'granitehybrid', only Bamba is supported"
        )
    has_attention = _has_attention(metadata)
    return {
        **_bamba(metadata, file),
        "mamba_expand": metadata.integer("ssm.inner_size") // metadata.integer("embedding_length"),
        "attn_layer_indices": [index for index, has in enumerate(has_attention) if has],
    }


def _falcon(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of Falcon-H1 except multipliers, which are folded into weights."""
    return {
        **_bamba(metadata, file),
        "mamba_d_ssm": metadata.integer("ssm.inner_size"),
        "mamba_rms_norm": _has_tensor(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": _has_tensor(file, "ssm_out.bias"),
    }


def _lfm2(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    if metadata.integer("attention.sliding_window", 0):
        raise UnsupportedModelError(
            metadata.path, "has attention.sliding_window, which is not supported for LFM2"
        )
    kinds = ("conv", "full_attention")
    return {
        "layer_types": [kinds[is_attention] for is_attention in _has_attention(metadata)],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": _has_tensor(file, "shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def _nemotron(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of Nemotron-H: layers are attention, MLP, experts or state space."""
    heads, size = _heads(metadata)
    has_attention = _has_attention(metadata)
    sizes = metadata.per_layer("feed_forward_length", int, len(has_attention))
    kinds = zip(has_attention, sizes, strict=True)
    # The file does not name the kind of a layer: kv heads mean attention, an MLP size an MLP.
    mlp_kind = "mlp" if metadata.architecture == "nemotron_h" else "moe"
    # Converters have written the epsilon of these RMS norms under either key.
    epsilon = RMS_EPSILON if RMS_EPSILON in metadata else LAYER_EPSILON
    return {
        "layers_block_type": [
            "attention" if is_attention else mlp_kind if mlp_size else "mamba"
            for is_attention, mlp_size in kinds
        ],
        "intermediate_size": max(sizes, default=0) or 1,  # positive even without MLPs
        "mamba_num_heads": heads,
        "mamba_head_dim": size,
        "ssm_state_size": metadata.integer("ssm.state_size"),
        "n_groups": metadata.integer("ssm.group_count"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_bias": _has_tensor(file, "ssm_in.bias"),
        "use_conv_bias": _has_tensor(file, "ssm_conv1d.bias"),
        "mlp_bias": _has_tensor(file, "ffn_up.bias"),
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": metadata.number(epsilon),
    }


def _nemotron_experts(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    latent = metadata.integer("moe_latent_size", 0)
    fields = grouped_experts_of(metadata)
    if fields.pop("n_shared_experts") > 1:
        raise UnsupportedModelError(metadata.path, "has expert_shared_count of more than 1")
    return {
        **_nemotron(metadata, file),
        **fields,
        "n_routed_experts": fields["num_local_experts"],
        "moe_shared_expert_intermediate_size": metadata.integer(
            "expert_shared_feed_forward_length"
        ),
        **({"moe_latent_size": latent} if latent else {}),
    }


def _state_space(module: str) -> dict[str, str]:
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_conv1d": f"{module}.conv1d",
        "ssm_dt.bias": f"{module}.dt_bias",
        "ssm_a": f"{module}.A_log",
        "ssm_d": f"{module}.D",
        "ssm_norm": f"{module}.norm",
        "ssm_out": f"{module}.out_proj",
    }


_RESTORED = {
    "ssm_a": DECAY,
    "ssm_d": VECTOR,
    "ssm_norm.weight": VECTOR,
    "ssm_conv1d.weight": CHANNELS,
}
_BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
_MAMBA2 = {**_state_space("mixer"), "attn_norm": "norm"}
_NEMOTRON = {
    **_MAMBA2,
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}
_BAMBA = {
    **_state_space("mamba"),
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_FINAL = {"output_norm": "model.final_layernorm"}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_NEMOTRON_EPSILON = (LAYER_EPSILON, "layer_norm_epsilon")

HYBRIDS: Mapping[str, Architecture] = {
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        _MAMBA2,
        _BACKBONE,
        "backbone.layers",
        epsilon=(RMS_EPSILON, "layer_norm_epsilon"),
        fields=_mamba2,
        is_uniform=False,
        conversions=_RESTORED,
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        _NEMOTRON,
        _BACKBONE,
        "backbone.layers",
        epsilon=_NEMOTRON_EPSILON,
        permuted=True,
        fields=_nemotron,
        conversions=_RESTORED,
    ),
    "nemotron_h_moe": Architecture(
        "NemotronHForCausalLM",
        _NEMOTRON,
        _BACKBONE,
        "backbone.layers",
        epsilon=_NEMOTRON_EPSILON,
        permuted=True,
        fields=_nemotron_experts,
        has_experts=True,
        conversions=_RESTORED,
    ),
    "granitehybrid": Architecture(
        "BambaForCausalLM",
        _BAMBA,
        _FINAL,
        permuted=True,
        fields=_granite_hybrid,
        conversions=_RESTORED,
    ),
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM",
        # Only here, llama.cpp's conversion omits the ending ``.weight``.
        {**_BAMBA, "ffn_norm": "pre_ff_layernorm.weight"},
        _FINAL,
        fields=_falcon,
        conversions=_RESTORED,
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        _LFM2,
        {"token_embd_norm": "model.embedding_norm"},
        epsilon=(RMS_EPSILON, "norm_eps"),
        fields=_lfm2,
        conversions={"shortconv.conv.weight": CHANNELS},
    ),
}
"""By the values of ``general.architecture``."""
