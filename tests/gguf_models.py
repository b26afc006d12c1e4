"""Models of random weights, and GGUF files of them as llama.cpp converts each architecture."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HEADS, HALF = {"head_dim": 16}, {"head_dim": 32}
WINDOW = {"sliding_window": 24}
FACTORS = {"short_factor": [1.0, 1.5] * 4, "long_factor": [1.0, 3.0] * 4}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
LATENT = {
    **ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "layer_norm_epsilon": 1e-4}
FIELDS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": HEADS,
    "gemma2": {**HALF, **WINDOW, "query_pre_attn_scalar": 32, "rms_norm_eps": 1e-5},
    "gemma3_text": {**HALF, **WINDOW, "query_pre_attn_scalar": 32, "num_hidden_layers": 6},
    "cohere2": {**WINDOW, "logit_scale": 0.5, "layer_norm_eps": 1e-4},
    "olmo2": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "granite": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.7,
    },
    "glm4": {**HEADS, "rms_norm_eps": 1e-5},
    "exaone4": {**HEADS, **WINDOW},
    "smollm3": {"rope_parameters": {"rope_type": "default", "rope_theta": 2e6}},
    "starcoder2": {"norm_epsilon": 1e-4, "sliding_window": None},
    "gpt2": GPT2,
    "hunyuan_v1_dense": HEADS,
    "ernie4_5": {**HEADS, "use_bias": False},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**HEADS, **EXPERTS, "norm_topk_prob": True},
    "granitemoe": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 2,
    },
    "hunyuan_v1_moe": {**HEADS, "num_experts": 6, "moe_topk": 3},
    "minimax_m2": {
        **HALF,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
    },
    "glm4_moe": {
        **HEADS,
        **ROUTED,
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
    },
    "deepseek_v2": {
        **LATENT,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.7,
        "norm_topk_prob": False,
    },
    "deepseek_v3": {**LATENT, "rope_parameters": YARN, "max_position_embeddings": 256},
    "phi3": {
        "rope_parameters": {**LONG, "original_max_position_embeddings": 8},
        "original_max_position_embeddings": 8,
    },
}
NAMES = {
    "hunyuan_v1_dense": "hunyuan-dense",
    "gemma3_text": "gemma3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
MIXTURES = [kind for kind in FIELDS if "moe" in kind or kind in ("mixtral", "minimax_m2")]
MIXTURES += ["deepseek_v2", "deepseek_v3"]
INTEGERS = {
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
MULTIPLIERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "logits_scaling": "logit_scale",
    "residual_multiplier": "residual_scale",
    "logit_scale": "logit_scale",
    "routed_scaling_factor": "expert_weights_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
PERMUTED = ("granite", "smollm3", "mixtral", "granitemoe")
TABLE = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows as llama.cpp has those that it rotates in pairs."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def add_metadata(
    writer: gguf.GGUFWriter, config: Any, rope: dict[str, Any], older: bool, further: int
) -> None:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + further)
    if further:
        writer.add_nextn_predict_layers(further)
    inner = getattr(config, "intermediate_size", 4 * config.hidden_size)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    latent = getattr(config, "kv_lora_rank", None)
    if latent and older:
        writer.add_head_count_kv(heads)
        writer.add_key_length(config.qk_head_dim)
        writer.add_value_length(config.v_head_dim)
    elif latent:
        writer.add_head_count_kv(1)
        writer.add_key_length(latent + size)
        writer.add_value_length(latent)
        writer.add_key_length_mla(config.qk_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
    else:
        writer.add_head_count_kv(getattr(config, "num_key_value_heads", heads))
        writer.add_key_length(size)
        writer.add_value_length(size)
    if config.model_type in ("hunyuan_v1_moe", "minimax_m2"):
        writer.add_expert_feed_forward_length(inner)
    if config.model_type == "ernie4_5_moe":
        shared = config.moe_num_shared_experts * config.moe_intermediate_size
        writer.add_expert_shared_feed_forward_length(shared)
    if config.model_type in ("minimax_m2", "glm4_moe", "deepseek_v3"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type in ("glm4_moe", "deepseek_v3"):
        writer.add_expert_weights_norm(config.norm_topk_prob)
    for field in ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"):
        if hasattr(config, field):
            writer.add_layer_norm_eps(getattr(config, field))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if rope.get("rope_theta"):
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    stated = {key: getattr(config, field, None) for field, key in INTEGERS.items()}
    for field, key in INTEGERS.items():
        stated[key] = getattr(config, field, None) or stated[key]
    for key, value in stated.items():
        if value is not None:
            writer.add_uint32(f"{writer.arch}.{key}", value)
    for field, key in MULTIPLIERS.items():
        if getattr(config, field, None) is not None:
            writer.add_float32(f"{writer.arch}.{key}", getattr(config, field))


def make(folder: Path, kind: str, **sizes: Any) -> None:
    """Write a model of random weights."""
    torch.manual_seed(0)
    usual = {} if kind == "gpt2" else SIZES
    special = {"bos_token_id": None, "eos_token_id": None, "vocab_size": 128}
    config = AutoConfig.for_model(kind, **{**usual, **special, **FIELDS[kind], **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 0.0 if "bias" in key else 1.0, 0.2)
    model.save_pretrained(folder)


def rounded(
    folder: Path, target: Path, stored_as: gguf.GGMLQuantizationType, older: bool = False
) -> Path:
    """Write the model with the numbers that blocks of a type have for its own."""
    shutil.copytree(folder, target)
    config, tensors = AutoConfig.from_pretrained(folder), load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        if key.endswith("kv_b_proj.weight") and not older:
            (_, keys), (_, others) = in_file(config, key, tensor.numpy())
            parts = (of_blocks(keys, stored_as).swapaxes(1, 2), of_blocks(others, stored_as))
            values = np.concatenate(parts, 1).reshape(tensor.shape)
        else:
            values = of_blocks(tensor.numpy(), stored_as)
        tensors[key] = torch.from_numpy(np.ascontiguousarray(values))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def of_blocks(values: np.ndarray, stored_as: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return the numbers that a file of a type has."""
    if not is_stored_as(stored_as, values):
        return values
    blocks = gguf.quants.quantize(values, stored_as)
    result: np.ndarray = gguf.quants.dequantize(blocks, stored_as)
    return result


