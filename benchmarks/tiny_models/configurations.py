"""Tiny configurations, made from the configuration classes of transformers by rules on field names.

A rule gives a size by the kind of a field: every hidden size becomes the same small number, every
count of heads another, so that what has to be equal stays equal. What no rule names keeps its
default. ``exceptions.py`` holds the few families that need more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HIDDEN, INTERMEDIATE, EXPERT = 64, 128, 32
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
REACH = 8  # tokens of windows, chunks and top-k: fewer than the inputs have
VOCAB, LAYERS, EXPERTS, FRAMES = 512, 2, 4, 32
# Layers of different kinds are all kept, up to this many.
KINDS = 6

# The first pattern that a field's whole name matches decides; None keeps the default.
RULES: tuple[tuple[str, int | None], ...] = (
    (r"type_vocab_size|char_vocab_size|.*_per_head|num_attention_heads_per_stage", None),
    (r".*layers_per.*|.*(layer|layers)_(interval|frequency|period|offset|index|id|type).*", None),
    (r"sliding_window(_size)?|attention_window(_size)?|keep_window_size|local_attention", REACH),
    (r"attention_chunk_size|index_topk|local_attention_window_len", REACH),
    (r"index_block_size|index_topk_blocks|index_kpool", REACH // 2),
    (r".*vocab_size.*|codebook_size|num_embeddings|vocab_offset|max_2d_position_embeddings", VOCAB),
    (r"max_source_positions|image_token_num", FRAMES),
    (r"(.*_)?num_queries|two_stage_num_proposals", HEADS),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r"rotary_dim", HEAD_DIM // 2),
    (r"mamba_chunk_size|mamba_d_state|ssm_state_size", HEAD_DIM),
    (r".*(kv|q|o)_lora_rank|.*_rank|.*lowrank", 2 * HEAD_DIM),
    (r"num_(kv|global|cross).*_layers|first_k_dense_replace|num_dense_layers", 1),
    (r"max_window_layers|num_nextn_predict_layers|num_kv_shared_layers", 0),
    (r".*mamba_(n|num)_heads|n_mamba_heads|.*linear_num.*heads|mamba_d_head", None),
    (r"(.*_)?(num_key_value_heads|num_kv_heads|n_kv_heads|.*key_value_heads|kv_n_heads)", KV_HEADS),
    (r"(.*_)?(num_|n_)?(attention_)?(heads?|attention_heads|n_head)(_.*)?(?<!dim)(?<!size)", HEADS),
    (r"(.*_)?(head_dim|d_kv|dim_head|d_head|head_size|kv_channels|attention_head_size)", HEAD_DIM),
    (r"(.*_)?(num_experts_per_tok(en)?|moe_top_?k|num_selected_experts|moe_k)", 2),
    (r"(.*_)?(num_|n_)?(local_|routed_)?experts|n_routed_experts|moe_num_experts", EXPERTS),
    (r"n_groups?|topk_group|num_expert_group", 1),
    (r"(.*_)?(moe|expert|experts)(_.*)?(intermediate_size|hidden_size|ffn_dim|_dim)", EXPERT),
    (
        r"(.*_)?(intermediate|ffn|ff|mlp|feed_?forward|inner)(_.*)?(size|dim|dims)(_mlp)?",
        INTERMEDIATE,
    ),
    (r"d_ff|dim_ff|dff|d_inner|n_inner|(.*_)?dim_feedforward|.*linear_units", INTERMEDIATE),
    (r"(.*_)?(num_|n_)?(.*_)?(layers?|num_blocks|num_hidden_layers)|n_layer|depth", LAYERS),
    (r"(.*_)?(resampler_depth|num_residual_layers|num_lstm_layers)", LAYERS),
    (r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|model_dim)(_global|_per_layer_input)?", HIDDEN),
    (r"(.*_)?(embed_dim|embedding_size|embedding_dim|proj_dim|projection_dim|project_dim)", HIDDEN),
    (r"(.*_)?(projection_size|word_embed_proj_dim|emb_dim|adapter_out_dim|adapter_in_dim)", HIDDEN),
    (r"out_hidden_size|output_dim|vision_output_dim|projector_(in|out)put_dim|dim", HIDDEN),
)
COMPILED = tuple((re.compile(pattern), size) for pattern, size in RULES)
# Special tokens, which have to lie within the vocabulary and apart from one another.
TOKEN = re.compile(r".*(token_id|token_index|_token|token_ids)$")
# Such a field says that widths grow from stage to stage: widths are left as they are then.
STAGES = re.compile(
    r"depths|hidden_sizes|.*_per_stage|stage_.*|channel_multiplier|.*_ratios|embed_dims"
    r"|encoder_hidden_sizes|.*_?in_channels|num_block_repeats|layer_list_out_channels|strides"
)
WIDTHS = {HIDDEN, INTERMEDIATE, HEAD_DIM, 2 * HEAD_DIM, EXPERT}


class Shrinking:
    """One configuration and what was decided for it, so that equal tokens stay equal.

    Args:
        widths: whether hidden sizes and heads shrink, or only depths and vocabularies.
        images: whether images shrink.
    """

    def __init__(self, widths: bool = True, images: bool = True) -> None:
        self.widths, self.images = widths, images
        self._tokens: dict[int, int] = {}

    def of(self, config: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
        """Return a tiny configuration of the class of ``config``; ``changes`` win over rules.

        A name with dots in ``changes`` reaches into a sub-configuration.
        """
        nested: dict[str, dict[str, Any]] = {}
        for name in [name for name in changes if "." in name]:
            first, _, rest = name.partition(".")
            nested.setdefault(first, {})[rest] = changes.pop(name)
        own = {field.name: field.default for field in fields(type(config))}
        # Not through attributes: what differs from layer to layer refuses to be read as one value.
        values = {name: vars(config).get(name) for name in own}
        fresh = vars(type(config)())
        base = {field.name for field in fields(PreTrainedConfig)}
        shrunk: dict[str, Any] = {}
        widths = self.widths and not any(
            STAGES.fullmatch(name) and isinstance(value, Sequence) and not isinstance(value, str)
            for name, value in values.items()
        )
        for name, value in values.items():
            if isinstance(value, PreTrainedConfig):
                shrunk[name] = self.of(value, **nested.pop(name, {}))
            elif name in base and not TOKEN.fullmatch(name):
                continue
            elif TOKEN.fullmatch(name):
                shrunk[name] = self._token(value)
            elif isinstance(value, int) and not isinstance(value, bool) and own[name] is not None:
                shrunk[name] = self._size(name, value, widths)
        if widths and values.get("num_key_value_heads") == values.get("num_attention_heads"):
            shrunk.pop("num_key_value_heads", None)
            if own.get("num_key_value_heads") is not None:
                shrunk["num_key_value_heads"] = shrunk["num_attention_heads"]
        shrunk.update(self._image(values) if self.images else {})
        shrunk.update(self._layers(values, shrunk, own))
        shrunk.update(self._depths(values))
        if widths and isinstance(channels := values.get("conv_dim"), (list, tuple)):
            shrunk["conv_dim"] = [min(each, HIDDEN) for each in channels]
        shrunk.update(self._sections(values) if widths else {})
        # What a parent gave stays; what a rule left as it is may follow from what another changed.
        given = {
            name: value
            for name, value in values.items()
            if name not in base
            and value is not None
            and not isinstance(value, PreTrainedConfig)
            and value != fresh.get(name)
        }
        for name in ("out_features", "out_indices"):  # a property of backbones
            if hasattr(config, name) and getattr(config, name) != fresh.get(f"_{name}"):
                given[name] = getattr(config, name)
        moved = {
            name: value
            for name, value in shrunk.items()
            if isinstance(value, PreTrainedConfig) or value != values.get(name)
        }
        shrunk = {**given, **moved, **changes}
        if "out_indices" in given and "num_hidden_layers" in moved:  # one layer for each output
            places = range(1, len(given["out_indices"]) + 1)
            shrunk["num_hidden_layers"] = max(LAYERS, len(places))
            shrunk["out_indices"] = list(places)
            shrunk.pop("out_features", None)
        return type(config)(**shrunk)

    def _size(self, name: str, value: int, widths: bool) -> int:
        for pattern, size in COMPILED:
            if pattern.fullmatch(name):
                if size is None or size >= value:
                    return value
                if not widths and size in {*WIDTHS, HEADS, KV_HEADS} and size not in (LAYERS,):
                    return value
                return size
        return value

    def _token(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._token(each) for each in value]
        if not isinstance(value, int) or isinstance(value, bool) or value < VOCAB // 2:
            return value
        return self._tokens.setdefault(value, VOCAB - 1 - len(self._tokens))

    @staticmethod
    def _image(values: dict[str, Any]) -> dict[str, Any]:
        size, patch = values.get("image_size"), values.get("patch_size")
        if isinstance(size, int) and isinstance(patch, int) and patch:
            return {"image_size": min(size, max(4 * patch, 32))}
        if isinstance(size, int):
            return {"image_size": min(size, 64)}
        if isinstance(size, (list, tuple)) and all(isinstance(side, int) for side in size):
            sides = patch if isinstance(patch, (list, tuple)) else [patch or 16] * len(size)
            pairs = zip(size, sides, strict=False)
            return {"image_size": [min(side, max(4 * step, 32)) for side, step in pairs]}
        return {}

    @staticmethod
    def _depths(values: dict[str, Any]) -> dict[str, Any]:
        """Return depths of at most two blocks a stage."""
        return {
            name: [min(depth, LAYERS) for depth in value]
            for name in ("depths", "num_blocks", "blocks_per_stage", "layers")
            if isinstance(value := values.get(name), (list, tuple))
            and all(isinstance(depth, int) for depth in value)
        }

    @staticmethod
    def _sections(values: dict[str, Any]) -> dict[str, Any]:
        """Return rotary parameters whose sections fill half of a small head."""
        rope = values.get("rope_parameters")
        if not isinstance(rope, dict) or len(rope.get("mrope_section") or ()) != 3:
            return {}
        half = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
        small = half // 3
        return {"rope_parameters": {**rope, "mrope_section": [half - 2 * small, small, small]}}

    @staticmethod
    def _layers(
        values: dict[str, Any], shrunk: dict[str, Any], own: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the settings per layer, for one layer of every kind and two at least."""
        name = next((n for n in ("num_hidden_layers", "n_layer", "num_layers") if n in own), None)
        count = values.get(name) if name else None
        if name is None or not isinstance(count, int) or count <= LAYERS:
            return {}
        listed = {
            key: list(value)
            for key, value in values.items()
            if isinstance(value, (list, tuple)) and len(value) == count and key in own
        }
        if not listed:
            return {}
        kinds = [tuple(str(value[at]) for value in listed.values()) for at in range(count)]
        first = {kind: at for at, kind in reversed(list(enumerate(kinds)))}
        chosen = sorted(first.values())[:KINDS]
        if len(chosen) < LAYERS:
            chosen = sorted({*chosen, *(at for at in range(count) if at not in chosen)})[:LAYERS]
            if chosen[0] != min(first.values()):
                chosen = [0, 1]
        return {name: len(chosen), **{k: [v[at] for at in chosen] for k, v in listed.items()}}


def tiny(
    model_type: str, widths: bool = True, images: bool = True, **changes: Any
) -> PreTrainedConfig:
    """Return the tiny configuration of a model type."""
    return Shrinking(widths, images).of(CONFIG_MAPPING[model_type](), **changes)
