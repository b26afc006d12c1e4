"""Tiny random vision-language checkpoints with their processors, for tests of image encoders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 320
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """A vision-language model in small.

    Attributes:
        config: creates the config, given the token ids of ``specials`` by text.
        placeholder: text of a picture in a prompt, as chat templates write it.
        processor: name of the processor's class.
        image_processor: name and settings of the image processor.
        specials: texts of special tokens.
        names: attributes of the tokenizer, such as ``boi_token``, by text.
        settings: arguments of the processor.
        newlines: the tokenizer has a token for each short run of newlines.
        pad_token: text of the padding token, which some processors need.
        bos_token: text of the first token of a text.
        takes_texts: the processor also takes prompts without pictures.
    """

    config: Callable[[Mapping[str, int]], Any]
    placeholder: str
    processor: str
    image_processor: tuple[str, dict[str, Any]]
    specials: tuple[str, ...]
    names: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    newlines: bool = False
    pad_token: str | None = None
    bos_token: str | None = None
    takes_texts: bool = True


QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_SIZE = {"shortest_edge": 28 * 28, "longest_edge": 84 * 112}


def _qwen(
    name: str, vision: dict[str, Any], rope: dict[str, Any], **fields: Any
) -> Callable[..., Any]:
    def config(ids: Mapping[str, int]) -> Any:
        text = {
            **TEXT,
            **fields,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", **rope},
        }
        return getattr(transformers, name)(
            text_config=text,
            vision_config={"depth": 2, "num_heads": 2, "initializer_range": 0.2, **vision},
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )

    return config


def _config(name: str, **settings: Any) -> Any:
    return getattr(transformers, name)(**settings)


def _text(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, **TEXT}


def _vision(model_type: str, **settings: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "initializer_range": 0.2,
        **settings,
    }


GEMMA4_TOKENS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
GEMMA4_IMAGES = {"max_soft_tokens": 70, "patch_size": 8, "pooling_kernel_size": 2}


def _gemma4(ids: Mapping[str, int], **fields: Any) -> Any:
    text = {
        **TEXT,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 32,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        # Not 0, so that another token's per-layer embeddings would be noticed.
        "pad_token_id": 5,
        **fields,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    vision = _vision("gemma4_vision", **heads, pooling_kernel_size=2, position_embedding_size=256)
    del vision["image_size"]
    return _config(
        "Gemma4Config",
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image|>"],
        boi_token_id=ids["<|image>"],
        eoi_token_id=ids["<image|>"],
    )


PALIGEMMA = {"size": {"height": 32, "width": 32}, "image_seq_length": 16}


def _paligemma(kind: str, ids: Mapping[str, int]) -> Any:
    second = {"query_pre_attn_scalar": 8, "attn_logit_softcapping": None, "sliding_window": 512}
    # A tied head repeats the last token, because embeddings are scaled.
    text = {**_text(kind), "tie_word_embeddings": False, **(second if kind == "gemma2" else {})}
    return _config(
        "PaliGemmaConfig",
        text_config=text,
        vision_config=_vision("siglip_vision_model", vision_use_head=False),
        image_token_index=ids["<image>"],
        projection_dim=32,
        tie_word_embeddings=False,
    )


SQUARE = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
LLAVA = {
    "patch_size": 8,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}
PINPOINTS = [[32, 64], [64, 32], [64, 64]]
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
IDEFICS_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)
IDEFICS_SIZES = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}

QWEN3_5_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 32,
    "patch_size": 16,
    "num_position_embeddings": 64,
}
QWEN3_5_ROPE = {
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
    "partial_rotary_factor": 1.0,
}
QWEN3_5_TEXT = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

FAMILIES: dict[str, Family] = {
    "qwen2-vl": Family(
        _qwen(
            "Qwen2VLConfig",
            {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2, "patch_size": 14},
            {"mrope_section": [1, 1, 2]},
        ),
        "<|vision_start|><|image_pad|><|vision_end|>",
        "Qwen2VLProcessor",
        ("Qwen2VLImageProcessorPil", {"size": QWEN_SIZE}),
        QWEN_TOKENS,
    ),
    "qwen2.5-vl": Family(
        _qwen(
            "Qwen2_5_VLConfig",
            {
                "hidden_size": 16,
                "intermediate_size": 24,
                "out_hidden_size": 32,
                "patch_size": 14,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
            {"mrope_section": [1, 1, 2]},
        ),
        "<|vision_start|><|image_pad|><|vision_end|>",
        "Qwen2_5_VLProcessor",
        ("Qwen2VLImageProcessorPil", {"size": QWEN_SIZE}),
        QWEN_TOKENS,
    ),
    "qwen3-vl": Family(
        _qwen(
            "Qwen3VLConfig",
            {
                "hidden_size": 16,
                "intermediate_size": 24,
                "out_hidden_size": 32,
                "patch_size": 16,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
            {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
        ),
        "<|vision_start|><|image_pad|><|vision_end|>",
        "Qwen3VLProcessor",
        ("Qwen2VLImageProcessorPil", {"size": QWEN_SIZE, "patch_size": 16}),
        QWEN_TOKENS,
    ),
    "qwen3.5": Family(
        _qwen("Qwen3_5Config", QWEN3_5_VISION, QWEN3_5_ROPE, **QWEN3_5_TEXT),
        "<|vision_start|><|image_pad|><|vision_end|>",
        "Qwen3VLProcessor",
        ("Qwen2VLImageProcessorPil", {"size": QWEN_SIZE, "patch_size": 16}),
        QWEN_TOKENS,
    ),
    "qwen3.5-moe": Family(
        _qwen(
            "Qwen3_5MoeConfig",
            QWEN3_5_VISION,
            QWEN3_5_ROPE,
            **QWEN3_5_TEXT,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=24,
        ),
        "<|vision_start|><|image_pad|><|vision_end|>",
        "Qwen3VLProcessor",
        ("Qwen2VLImageProcessorPil", {"size": QWEN_SIZE, "patch_size": 16}),
        QWEN_TOKENS,
    ),
    "llava": Family(
        lambda ids: _config(
            "LlavaConfig",
            text_config=_text("llama"),
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
    "pixtral": Family(
        lambda ids: _config(
            "LlavaConfig",
            text_config=_text("mistral"),
            vision_config=_vision("pixtral", image_size=64, head_dim=8),
            image_token_id=ids["[IMG]"],
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        "[IMG]",
        "PixtralProcessor",
        ("PixtralImageProcessorPil", {"size": {"longest_edge": 64}, "patch_size": 8}),
        PIXTRAL_TOKENS,
        settings={"patch_size": 8},
    ),
    "mistral3": Family(
        lambda ids: _config(
            "Mistral3Config",
            text_config=_text("mistral"),
            vision_config=_vision("pixtral", image_size=64, head_dim=8),
            image_token_id=ids["[IMG]"],
            spatial_merge_size=2,
        ),
        "[IMG]",
        "PixtralProcessor",
        ("PixtralImageProcessorPil", {"size": {"longest_edge": 64}, "patch_size": 8}),
        PIXTRAL_TOKENS,
        settings={"patch_size": 8, "spatial_merge_size": 2},
    ),
    "ministral3": Family(
        lambda ids: _config(
            "Mistral3Config",
            text_config={**_text("ministral3"), "rope_parameters": MINISTRAL3_ROPE},
            vision_config=_vision("pixtral", image_size=64, head_dim=8),
            image_token_id=ids["[IMG]"],
            spatial_merge_size=2,
        ),
        "[IMG]",
        "PixtralProcessor",
        ("PixtralImageProcessorPil", {"size": {"longest_edge": 64}, "patch_size": 8}),
        PIXTRAL_TOKENS,
        settings={"patch_size": 8, "spatial_merge_size": 2},
    ),
    "llava-next": Family(
        lambda ids: _config(
            "LlavaNextConfig",
            text_config=_text("mistral"),
            vision_config=_vision("clip_vision_model", projection_dim=16),
            image_token_id=ids["<image>"],
            image_grid_pinpoints=PINPOINTS,
        ),
        "<image>",
        "LlavaNextProcessor",
        ("LlavaNextImageProcessorPil", {**SQUARE, "image_grid_pinpoints": PINPOINTS}),
        ("<image>",),
        settings=LLAVA,
    ),
    "gemma3": Family(
        lambda ids: _config(
            "Gemma3Config",
            text_config={**TEXT, "query_pre_attn_scalar": 8, "sliding_window": 32},
            vision_config=_vision("siglip_vision_model"),
            mm_tokens_per_image=4,
            image_token_id=ids["<image_soft_token>"],
            boi_token_index=ids["<start_of_image>"],
            eoi_token_index=ids["<end_of_image>"],
        ),
        "<start_of_image>",
        "Gemma3Processor",
        ("Gemma3ImageProcessorPil", {"size": {"height": 32, "width": 32}}),
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        settings={"image_seq_length": 4},
        newlines=True,
    ),
    "gemma4": Family(
        lambda ids: _gemma4(ids, hidden_size_per_layer_input=8, num_kv_shared_layers=2),
        "<|image|>",
        "Gemma4Processor",
        ("Gemma4ImageProcessorPil", GEMMA4_IMAGES),
        (*GEMMA4_TOKENS.values(), "<pad>"),
        GEMMA4_TOKENS,
        pad_token="<pad>",
    ),
    "gemma4-large": Family(
        lambda ids: _gemma4(
            ids, hidden_size_per_layer_input=0, use_bidirectional_attention="vision"
        ),
        "<|image|>",
        "Gemma4Processor",
        ("Gemma4ImageProcessorPil", GEMMA4_IMAGES),
        (*GEMMA4_TOKENS.values(), "<pad>"),
        GEMMA4_TOKENS,
        pad_token="<pad>",
    ),
    "paligemma": Family(
        lambda ids: _paligemma("gemma", ids),
        "<image>",
        "PaliGemmaProcessor",
        ("SiglipImageProcessorPil", PALIGEMMA),
        ("<image>", "<bos>"),
        {"image_token": "<image>"},
        newlines=True,
        bos_token="<bos>",
        takes_texts=False,
    ),
    "paligemma2": Family(
        lambda ids: _paligemma("gemma2", ids),
        "<image>",
        "PaliGemmaProcessor",
        ("SiglipImageProcessorPil", PALIGEMMA),
        ("<image>", "<bos>"),
        {"image_token": "<image>"},
        newlines=True,
        bos_token="<bos>",
        takes_texts=False,
    ),
    "idefics3": Family(
        lambda ids: transformers.Idefics3Config(
            text_config=_text("llama"),
            vision_config=_vision("idefics3_vision"),
            image_token_id=ids["<image>"],
            scale_factor=2,
        ),
        "<image>",
        "Idefics3Processor",
        ("Idefics3ImageProcessorPil", IDEFICS_SIZES),
        IDEFICS_TOKENS,
        settings={"image_seq_len": 4},
    ),
    "smolvlm": Family(
        lambda ids: transformers.SmolVLMConfig(
            text_config=_text("llama"),
            vision_config=_vision("smolvlm_vision"),
            image_token_id=ids["<image>"],
            scale_factor=2,
        ),
        "<image>",
        "SmolVLMProcessor",
        ("SmolVLMImageProcessorPil", IDEFICS_SIZES),
        IDEFICS_TOKENS,
        settings={"image_seq_len": 4},
    ),
    "internvl": Family(
        lambda ids: transformers.InternVLConfig(
            text_config=_text("qwen2"),
            vision_config=_vision("internvl_vision", image_size=[32, 32], patch_size=[8, 8]),
            image_token_id=ids["<IMG_CONTEXT>"],
            image_seq_length=4,
        ),
        "<IMG_CONTEXT>",
        "InternVLProcessor",
        ("GotOcr2ImageProcessorPil", {"size": {"height": 32, "width": 32}, "max_patches": 4}),
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        settings={"image_seq_length": 4},
    ),
    "llama4": Family(
        lambda ids: transformers.Llama4Config(
            text_config={
                **TEXT,
                "intermediate_size_mlp": 48,
                "num_local_experts": 2,
                "attention_chunk_size": 64,
            },
            vision_config={
                **_vision("llama4_vision_model", intermediate_size=64),
                "vision_output_dim": 24,
                "projector_input_dim": 24,
                "projector_output_dim": 24,
            },
            image_token_index=ids["<|patch|>"],
            boi_token_index=ids["<|image_start|>"],
            eoi_token_index=ids["<|image_end|>"],
        ),
        "<|image|>",
        "Llama4Processor",
        ("Llama4ImageProcessor", {"size": {"height": 32, "width": 32}, "max_patches": 4}),
        (
            "<|image|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|patch|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        settings={"patch_size": 8},
    ),
}


def write_checkpoint(family: Family, path: Path) -> tuple[Any, dict[str, int]]:
    """Write a random checkpoint with its processor; return transformers' model and special ids."""
    path.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(
        path,
        family.specials,
        family.names,
        newlines=family.newlines,
        pad_token=family.pad_token,
        bos_token=family.bos_token,
    )
    name, settings = family.image_processor
    # As text: the class of some models needs torchvision.
    pictures = {"image_processor_type": name, **settings}
    (path / "preprocessor_config.json").write_text(json.dumps(pictures), encoding="utf-8")
    processor = {"processor_class": family.processor, **family.settings}
    (path / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    torch.manual_seed(0)
    config = family.config(ids)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(path)
    return model, ids


def write_tokenizer(
    path: Path,
    specials: Sequence[str],
    names: Mapping[str, str],
    *,
    newlines: bool = False,
    pad_token: str | None = None,
    bos_token: str | None = None,
) -> dict[str, int]:
    """Write a tokenizer of bytes and special tokens; return the ids of the special tokens.

    Args:
        names: attributes of the tokenizer, such as ``boi_token``, by text.
        newlines: whether there is a token for each short run of newlines.
        pad_token: text of the padding token.
        bos_token: text of the first token of a text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    if newlines:
        tokenizer.add_tokens([AddedToken("\n" * n, normalized=False) for n in range(1, 6)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        extra_special_tokens=dict(names) or None,
        pad_token=pad_token,
        bos_token=bos_token,
    )
    fast.save_pretrained(path)
    ids: Any = fast.convert_tokens_to_ids([*specials])
    return dict(zip(specials, ids, strict=True))


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return a picture of random colours that vary smoothly."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(0, 256, (5, 7, 3), generator=generator, dtype=torch.uint8)
    return (
        Image.fromarray(coarse.numpy())
        .resize((width, height), Image.Resampling.BICUBIC)
        .convert(mode)
    )
