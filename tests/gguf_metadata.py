"""The metadata that conversions of llama.cpp write, of the config of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np

Metadata = dict[str, Any]

_INTEGERS = {
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_topk": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
}
_MULTIPLIERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "logits_scaling": "logit_scale",
    "residual_multiplier": "residual_scale",
    "logit_scale": "logit_scale",
    "routed_scaling_factor": "expert_weights_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_SIGMOID = int(gguf.ExpertGatingFuncType.SIGMOID)
_EPSILONS = {
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


def metadata_of(kind: str, config: Any, older: bool, further: int) -> Metadata:
    """Return values by key, without the architecture in front.

    Args:
        older: DeepSeek's files have keys and values of every head, as they were at first.
        further: blocks behind the others, for the prediction of further tokens.
    """
    found = {
        "context_length": getattr(config, "max_position_embeddings", config.hidden_size),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers + further,
        "nextn_predict_layers": further or None,
        "feed_forward_length": getattr(config, "intermediate_size", 4 * config.hidden_size),
        **{key: getattr(config, field, None) for field, key in _EPSILONS.items()},
        **_given(config, _INTEGERS),
        **_given(config, _MULTIPLIERS),
        "attention.sliding_window": getattr(config, "sliding_window", None) or None,
    }
    for field, key in _EPSILONS.items():
        found[key] = getattr(config, field, None) or found[key]
    found |= _attention(config, older) | _rope(config)
    if kind in _FURTHER:
        found |= _FURTHER[kind](config)
    return {key: value for key, value in found.items() if value is not None}


def write_metadata(writer: gguf.GGUFWriter, metadata: Metadata) -> None:
    """Add values under the architecture of a writer, each as what it is in Python."""
    adds: dict[type, Callable[..., None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
    }
    adds |= {str: writer.add_string, list: writer.add_array}
    for key, value in metadata.items():
        adds[type(value)](f"{writer.arch}.{key}", value)


def _given(config: Any, table: dict[str, str]) -> Metadata:
    """Return the metadata in a config; of several fields of one key, the last that is not null."""
    found: Metadata = {}
    for field, key in table.items():
        value = getattr(config, field, None)
        found[key] = value if value is not None else found.get(key)
    return found


def _head_size(config: Any) -> int:
    stated = config.to_dict().get("head_dim")
    return int(stated or config.hidden_size // config.num_attention_heads)


def global_head_size(config: Any) -> int:
    """Return the size of heads of Gemma 4 in layers that see everything."""
    sizes = config.to_dict()["per_layer_config"].values()
    return max(int(layer["head_dim"]) for layer in sizes)


def _attention(config: Any, older: bool) -> Metadata:
    heads, size = config.num_attention_heads, _head_size(config)
    latent = getattr(config, "kv_lora_rank", None)
    prefix = "attention."
    if latent and older:
        sizes = {
            "head_count_kv": heads,
            "key_length": config.qk_head_dim,
            "value_length": config.v_head_dim,
        }
    elif latent:
        sizes = {
            "head_count_kv": 1,
            "key_length": latent + size,
            "value_length": latent,
            "key_length_mla": config.qk_head_dim,
            "value_length_mla": config.v_head_dim,
        }
    else:
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        sizes = {"head_count_kv": kv_heads, "key_length": size, "value_length": size}
    return {f"{prefix}{key}": value for key, value in {"head_count": heads, **sizes}.items()}


def rope_of(config: Any) -> dict[str, Any]:
    """Return the angles of layers that see everything."""
    rope = getattr(config, "rope_parameters", None) or {}
    return dict(rope.get("full_attention", rope))


def _rope(config: Any) -> Metadata:
    rope, prefix = rope_of(config), "rope.scaling."
    if not rope.get("rope_theta"):
        return {}
    share = rope.get("partial_rotary_factor", 1.0)
    found: Metadata = {
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(_head_size(config) * share),
    }
    if rope.get("rope_type") == "yarn":
        scale = rope.get("mscale_all_dim")
        found |= {
            f"{prefix}type": "yarn",
            f"{prefix}factor": float(rope["factor"]),
            f"{prefix}original_context_length": rope["original_max_position_embeddings"],
            f"{prefix}yarn_log_multiplier": scale and 0.1 * scale,
            f"{prefix}yarn_attn_factor": rope.get("attention_factor"),
            f"{prefix}yarn_beta_fast": rope.get("beta_fast"),
            f"{prefix}yarn_beta_slow": rope.get("beta_slow"),
        }
    if "long_factor" in rope:
        original = rope["original_max_position_embeddings"]
        ratio = np.log(config.max_position_embeddings / original) / np.log(original)
        found |= {
            f"{prefix}original_context_length": original,
            f"{prefix}attn_factor": float((1 + ratio) ** 0.5),
        }
    return found


def _normed(config: Any) -> Metadata:
    return {"expert_gating_func": _SIGMOID, "expert_weights_norm": config.norm_topk_prob}


def _inner_experts(config: Any) -> Metadata:
    return {"expert_feed_forward_length": config.intermediate_size}


def _ernie(config: Any) -> Metadata:
    shared = config.moe_num_shared_experts * config.moe_intermediate_size
    return {"expert_shared_feed_forward_length": shared}


def _delta(config: Any) -> Metadata:
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "full_attention_interval": 4,
    }


def _interleaved(config: Any) -> Metadata:
    return {**_delta(config), "rope.dimension_sections": [11, 11, 10, 0]}


def _state_space(kernel: int, inner: int, state: int, heads: int, groups: int) -> Metadata:
    return {
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
    }


def _mamba2(config: Any) -> Metadata:
    none = dict.fromkeys(("key_length", "value_length", "head_count_kv", "layer_norm_epsilon"))
    return {
        **{f"attention.{key}": None for key in none},
        "attention.head_count": 0,
        "feed_forward_length": 0,
        "context_length": 2**20,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        **_state_space(
            config.conv_kernel,
            config.num_heads * config.head_dim,
            config.state_size,
            config.num_heads,
            config.n_groups,
        ),
    }


def _of_layers(config: Any, attends: list[bool]) -> list[int]:
    return [config.num_key_value_heads if has else 0 for has in attends]


def _nemotron(config: Any) -> Metadata:
    kinds = config.layers_block_type
    experts = "moe" in kinds
    inner = config.moe_intermediate_size if experts else config.intermediate_size
    found = {
        "context_length": 2**20,
        "feed_forward_length": [inner if kind in ("mlp", "moe") else 0 for kind in kinds],
        "attention.head_count_kv": _of_layers(
            config, [kind in ("attention", "full_attention") for kind in kinds]
        ),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": None,
        "rope.scaling.finetuned": False,
        "moe_latent_size": config.moe_latent_size,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        **_state_space(
            config.conv_kernel,
            config.mamba_num_heads * config.mamba_head_dim,
            config.ssm_state_size,
            config.mamba_num_heads,
            config.n_groups,
        ),
    }
    if experts:
        return found
    left_out = {key for key in _INTEGERS.values() if key.startswith("expert_")}
    left_out |= {"expert_weights_norm", "expert_weights_scale"}
    return {**found, **dict.fromkeys(left_out)}


def _bamba(config: Any) -> Metadata:
    inner = config.mamba_n_heads * config.mamba_d_head
    sizes = config.mamba_d_state, config.mamba_n_heads, config.mamba_n_groups
    return _state_space(config.mamba_d_conv, inner, *sizes)


def _hybrid_granite(config: Any) -> Metadata:
    attends = [index in config.attn_layer_indices for index in range(config.num_hidden_layers)]
    return {
        **_bamba(config),
        "attention.head_count_kv": _of_layers(config, attends),
        "attention.key_length": None,
        "attention.value_length": None,
        "rope.scaling.finetuned": True,
    }


def _falcon(config: Any) -> Metadata:
    # Its multipliers are in the weights.
    none = dict.fromkeys((*_MULTIPLIERS.values(), "rope.dimension_count"))
    return {**_bamba(config), **none, "ssm.inner_size": config.mamba_d_ssm}


def _lfm2(config: Any) -> Metadata:
    attends = [kind == "full_attention" for kind in config.layer_types]
    inner = config.block_multiple_of * -(-int(2 * config.intermediate_size / 3) // 32)
    return {
        "feed_forward_length": inner,
        "attention.head_count_kv": _of_layers(config, attends),
        "attention.key_length": None,
        "attention.value_length": None,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": None,
        "shortconv.l_cache": config.conv_L_cache,
    }


def _llama4(config: Any) -> Metadata:
    return {
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
    }


def _olmo3(config: Any) -> Metadata:
    return {
        "attention.sliding_window_pattern": _slides(config),
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
        "rope.dimension_count": None,
        "attention.key_length": None,
        "attention.value_length": None,
    }


def _slides(config: Any) -> list[bool]:
    return [kind == "sliding_attention" for kind in config.layer_types]


def _gemma4(config: Any) -> Metadata:
    inner, shared = config.intermediate_size, config.num_kv_shared_layers
    wide = config.num_hidden_layers - shared
    size, whole = _head_size(config), global_head_size(config)
    full = {"key_length": whole, "value_length": whole}
    slid = {"key_length_swa": size, "value_length_swa": size}
    return {
        **{f"attention.{key}": value for key, value in {**full, **slid}.items()},
        "feed_forward_length": [
            inner if index < wide else 2 * inner for index in range(config.num_hidden_layers)
        ],
        "attention.shared_kv_layers": shared,
        "attention.sliding_window_pattern": _slides(config),
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
        "rope.dimension_count": whole,
        "rope.dimension_count_swa": size,
    }


def _bloom(config: Any) -> Metadata:
    return {
        "feed_forward_length": 4 * config.hidden_size,
        "attention.key_length": None,
        "attention.value_length": None,
    }


def _neox(config: Any) -> Metadata:
    return {
        "use_parallel_residual": config.use_parallel_residual,
        "attention.head_count_kv": None,
        "attention.key_length": None,
        "attention.value_length": None,
        "rope.freq_base": None,
    }


def _indexed(config: Any) -> Metadata:
    return {
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        **_normed(config),
    }


_FURTHER: dict[str, Callable[[Any], Metadata]] = {
    "hunyuan_v1_moe": _inner_experts,
    "minimax_m2": lambda config: {**_inner_experts(config), "expert_gating_func": _SIGMOID},
    "ernie4_5_moe": _ernie,
    "glm4_moe": _normed,
    "deepseek_v3": _normed,
    "deepseek_v32": _indexed,
    "qwen3_next": _delta,
    "qwen3_5_text": _interleaved,
    "qwen3_5_moe_text": _interleaved,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron,
    "bamba": _hybrid_granite,
    "falcon_h1": _falcon,
    "lfm2": _lfm2,
    "gpt_oss": lambda config: {**_inner_experts(config), "rope.dimension_count": None},
    "llama4_text": _llama4,
    "olmo3": _olmo3,
    "gemma4_text": _gemma4,
    "bloom": _bloom,
    "gpt_neox": _neox,
}
