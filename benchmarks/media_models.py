"""Write the models of ``media.py`` with random weights, and the same weights for every engine.

    python benchmarks/media_models.py DIR [--shape full] [--formats hf gguf openvino whisper.cpp]

DIR/llava-bf16, DIR/whisper-base-f32 and the like are the checkpoints of interposer and
transformers. DIR/llava-bf16-gguf and -f16-gguf have a text model and a projector for llama.cpp,
DIR/llava-openvino is exported by optimum-intel, and DIR/whisper-base-f16.bin is whisper.cpp's file.
``--shape tiny`` writes small models of the same architectures, for tests. Existing files are kept.
If a format cannot be written, the reason is printed.

Weights of 16 bits are bfloat16. float16 has more bits for each, and a smaller range: numbers below
6e-5 lose some of their bits, and no weight of these models is near the upper limit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cpu_peers import ENVIRONMENTS, Unavailable, cache_folder, environment_python
from whisper_ggml import write_whisper_ggml

FORMATS = ("hf", "gguf", "openvino", "whisper.cpp")
IMAGE = "<image>"
TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<image>{% endif %}{% endfor %}{% endfor %}"
)
# Width, blocks and heads of the encoder and the decoder of Whisper. whisper.cpp has no smaller
# vocabulary than that of the multilingual models.
WHISPER = {"full": {"base": (512, 6, 8), "small": (768, 12, 12)}, "tiny": {"base": (64, 4, 2)}}
WHISPER_VOCABULARY = 51865
WHISPER_TOKENS = {
    "<|endoftext|>": 50257,
    "<|startoftranscript|>": 50258,
    "<|en|>": 50259,
    "<|transcribe|>": 50359,
    "<|notimestamps|>": 50363,
}
# CLIP-L/14 at 336 pixels with the text model of Qwen2-0.5B.
VISION: dict[str, dict[str, Any]] = {
    "full": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
        "projection_dim": 768,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
        "projection_dim": 64,
    },
}
TEXT: dict[str, dict[str, Any]] = {
    "full": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 1024,
    },
}
# gguf's names for the modules of a CLIP block and of a Qwen2 block.
_VISION_MODULES = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_TEXT_MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {
    "vision_tower.vision_model.embeddings.class_embedding": "v.class_embd",
    "vision_tower.vision_model.embeddings.patch_embedding.weight": "v.patch_embd.weight",
    "vision_tower.vision_model.embeddings.position_embedding.weight": "v.position_embd.weight",
    "vision_tower.vision_model.pre_layrnorm.weight": "v.pre_ln.weight",
    "vision_tower.vision_model.pre_layrnorm.bias": "v.pre_ln.bias",
    "multi_modal_projector.linear_1.weight": "mm.0.weight",
    "multi_modal_projector.linear_1.bias": "mm.0.bias",
    "multi_modal_projector.linear_2.weight": "mm.2.weight",
    "multi_modal_projector.linear_2.bias": "mm.2.bias",
    "language_model.model.embed_tokens.weight": "token_embd.weight",
    "language_model.model.norm.weight": "output_norm.weight",
}
_TYPES = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
}


def token_texts(size: int, specials: dict[str, int]) -> list[str]:
    """Return a text for each token: the bytes first, then a number, and the special tokens."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = {number: text for text, number in specials.items()}
    return [*symbols, *(texts.get(n, f"<{n}>") for n in range(len(symbols), size))]


