"""Tiny random vision-language checkpoints that have no model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from models.adapt.tests.image_checkpoints import (
    LLAVA,
    PINPOINTS,
    QWEN_SIZE,
    SQUARE,
    TEXT,
    Family,
    _config,
    _text,
    _vision,
)

GRID_SIZES = {"size": {"height": 32, "width": 32}, "max_patches": 4}
GLM_TOKENS = (
    "<|image|>",
    "<|video|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
)


def _glm4v(ids: Mapping[str, int]) -> Any:
    rope = {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [1, 1, 2]}
    return transformers.Glm4vConfig(
        text_config={**TEXT, "rope_parameters": {**rope, "partial_rotary_factor": 1.0}},
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "patch_size": 14,
            "image_size": 56,
            "initializer_range": 0.2,
        },
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        image_start_token_id=ids["<|begin_of_image|>"],
        image_end_token_id=ids["<|end_of_image|>"],
        video_start_token_id=ids["<|begin_of_video|>"],
        video_end_token_id=ids["<|end_of_video|>"],
    )


FAMILIES: dict[str, Family] = {
    "aya_vision": Family(
        lambda ids: _config(
            "AyaVisionConfig",
            text_config={**_text("cohere2"), "layer_types": ["full_attention"] * 3},
            vision_config=_vision("siglip_vision_model"),
            image_token_id=ids["<|IMG_PATCH|>"],
            downsample_factor=2,
            adapter_layer_norm_eps=1e-6,
        ),
        "<image>",
        "AyaVisionProcessor",
        ("GotOcr2ImageProcessorPil", GRID_SIZES),
        (
            "<image>",
            "<|IMG_PATCH|>",
            "<|START_OF_IMG|>",
            "<|END_OF_IMG|>",
            "TILE",
            "TILE_GLOBAL",
        ),
        settings={"patch_size": 8, "img_size": 32, "downsample_factor": 2},
        pad_token="<image>",
    ),
    "lighton_ocr": Family(
        lambda ids: _config(
            "LightOnOcrConfig",
            text_config=_text("qwen3"),
            vision_config=_vision("pixtral", image_size=64, head_dim=8),
            image_token_id=ids["<|image_pad|>"],
            spatial_merge_size=2,
        ),
        "<|image_pad|>",
        "LightOnOcrProcessor",
        ("PixtralImageProcessorPil", {"size": {"longest_edge": 64}, "patch_size": 8}),
        ("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"),
        {
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        settings={"patch_size": 8, "spatial_merge_size": 2},
    ),
    "deepseek_vl": Family(
        lambda ids: _config(
            "DeepseekVLConfig",
            text_config=_text("llama"),
            vision_config=_vision("siglip_vision_model"),
            image_token_id=ids["<image_placeholder>"],
        ),
        "<image_placeholder>",
        "DeepseekVLProcessor",
        ("DeepseekVLImageProcessorPil", {"size": {"height": 32, "width": 32}, "min_size": 4}),
        ("<image_placeholder>",),
        {"image_token": "<image_placeholder>"},
        settings={"num_image_tokens": 16},
    ),
    "glm4v": Family(
        _glm4v,
        "<|begin_of_image|><|image|><|end_of_image|>",
        "Glm4vProcessor",
        ("Glm4vImageProcessorPil", {"size": QWEN_SIZE, "patch_size": 14}),
        GLM_TOKENS,
    ),
    "llava_onevision": Family(
        lambda ids: _config(
            "LlavaOnevisionConfig",
            text_config=_text("qwen2"),
            vision_config=_vision("siglip_vision_model"),
            image_token_id=ids["<image>"],
            video_token_id=ids["<video>"],
            image_grid_pinpoints=PINPOINTS,
        ),
        "<image>",
        "LlavaOnevisionProcessor",
        (
            "LlavaOnevisionImageProcessorPil",
            {"size": {"height": 32, "width": 32}, "image_grid_pinpoints": PINPOINTS},
        ),
        ("<image>", "<video>"),
        settings={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "vipllava": Family(
        lambda ids: _config(
            "VipLlavaConfig",
            text_config=_text("llama"),
            vision_config=_vision("clip_vision_model", projection_dim=16),
            image_token_id=ids["<image>"],
            image_seq_length=16,
            vision_feature_layers=[-2, -1, 1],
        ),
        "<image>",
        "LlavaProcessor",
        ("CLIPImageProcessorPil", SQUARE),
        ("<image>",),
        settings=LLAVA,
    ),
    "video_llama_3": Family(
        lambda ids: _config(
            "VideoLlama3Config",
            text_config=_text("qwen2"),
            vision_config=_vision("video_llama_3_vision", patch_size=14),
            image_token_id=ids["<image>"],
            video_token_id=ids["<video>"],
        ),
        "<image>",
        "VideoLlama3Processor",
        ("VideoLlama3ImageProcessorPil", {"size": QWEN_SIZE, "merge_size": 1}),
        ("<image>", "<video>"),
        {"image_token": "<image>", "video_token": "<video>"},
    ),
    "llava-gemma": Family(
        lambda ids: _config(
            "LlavaConfig",
            text_config=_text("gemma"),
            vision_config=_vision("clip_vision_model", projection_dim=16),
            image_token_id=ids["<image>"],
            image_seq_length=16,
        ),
        "<image>",
        "LlavaProcessor",
        ("CLIPImageProcessorPil", SQUARE),
        ("<image>",),
        settings=LLAVA,
    ),
}
"""Models whose images are vectors between those of the texts."""

REFUSED: dict[str, tuple[Family, str]] = {
    # The text around a picture depends on its neighbours.
    "idefics2": (
        Family(
            lambda ids: transformers.Idefics2Config(
                text_config=_text("mistral"),
                vision_config=_vision("idefics2_vision"),
                perceiver_config={
                    "resampler_n_latents": 4,
                    "resampler_depth": 1,
                    "resampler_n_heads": 2,
                    "resampler_head_dim": 8,
                    "num_key_value_heads": 1,
                    "hidden_size": 32,
                },
                image_token_id=ids["<image>"],
            ),
            "<image>",
            "Idefics2Processor",
            (
                "Idefics2ImageProcessorPil",
                {"size": {"shortest_edge": 16, "longest_edge": 32}, "do_image_splitting": False},
            ),
            ("<image>", "<fake_token_around_image>", "<end_of_utterance>"),
            settings={"image_seq_len": 4},
        ),
        "Idefics2Processor writes other tokens",
    ),
    # Tokens around a picture have embeddings of their own.
    "ovis2": (
        Family(
            lambda ids: _config(
                "Ovis2Config",
                text_config=_text("qwen2"),
                vision_config={
                    **_vision("ovis2_vision_model", hidden_stride=2, vocab_size=40),
                    "num_visual_indicator_tokens": 5,
                },
                image_token_id=ids["<IMG_ATOM>"],
                visual_indicator_token_ids=[
                    ids[f"<{name}>"]
                    for name in ("IMG_START", "IMG_GRID", "IMG_COL", "IMG_ROW", "IMG_END")
                ],
                hidden_size=32,
                vocab_size=TEXT["vocab_size"],
            ),
            "<image>",
            "Ovis2Processor",
            ("Ovis2ImageProcessorPil", {"size": {"height": 32, "width": 32}}),
            (
                "<image>",
                "<IMG_ATOM>",
                "<IMG_START>",
                "<IMG_GRID>",
                "<IMG_COL>",
                "<IMG_ROW>",
                "<IMG_END>",
            ),
            settings={"image_seq_length": 4},
        ),
        "in a trial, the logits of the image differ by",
    ),
    # The decoder attends to images in layers of their own.
    "mllama": (
        Family(
            lambda ids: _config(
                "MllamaConfig",
                text_config={
                    **TEXT,
                    "bos_token_id": 1,
                    "cross_attention_layers": [1],
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                },
                vision_config={
                    "hidden_size": 16,
                    "intermediate_size": 24,
                    "num_hidden_layers": 2,
                    "num_global_layers": 1,
                    "attention_heads": 2,
                    "image_size": 32,
                    "patch_size": 8,
                    "vision_output_dim": 48,
                    "intermediate_layers_indices": [0, 1],
                    "supported_aspect_ratios": [[1, 1]],
                    "max_num_tiles": 1,
                },
                image_token_index=ids["<|image|>"],
            ),
            "<|image|>",
            "MllamaProcessor",
            (
                "MllamaImageProcessorPil",
                {"size": {"height": 32, "width": 32}, "max_image_tiles": 1},
            ),
            ("<|image|>", "<|python_tag|>"),
        ),
        "MllamaForConditionalGeneration has no get_image_features",
    ),
    # The image processor needs torchvision.
    "cohere2_vision": (
        Family(
            lambda ids: _config(
                "Cohere2VisionConfig",
                text_config={**_text("cohere2"), "layer_types": ["full_attention"] * 3},
                vision_config=_vision("siglip_vision_model"),
                image_token_id=ids["<image>"],
                downsample_factor=2,
                alignment_intermediate_size=64,
            ),
            "<image>",
            "Cohere2VisionProcessor",
            ("Cohere2VisionImageProcessor", GRID_SIZES),
            ("<image>", "<boi>", "<eoi>", "<eol>"),
            {
                "image_token": "<image>",
                "boi_token": "<boi>",
                "eoi_token": "<eoi>",
                "img_line_break_token": "<eol>",
            },
        ),
        "transformers does not load the processor",
    ),
}
"""Models that run with texts only, and the beginning of the reason."""
