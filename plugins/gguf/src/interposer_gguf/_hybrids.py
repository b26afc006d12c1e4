"""The architectures whose layers keep a state: state spaces and convolutions, some with attention.

Source: the tables of gguf-py (gguf/constants.py), the conversions of llama.cpp and its graphs,
which say what the metadata leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer.errors import CheckpointError, UnsupportedModelError
from interposer_gguf._architecture import LAYER_EPSILON, RMS_EPSILON, Architecture
from interposer_gguf._experts_settings import grouped_experts_of
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._restoration import CHANNELS, DECAY, VECTOR
from interposer_gguf._settings import Settings


def _heads(settings: Settings) -> tuple[int, int]:
    """Return the number of heads of a state space, and their size.

    Raises: CheckpointError: they do not add up to its width.
    """
    heads, width = settings.integer("ssm.time_step_rank"), settings.integer("ssm.inner_size")
    if heads < 1 or width % heads:
        raise CheckpointError(
            settings.path, f"has ssm.inner_size {width}, not a multiple of its {heads} heads"
        )
    return heads, width // heads


def _holds(file: GGUFFile, name: str) -> bool:
    """Say whether a block has such a tensor."""
    return any(stored.endswith(f".{name}") for stored in file.tensors)


def _attends(settings: Settings) -> list[bool]:
    """Say of each layer whether it has heads of keys."""
    count = settings.integer("block_count") - settings.integer("nextn_predict_layers", 0)
    return [heads > 0 for heads in settings.of_layers("attention.head_count_kv", int, count)]


def _mamba2(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    (heads, size), width = _heads(settings), settings.integer("embedding_length")
    return {
        "num_attention_heads": heads,
        "head_dim": size,
        "expand": heads * size // width,
        "state_size": settings.integer("ssm.state_size"),
        "n_groups": settings.integer("ssm.group_count"),
        "conv_kernel": settings.integer("ssm.conv_kernel"),
        "use_bias": _holds(file, "ssm_in.bias"),
        "use_conv_bias": _holds(file, "ssm_conv1d.bias"),
    }


def _bamba(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return the fields of the state space of Bamba and Falcon-H1."""
    heads, size = _heads(settings)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_d_state": settings.integer("ssm.state_size"),
        "mamba_n_groups": settings.integer("ssm.group_count"),
        "mamba_d_conv": settings.integer("ssm.conv_kernel"),
        "mamba_conv_bias": _holds(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _holds(file, "ssm_in.bias"),
    }


def _granite_hybrid(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return Bamba's fields; Granite's hybrid models, which do not rotate, are refused."""
    if not settings.flag("rope.scaling.finetuned", True):
        raise UnsupportedModelError(
            settings.path, "is a hybrid Granite: of 'granitehybrid', Bamba is read alone"
        )
    attends = _attends(settings)
    return {
        **_bamba(settings, file),
        "mamba_expand": settings.integer("ssm.inner_size") // settings.integer("embedding_length"),
        "attn_layer_indices": [index for index, has in enumerate(attends) if has],
    }


def _falcon(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return Falcon-H1's fields without its multipliers, which matrices of the file contain."""
    return {
        **_bamba(settings, file),
        "mamba_d_ssm": settings.integer("ssm.inner_size"),
        "mamba_rms_norm": _holds(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": _holds(file, "ssm_out.bias"),
    }


def _lfm2(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    if settings.integer("attention.sliding_window", 0):
        raise UnsupportedModelError(
            settings.path, "has attention.sliding_window, which LFM2 is read without"
        )
    kinds = ("conv", "full_attention")
    return {
        "layer_types": [kinds[attends] for attends in _attends(settings)],
        "conv_L_cache": settings.integer("shortconv.l_cache"),
        "conv_bias": _holds(file, "shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def _nemotron(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return Nemotron-H's fields: a layer attends, has an MLP or experts, or a state space."""
    heads, size = _heads(settings)
    attends = _attends(settings)
    sizes = settings.of_layers("feed_forward_length", int, len(attends))
    kinds = zip(attends, sizes, strict=True)
    wide = "mlp" if settings.architecture == "nemotron_h" else "moe"
    epsilon = RMS_EPSILON if RMS_EPSILON in settings else LAYER_EPSILON
    return {
        "layers_block_type": [
            "attention" if has else wide if inner else "mamba" for has, inner in kinds
        ],
        "intermediate_size": max(sizes, default=0) or 1,
        "mamba_num_heads": heads,
        "mamba_head_dim": size,
        "ssm_state_size": settings.integer("ssm.state_size"),
        "n_groups": settings.integer("ssm.group_count"),
        "conv_kernel": settings.integer("ssm.conv_kernel"),
        "use_bias": _holds(file, "ssm_in.bias"),
        "use_conv_bias": _holds(file, "ssm_conv1d.bias"),
        "mlp_bias": _holds(file, "ffn_up.bias"),
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": settings.number(epsilon),
    }


def _nemotron_experts(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    latent = settings.integer("moe_latent_size", 0)
    fields = grouped_experts_of(settings)
    if fields.pop("n_shared_experts") > 1:
        raise UnsupportedModelError(settings.path, "has expert_shared_count of more than 1")
    return {
        **_nemotron(settings, file),
        **fields,
        "n_routed_experts": fields["num_local_experts"],
        "moe_shared_expert_intermediate_size": settings.integer(
            "expert_shared_feed_forward_length"
        ),
        **({"moe_latent_size": latent} if latent else {}),
    }


def _state_space(module: str) -> dict[str, str]:
    """Return the names of the parts of a state space at a module below a block."""
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
        regular=False,
        restored=_RESTORED,
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        _NEMOTRON,
        _BACKBONE,
        "backbone.layers",
        epsilon=_NEMOTRON_EPSILON,
        permuted=True,
        fields=_nemotron,
        restored=_RESTORED,
    ),
    "nemotron_h_moe": Architecture(
        "NemotronHForCausalLM",
        _NEMOTRON,
        _BACKBONE,
        "backbone.layers",
        epsilon=_NEMOTRON_EPSILON,
        permuted=True,
        fields=_nemotron_experts,
        mixture=True,
        restored=_RESTORED,
    ),
    "granitehybrid": Architecture(
        "BambaForCausalLM",
        _BAMBA,
        _FINAL,
        permuted=True,
        fields=_granite_hybrid,
        restored=_RESTORED,
    ),
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM",
        # The one tensor whose name the conversion ends without ``.weight``.
        {**_BAMBA, "ffn_norm": "pre_ff_layernorm.weight"},
        _FINAL,
        fields=_falcon,
        restored=_RESTORED,
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        _LFM2,
        {"token_embd_norm": "model.embedding_norm"},
        epsilon=(RMS_EPSILON, "norm_eps"),
        fields=_lfm2,
        restored={"shortconv.conv.weight": CHANNELS},
    ),
}
"""By the values of ``general.architecture``."""