def write_tokenizer(folder: Path, size: int, specials: dict[str, int]) -> None:
    """Write a tokenizer in which every byte is a token."""
    vocabulary = {name: number for number, name in enumerate(token_texts(size, specials))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_llava(folder: Path, shape: str) -> None:
    """Write the vision-language checkpoint with its processor and a chat template."""
    text = transformers.Qwen2Config(
        **TEXT[shape],
        # So large that a token depends on the image and the text, not on the last token alone.
        initializer_range=TEXT[shape]["hidden_size"] ** -0.5,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    vision = transformers.CLIPVisionConfig(**VISION[shape])
    image_token = TEXT[shape]["vocab_size"] - 1
    side, patch = VISION[shape]["image_size"], VISION[shape]["patch_size"]
    make: Any = transformers.LlavaConfig
    config = make(
        text_config=text,
        vision_config=vision,
        image_token_id=image_token,
        image_seq_length=(side // patch) ** 2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlavaForConditionalGeneration(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    _use_published_names(folder)
    write_tokenizer(folder, TEXT[shape]["vocab_size"], {IMAGE: image_token})
    pictures = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures), encoding="utf-8")
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": patch,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
        "image_token": IMAGE,
    }
    (folder / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _use_published_names(folder: Path) -> None:
    """Rename tensors and fields as published Llava checkpoints have them.

    transformers 4, which exports for OpenVINO, knows no others and would initialize such weights
    anew.
    """
    file = folder / "model.safetensors"
    inner = "vision_tower.vision_model."
    tensors = {
        name if name.startswith(inner) else name.replace("vision_tower.", inner): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"]
    text["rope_theta"] = text["rope_parameters"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def write_whisper(folder: Path, width: int, blocks: int, heads: int, dtype: torch.dtype) -> None:
    """Write a Whisper with its feature extractor and the tokens that decoding needs.

    Special tokens have embeddings of zeros, so that their logits are 0 and never the highest: the
    model ends no text, in any engine.
    """
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        d_model=width,
        encoder_layers=blocks,
        decoder_layers=blocks,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        vocab_size=WHISPER_VOCABULARY,
        init_std=1.2 * width**-0.5,
    )
    model: Any = transformers.WhisperForConditionalGeneration(config)
    end = WHISPER_TOKENS["<|endoftext|>"]
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[end:] = 0.0
    # Equal weights in 16 and in 32 bits.
    model.to(torch.bfloat16).to(dtype).save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size, WHISPER_TOKENS)
    generation = {
        "decoder_start_token_id": WHISPER_TOKENS["<|startoftranscript|>"],
        "eos_token_id": end,
        "pad_token_id": end,
        "bos_token_id": end,
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": WHISPER_TOKENS["<|en|>"]},
        "task_to_id": {"transcribe": WHISPER_TOKENS["<|transcribe|>"]},
        "no_timestamps_token_id": WHISPER_TOKENS["<|notimestamps|>"],
        "begin_suppress_tokens": [end],
        "suppress_tokens": [end],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")


def write_gguf(source: Path, folder: Path, kind: str) -> None:
    """Write ``text.gguf`` and ``mmproj.gguf`` for llama.cpp.

    Names and fields are those that ``tools/mtmd/clip.cpp`` of llama.cpp reads for the projector
    "mlp". It takes the vectors of the last block but one, as the checkpoint's
    ``vision_feature_layer`` of -2 does, and quick GELU if no other function is named.

    llama.cpp of llama-cpp-python 0.3.36 appends the class vector to the patches, but numbers
    positions and selects rows as if it was the first. Positions are therefore rotated here. The
    vectors are then those of the other engines without the first patch, and one of the class.
    """
    folder.mkdir()
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    pictures = json.loads((source / "preprocessor_config.json").read_text(encoding="utf-8"))
    text = gguf.GGUFWriter(folder / "text.gguf", "qwen2")
    vision = gguf.GGUFWriter(folder / "mmproj.gguf", "clip")
    _add_text_fields(text, config["text_config"])
    _add_vision_fields(vision, config["vision_config"], config["text_config"], pictures)
    stored_as, file_type = _TYPES[kind]
    for name, tensor in load_file(source / "model.safetensors").items():
        target = gguf_name(name)
        if target is None:
            continue
        # Only matrices have 16 bits: llama.cpp adds vectors and positions in 32 bits, and its
        # convolution of patches has no kernel for bfloat16.
        is_matrix = tensor.ndim == 2 and target != "v.position_embd.weight"
        dtype = stored_as if is_matrix else gguf.GGMLQuantizationType.F32
        writer = vision if target.startswith(("v.", "mm.")) else text
        values = tensor.float().numpy()
        if target == "v.position_embd.weight":
            values = np.roll(values, -1, axis=0)
        data = gguf.quants.quantize(values, dtype)
        writer.add_tensor(target, data, raw_dtype=dtype)
    for writer in (text, vision):
        writer.add_file_type(file_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def gguf_name(name: str) -> str | None:
    """Return llama.cpp's name of a Llava tensor; None if it reads none, such as the last norm."""
    if name in _OTHERS:
        return _OTHERS[name]
    for start, modules, prefix in (
        ("vision_tower.vision_model.encoder.layers.", _VISION_MODULES, "v.blk."),
        ("language_model.model.layers.", _TEXT_MODULES, "blk."),
    ):
        if name.startswith(start):
            number, _, rest = name.removeprefix(start).partition(".")
            module, _, kind = rest.rpartition(".")
            return f"{prefix}{number}.{modules[module]}.{kind}"
    if "post_layernorm" in name or name.startswith("lm_head"):
        return None
    raise Unavailable(f"no GGUF name for the tensor {name}")


def _add_text_fields(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add sizes and the vocabulary."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    texts = token_texts(config["vocab_size"], {IMAGE: config["vocab_size"] - 1})
    kinds = [gguf.TokenType.NORMAL] * len(texts)
    kinds[-1] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    # llama.cpp requires merges: this one joins two bytes that no prompt has.
    writer.add_token_merges([f"{texts[254]} {texts[255]}"])
    writer.add_add_bos_token(False)


def _add_vision_fields(
    writer: gguf.GGUFWriter, vision: dict[str, Any], text: dict[str, Any], pictures: dict[str, Any]
) -> None:
    """Add sizes and the colours by which pixels are scaled."""
    writer.add_type("mmproj")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    for name, value in {
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "block_count": vision["num_hidden_layers"],
        "projection_dim": text["hidden_size"],
        "attention.head_count": vision["num_attention_heads"],
    }.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision["layer_norm_eps"])
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", pictures[name])


def write_openvino(source: Path, target: Path, environments: Path) -> None:
    """Export the Llava by optimum-intel, with weights in float16."""
    python = environment_python(ENVIRONMENTS["openvino"], environments)
    command = [python.parent / "optimum-cli", "export", "openvino", "--model", source]
    options = ["--task", "image-text-to-text", "--weight-format", "fp16", target]
    done = subprocess.run(
        [str(part) for part in (*command, *options)], capture_output=True, text=True
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit {done.returncode}"]
        raise Unavailable(lines[-1])


def made(folder: Path, shape: str, formats: list[str], environments: Path) -> Iterator[str]:
    """Write the missing models; yield a line per model, with the reason of a failure."""
    llava = folder / "llava-bf16"
    parts: list[tuple[str, Path, Callable[[Path], object]]] = [
        ("hf", llava, partial(_into_folder, write=partial(write_llava, shape=shape))),
        *(
            ("gguf", folder / f"llava-{kind}-gguf", partial(write_gguf, llava, kind=kind))
            for kind in _TYPES
        ),
        (
            "openvino",
            folder / "llava-openvino",
            partial(write_openvino, llava, environments=environments),
        ),
    ]
    for name, (width, blocks, heads) in WHISPER[shape].items():
        source = folder / f"whisper-{name}-f32"
        for kind, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            make = partial(write_whisper, width=width, blocks=blocks, heads=heads, dtype=dtype)
            target = folder / f"whisper-{name}-{kind}"
            parts.append(("hf", target, partial(_into_folder, write=make)))
        target = folder / f"whisper-{name}-f16.bin"
        parts.append(("whisper.cpp", target, partial(write_whisper_ggml, source)))
    folder.mkdir(parents=True, exist_ok=True)
    for format_name, target, write in parts:
        if format_name not in formats:
            continue
        if target.exists():
            yield f"{target}: was there"
            continue
        unfinished = target.with_name(f"unfinished-{target.name}")
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        started = time.perf_counter()
        try:
            write(unfinished)
        except Unavailable as error:
            yield f"{target}: not made: {error}"
            continue
        unfinished.rename(target)
        yield f"{target}: {time.perf_counter() - started:.0f} s"


def _into_folder(folder: Path, write: Callable[[Path], object]) -> None:
    folder.mkdir()
    write(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=list(VISION), default="full")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--environments", type=Path, default=cache_folder())
    arguments = parser.parse_args()
    folder, environments = arguments.directory.absolute(), arguments.environments.absolute()
    for line in made(folder, arguments.shape, arguments.formats, environments):
        print(line, flush=True)


if __name__ == "__main__":
    main()
