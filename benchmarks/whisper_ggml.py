"""Write a Whisper checkpoint as a file of whisper.cpp.

Source: ``whisper_model_load`` of whisper.cpp 1.8.5 (``src/whisper.cpp``), which reads, all numbers
little-endian:

- int32: the magic 0x67676d6c, then vocabulary, and of the encoder positions, width, heads, blocks,
  of the decoder the same, mel bands, and 1 for weights in float16;
- the mel filters: int32 bands and frequencies, then float32 ``[bands, frequencies]``;
- the texts of tokens: int32 count, then an int32 length and the bytes of each. whisper.cpp names
  the tokens after these itself;
- the tensors until the end: int32 dimensions, length of the name and 0 for float32 or 1 for
  float16; int32 sizes, the last dimension first; the name, then the numbers.

Biases, norms and positions are always float32. A bias of a convolution has the shape ``[n, 1]``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import WhisperFeatureExtractor

__all__ = ["write_whisper_ggml"]

_MAGIC = 0x67676D6C
_FIRST_SPECIAL_TOKEN = 50257
_MODULES = {
    "self_attn.k_proj": "attn.key",
    "self_attn.q_proj": "attn.query",
    "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out",
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn.k_proj": "cross_attn.key",
    "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
    "final_layer_norm": "mlp_ln",
}
_OTHERS = {
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "encoder.layer_norm.weight": "encoder.ln_post.weight",
    "encoder.layer_norm.bias": "encoder.ln_post.bias",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
    "decoder.embed_tokens.weight": "decoder.token_embedding.weight",
    "decoder.layer_norm.weight": "decoder.ln.weight",
    "decoder.layer_norm.bias": "decoder.ln.bias",
}


def write_whisper_ggml(source: Path, target: Path) -> None:
    """Write a Hugging Face checkpoint of Whisper for whisper.cpp, with matrices in float16.

    Args:
        source: folder with ``config.json``, ``model.safetensors``, ``tokenizer.json`` and
            ``preprocessor_config.json``.
        target: the file.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    extractor: Any = WhisperFeatureExtractor.from_pretrained(source)
    filters = np.asarray(extractor.mel_filters, dtype="<f4").T
    with target.open("wb") as file:
        file.write(_numbers(_MAGIC, *_sizes(config), 1))
        file.write(_numbers(*filters.shape) + filters.tobytes())
        texts = _token_texts(source)
        file.write(_numbers(len(texts)))
        for text in texts:
            file.write(_numbers(len(text)) + text)
        for name, values in _tensors(source):
            small = values.ndim < 3 and ("bias" in name or "positional" in name)
            is_half = not small and values.ndim > 1
            shape = values.shape[::-1]
            header = _numbers(len(shape), len(name), is_half, *shape)
            data = np.ascontiguousarray(values, dtype="<f2" if is_half else "<f4")
            file.write(header + name.encode() + data.tobytes())


def _numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _sizes(config: dict[str, Any]) -> tuple[int, ...]:
    width = config["d_model"]
    return (
        config["vocab_size"],
        config["max_source_positions"],
        width,
        config["encoder_attention_heads"],
        config["encoder_layers"],
        config["max_target_positions"],
        width,
        config["decoder_attention_heads"],
        config["decoder_layers"],
        config["num_mel_bins"],
    )


def _token_texts(source: Path) -> list[bytes]:
    """Return the bytes of every text token; the others keep their name."""
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    # Byte-level texts write a byte below 33, and some others, as a character from 256 on: all in
    # ascending order.
    shown = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [ord(character) for character in shown if ord(character) < 256]
    others = sorted(set(range(256)) - set(plain))
    byte_of = {chr(byte): byte for byte in plain}
    byte_of |= {chr(256 + number): byte for number, byte in enumerate(others)}
    return [
        bytes(byte_of[character] for character in text)
        for text, number in vocabulary
        if number < _FIRST_SPECIAL_TOKEN
    ]


def _tensors(source: Path) -> Iterator[tuple[str, Any]]:
    """Yield names and float32 values as whisper.cpp expects them."""
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.startswith("proj_out"):  # the same as the embedding of tokens
            continue
        short = name.removeprefix("model.")
        part, _, rest = short.partition(".")
        values = tensor.float().numpy()
        if rest.startswith("layers."):
            _, number, module = rest.split(".", 2)
            module, _, kind = module.rpartition(".")
            yield f"{part}.blocks.{number}.{_MODULES[module]}.{kind}", values
        elif rest in ("conv1.bias", "conv2.bias"):
            yield short, values[:, None]
        else:
            yield _OTHERS.get(short, short), values
