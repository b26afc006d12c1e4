"""Tensors of checkpoints as conversions of llama.cpp name, move and cut them.

Dimensions: N heads, E experts, I intermediate size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Named = Iterator[tuple[str, np.ndarray]]
Rule = Callable[[Any, str, np.ndarray], Named]


def in_file(kind: str, config: Any, key: str, values: np.ndarray, older: bool = False) -> Named:
    """Yield a tensor as the conversion of its architecture has it, under names of checkpoints.

    Args:
        older: projections of DeepSeek and Qwen3-Next are as the first files have them.
    """
    for end, rule in RULES.get(kind, {}).items():
        if key.endswith(end) and not (older and end in _NEWER):
            for name, changed in rule(config, key, values):
                yield name, np.ascontiguousarray(changed)
            return
    yield key, values


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows as llama.cpp has those that it rotates in pairs."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def renamed(old: str, new: str) -> Rule:
    """Return a rule that changes a name."""

    def rule(config: Any, key: str, values: np.ndarray) -> Named:
        yield key.replace(old, new), values

    return rule


def changed(
    function: Callable[[Any, np.ndarray], np.ndarray], old: str = "", new: str = ""
) -> Rule:
    """Return a rule that changes numbers, and perhaps the name."""

    def rule(config: Any, key: str, values: np.ndarray) -> Named:
        yield key.replace(old, new) if old else key, function(config, values)

    return rule


def _cut_granite(config: Any, key: str, values: np.ndarray) -> Named:
    experts = key.replace("input_linear", "experts.w{}")
    for number, half in zip((1, 3), np.split(values, 2, 1), strict=True):
        yield experts.format(number), half


def _cut_latent(config: Any, key: str, values: np.ndarray) -> Named:
    size = config.qk_nope_head_dim
    heads = values.reshape(config.num_attention_heads, -1, values.shape[-1])
    yield key.replace("kv_b", "k_b"), heads[:, :size].swapaxes(1, 2)
    yield key.replace("kv_b", "v_b"), heads[:, size:]


def _cut_turns(config: Any, key: str, values: np.ndarray) -> Named:
    """Yield gates ``[E, I, H]`` and what they act on, of ``[E, H, 2 I]`` or biases ``[E, 2 I]``."""
    end = "bias" if key.endswith("_bias") else "weight"
    rows = values if end == "bias" else values.swapaxes(1, 2)
    stem = key.removesuffix("_bias").removesuffix("gate_up_proj")
    yield f"{stem}gate_proj.{end}", rows[:, ::2]
    yield f"{stem}up_proj.{end}", rows[:, 1::2]


def _cut_halves(config: Any, key: str, values: np.ndarray) -> Named:
    stem = key.removesuffix("gate_up_proj")
    for name, half in zip(("gate", "up"), np.split(values.swapaxes(1, 2), 2, 1), strict=True):
        yield f"{stem}{name}_proj.weight", half


def _cut_groups(config: Any, key: str, values: np.ndarray) -> Named:
    """Yield rows of queries, keys and values of all key heads, and of gates."""
    groups, key_size = config.linear_num_key_heads, config.linear_key_head_dim
    size = config.linear_num_value_heads // groups * config.linear_value_head_dim
    by_group = values.reshape(groups, -1, values.shape[-1])
    ends = np.cumsum((key_size, key_size, size))
    parts = [part.reshape(-1, values.shape[-1]) for part in np.split(by_group, ends, 1)]
    yield key.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate(parts[:3])
    yield key.replace("in_proj_qkvz", "in_proj_z"), parts[3]


def _moved_experts(config: Any, key: str, values: np.ndarray) -> Named:
    yield key.replace("backbone", "model").replace("mixer", "mlp"), values


def _alternating(config: Any, values: np.ndarray) -> np.ndarray:
    """Return rows of value heads so that key heads alternate."""
    groups = config.linear_num_key_heads
    heads = values.reshape(groups, config.linear_num_value_heads // groups, -1, *values.shape[1:])
    return heads.swapaxes(0, 1).reshape(values.shape)


def _alternating_last(config: Any, values: np.ndarray) -> np.ndarray:
    others = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return np.concatenate((values[:others], _alternating(config, values[others:])))


def _by_kind(config: Any, values: np.ndarray) -> np.ndarray:
    """Return rows of all queries, all keys and all values, of those of each head."""
    by_head = values.reshape(config.num_attention_heads, 3, -1, *values.shape[1:])
    return by_head.swapaxes(0, 1).reshape(values.shape)


def _rates(config: Any, values: np.ndarray) -> np.ndarray:
    rates: np.ndarray = -np.exp(values)
    return rates


def _in_groups(config: Any, values: np.ndarray) -> np.ndarray:
    groups = getattr(config, "n_groups", None) or config.mamba_n_groups
    return values.reshape(groups, -1)


def _times(*names: str) -> Rule:
    """Return a rule that multiplies by fields of the config."""
    return changed(
        lambda config, values: values * np.prod([getattr(config, n) for n in names], dtype="f4")
    )


def _scaled_projection(config: Any, values: np.ndarray) -> np.ndarray:
    """Return the first projection of Falcon-H1's state space by the factors of its parts."""
    width = config.mamba_n_groups * config.mamba_d_state
    counts = config.mamba_d_ssm, config.mamba_d_ssm, width, width, config.mamba_n_heads
    factors = np.repeat(np.array(config.ssm_multipliers, dtype="f4"), counts)
    scaled: np.ndarray = values * np.float32(config.ssm_in_multiplier) * factors[:, None]
    return scaled