def is_stored_as(kind: gguf.GGMLQuantizationType, values: torch.Tensor | np.ndarray) -> bool:
    """Say whether a file of that type has it so: blocks divide rows, and it is no vector."""
    size = gguf.GGML_QUANT_SIZES[kind][0]
    return min(values.ndim, values.squeeze().ndim) > 1 and values.shape[-1] % size == 0


def as_stored(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a model directory, matrices of experts as one tensor of a layer."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        found = re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", key)
        if found is None:
            yield key, values
        else:
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = values
    for key, parts in experts.items():
        yield key, np.stack([parts[index] for index in range(len(parts))])


def in_file(
    config: Any, key: str, values: np.ndarray, older: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield a tensor as the conversion of its architecture names and cuts it."""
    if key.endswith("block_sparse_moe.input_linear.weight"):
        experts = key.replace("input_linear", "experts.w{}")
        for number, half in zip((1, 3), np.split(values, 2, 1), strict=True):
            yield experts.format(number), np.ascontiguousarray(half)
    elif key.endswith("kv_b_proj.weight") and not older:
        size = config.qk_nope_head_dim
        heads = values.reshape(config.num_attention_heads, -1, values.shape[-1])
        keys, others = heads[:, :size].swapaxes(1, 2), heads[:, size:]
        yield key.replace("kv_b", "k_b"), np.ascontiguousarray(keys)
        yield key.replace("kv_b", "v_b"), np.ascontiguousarray(others)
    else:
        yield key.replace("e_score_correction_bias", "e_score_correction.bias"), values


def write(
    folder: Path,
    path: Path,
    kind: str,
    stored_as: Any = None,
    tokenizer: Callable[[gguf.GGUFWriter, Any], None] | None = None,
    older: bool = False,
    further: int = 0,
) -> None:
    """Write a model directory as llama.cpp's conversion of its architecture does.

    Args:
        stored_as: the type of what has more than one dimension, unless blocks do not divide it.
        tokenizer: adds the tokenizer; without it, there is one of a few words.
        older: DeepSeek's files have keys and values of every head, as they were at first.
        further: blocks behind the others, for the prediction of further tokens.
    """
    name, config = NAMES.get(kind, kind), AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, name)
    rope = getattr(config, "rope_parameters", None) or {}
    flat = rope.get("full_attention", rope)
    add_metadata(writer, config, flat, older, further)
    for index in range(further):
        block = f"blk.{config.num_hidden_layers + index}"
        writer.add_tensor(f"{block}.nextn.eh_proj.weight", np.ones((64, 128), dtype=np.float32))
    table = gguf.get_tensor_name_map(TABLE[name], config.num_hidden_layers)
    tensors = (t for pair in as_stored(folder) for t in in_file(config, *pair, older))
    for key, values in tensors:
        stored = table.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        if kind.startswith("gemma") and key.endswith("norm.weight"):
            values = values + 1
        if kind in PERMUTED and ".q_proj." in key:
            values = permuted(values, config.num_attention_heads)
        if kind in PERMUTED and ".k_proj." in key:
            values = permuted(values, config.num_key_value_heads)
        if kind == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            values = np.ascontiguousarray(values.T)
        form = gguf.GGMLQuantizationType.F32
        if stored_as is not None and is_stored_as(stored_as, values):
            form = stored_as
        values = values.squeeze()
        writer.add_tensor(stored, gguf.quants.quantize(values, form), raw_dtype=form)
    for field in ("short_factor", "long_factor"):
        if field in flat:
            values = np.array(flat[field], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{field.removesuffix('_factor')}.weight", values)
    if flat.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(flat["factor"])
        writer.add_rope_scaling_orig_ctx_len(flat["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * flat["mscale_all_dim"])
    if "long_factor" in flat:
        writer.add_rope_scaling_orig_ctx_len(flat["original_max_position_embeddings"])
        magnitude = (1 + np.log(64 / 8) / np.log(8)) ** 0.5
        writer.add_rope_scaling_attn_factors(float(magnitude))
    (tokenizer or few_words)(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def few_words(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add a tokenizer whose text nobody reads."""
    words = ["a", "b", "ab", *(f"w{i}" for i in range(3, config.vocab_size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
