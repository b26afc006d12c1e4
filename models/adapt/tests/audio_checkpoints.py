"""Tiny random speech checkpoints with decoders, for tests of audio encoders.

A window has 2 seconds, and becomes 50 tokens in Qwen2-Audio and 25 in Voxtral.
"""

from __future__ import annotations

import struct
import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from models.adapt.tests.image_checkpoints import TEXT, write_tokenizer
from transformers import BatchFeature, WhisperFeatureExtractor

RATE = 16000
WINDOW_SECONDS = 2
POSITIONS = 100
BINS = 16
_EXTRACTOR = {"feature_size": BINS, "chunk_length": WINDOW_SECONDS, "sampling_rate": RATE}
TEMPLATE = """\
{%- for message in messages %}[{{ message.role }}]
{%- if message.content is string %}{{ message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == "text" %}{{ part.text }}{% else %}PLACEHOLDER{% endif %}
{%- endfor %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}
"""


@dataclass(frozen=True)
class AudioFamily:
    """A speech model with a decoder in small.

    Attributes:
        model_class: the model of transformers.
        config: creates the config, given the token ids of ``specials`` by text.
        specials: texts of special tokens.
        placeholder: text of a sound in a prompt, as chat templates write it.
    """

    model_class: Any
    config: Callable[[Mapping[str, int]], Any]
    specials: tuple[str, ...]
    placeholder: str


_SIZES = {"num_mel_bins": BINS, "max_source_positions": POSITIONS, "initializer_range": 0.2}

FAMILIES: dict[str, AudioFamily] = {
    "qwen2-audio": AudioFamily(
        transformers.Qwen2AudioForConditionalGeneration,
        lambda ids: transformers.Qwen2AudioConfig(
            audio_config={
                "model_type": "qwen2_audio_encoder",
                "d_model": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 24,
                **_SIZES,
            },
            text_config={"model_type": "qwen2", **TEXT},
            audio_token_index=ids["<|AUDIO|>"],
        ),
        ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
    ),
    "voxtral": AudioFamily(
        transformers.VoxtralForConditionalGeneration,
        lambda ids: transformers.VoxtralConfig(
            audio_config={
                "model_type": "voxtral_encoder",
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                **_SIZES,
            },
            text_config={"model_type": "llama", **TEXT},
            audio_token_id=ids["[AUDIO]"],
        ),
        ("[BEGIN_AUDIO]", "[AUDIO]"),
        "[BEGIN_AUDIO][AUDIO]",
    ),
}


def write_checkpoint(family: AudioFamily, path: Path) -> tuple[Any, Any]:
    """Write a random checkpoint with tokenizer and chat template.

    Returns: transformers' model and tokenizer.
    """
    path.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(path, family.specials, {})
    WhisperFeatureExtractor(**_EXTRACTOR).save_pretrained(path)
    template = TEMPLATE.replace("PLACEHOLDER", family.placeholder)
    (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    torch.manual_seed(0)
    model = family.model_class(family.config(ids)).eval()
    model.save_pretrained(path)
    return model, transformers.AutoTokenizer.from_pretrained(path)


def model_inputs(model: Any, tokenizer: Any, text: str, sounds: Sequence[Any]) -> Any:
    """Return the inputs that transformers' processor computes for a prompt.

    Args:
        sounds: samples ``[S]`` float32 of each sound, as NumPy arrays.
    """
    extractor = WhisperFeatureExtractor(**_EXTRACTOR)
    if model.config.model_type == "qwen2_audio":
        processor = transformers.Qwen2AudioProcessor(extractor, tokenizer)
        return processor(
            text=[text],
            audio=[*sounds] or None,
            sampling_rate=RATE,
            return_tensors="pt",
            add_special_tokens=False,
        )
    # Voxtral's processor writes the tokens by a library that reads the published vocabulary only.
    window = WINDOW_SECONDS * RATE
    pieces = text.split("[AUDIO]")
    for index, samples in enumerate(sounds):
        pieces[index] += "[AUDIO]" * (-(-len(samples) // window) * POSITIONS // 4)
    ids = tokenizer("".join(pieces), add_special_tokens=False, return_tensors="pt")
    inputs = {"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"]}
    if sounds:
        voxtral: Any = transformers.VoxtralProcessor
        inputs["input_features"] = voxtral._retrieve_input_features(
            SimpleNamespace(feature_extractor=extractor),
            sounds,
            2 * POSITIONS,
            sampling_rate=RATE,
            padding=True,
            truncation=False,
            pad_to_multiple_of=window,
            return_tensors="pt",
        )
    return BatchFeature(inputs)


def samples_of(seconds: float, seed: int = 0) -> Any:
    """Return 16-bit samples of a few sines and noise."""
    generator = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    hertz = generator.uniform(100, 4000, (5, 1))
    values = np.sin(2 * np.pi * hertz * times).mean(0) + generator.normal(0, 0.05, len(times))
    return (np.clip(values, -1, 1) * 32767).astype(np.int16)


def wav_of(samples: Any) -> bytes:
    """Return the WAV file of 16-bit samples."""
    content = BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    return content.getvalue()


def float_wav_of(samples: Any) -> bytes:
    """Return the WAV file of samples in float32."""
    data: bytes = samples.astype(np.float32).tobytes()
    header = struct.pack("<HHIIHH", 3, 1, RATE, RATE * 4, 4, 32)
    parts = b"WAVEfmt " + struct.pack("<I", len(header)) + header + b"data"
    parts += struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(parts)) + parts