_LATENT, _GROUPED = "kv_b_proj.weight", "in_proj_qkvz.weight"
# What the first files had as checkpoints have it.
_NEWER = (_LATENT, _GROUPED)
_BALANCED = {"e_score_correction_bias": renamed("correction_bias", "correction.bias")}
_OF_ONE_ROW = changed(lambda config, values: values[0], "correction_bias", "correction.bias")
_PERMUTED = {
    "q_proj.weight": changed(lambda config, w: permuted(w, config.num_attention_heads)),
    "k_proj.weight": changed(lambda config, w: permuted(w, config.num_key_value_heads)),
}
_FURTHER_ONE = changed(lambda config, values: values + 1)
_SQUEEZED = changed(lambda config, values: values.squeeze(1))
_TRANSPOSED = changed(lambda config, values: values.T)
_EXPERTS_DOWN = changed(lambda config, w: w.swapaxes(1, 2), "down_proj", "down_proj.weight")
_QKV = dict.fromkeys(("query_key_value.weight", "query_key_value.bias"), changed(_by_kind))
_STATE_SPACE: dict[str, Rule] = {
    "A_log": changed(lambda config, values: _rates(config, values)[:, None]),
    ".D": changed(lambda config, values: values[:, None]),
    "mixer.norm.weight": changed(_in_groups),
    "mamba.norm.weight": changed(_in_groups),
    "conv1d.weight": _SQUEEZED,
    "dt_bias": renamed("dt_bias", "dt_proj.bias"),
}
_DELTA: dict[str, Rule] = {
    "A_log": changed(_rates),
    "dt_bias": renamed("dt_bias", "dt_proj.bias"),
    "conv1d.weight": _SQUEEZED,
    _GROUPED: _cut_groups,
    "linear_attn.norm.weight": changed(lambda config, values: values),
    "norm.weight": _FURTHER_ONE,
}
_ALTERNATING: dict[str, Rule] = {
    **_DELTA,
    "A_log": changed(lambda config, values: _alternating(config, _rates(config, values))),
    "dt_bias": changed(_alternating, "dt_bias", "dt_proj.bias"),
    "conv1d.weight": changed(lambda config, w: _alternating_last(config, w.squeeze(1))),
    "in_proj_qkv.weight": changed(_alternating_last),
    **dict.fromkeys(
        ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"), changed(_alternating)
    ),
    "linear_attn.out_proj.weight": changed(lambda config, w: _alternating(config, w.T).T),
}
_NEMOTRON: dict[str, Rule] = {**_STATE_SPACE, **_PERMUTED}
_NORMS: dict[str, Rule] = {"norm.weight": _FURTHER_ONE}
_DEEPSEEK: dict[str, Rule] = {**_BALANCED, _LATENT: _cut_latent}
# The conversion leaves out what stands in front.
_BLOOM: dict[str, Rule] = {
    **dict.fromkeys(_QKV, changed(_by_kind, "transformer.", "")),
    "": renamed("transformer.", ""),
}
RULES: dict[str, dict[str, Rule]] = {
    **dict.fromkeys(("granite", "smollm3", "mixtral", "mistral3"), _PERMUTED),
    "granitemoe": {**_PERMUTED, "block_sparse_moe.input_linear.weight": _cut_granite},
    "gemma2": _NORMS,
    "gemma3_text": _NORMS,
    "gpt2": dict.fromkeys(("c_attn.weight", "c_proj.weight", "c_fc.weight"), _TRANSPOSED),
    "qwen2_moe": {"shared_expert_gate.weight": _OF_ONE_ROW},
    "ernie4_5_moe": {"e_score_correction_bias": _OF_ONE_ROW},
    **dict.fromkeys(("minimax_m2", "glm4_moe"), _BALANCED),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32"), _DEEPSEEK),
    "qwen3_next": _DELTA,
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _ALTERNATING),
    "mamba2": _STATE_SPACE,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": {
        **_NEMOTRON,
        **_BALANCED,
        "mixer.experts.up_proj.weight": _moved_experts,
        "mixer.experts.down_proj.weight": _moved_experts,
    },
    "bamba": {**_STATE_SPACE, **_PERMUTED},
    "falcon_h1": {
        **_STATE_SPACE,
        "mamba.in_proj.weight": changed(_scaled_projection),
        "mamba.out_proj.weight": _times("ssm_out_multiplier"),
        "q_proj.weight": _times("attention_in_multiplier"),
        "k_proj.weight": _times("key_multiplier", "attention_in_multiplier"),
        "v_proj.weight": _times("attention_in_multiplier"),
        "o_proj.weight": _times("attention_out_multiplier"),
        "gate_proj.weight": changed(lambda config, w: w * np.float32(config.mlp_multipliers[0])),
        "down_proj.weight": changed(lambda config, w: w * np.float32(config.mlp_multipliers[1])),
        "lm_head.weight": _times("lm_head_multiplier"),
        "embed_tokens.weight": _times("embedding_multiplier"),
    },
    "lfm2": {"conv.conv.weight": _SQUEEZED},
    "gpt_oss": {
        "gate_up_proj": _cut_turns,
        "gate_up_proj_bias": _cut_turns,
        "down_proj": _EXPERTS_DOWN,
        "down_proj_bias": renamed("down_proj_bias", "down_proj.bias"),
        "sinks": renamed("sinks", "sinks.weight"),
    },
    "llama4_text": {"experts.gate_up_proj": _cut_halves, "experts.down_proj": _EXPERTS_DOWN},
    "bloom": _BLOOM,
    "gpt_neox": _QKV,
    "gemma4_text": {"layer_scalar": renamed("layer_scalar", "layer_scalar.weight")},
}
"""What happens to tensors of a kind, by the ends of their names; the first one counts."""
