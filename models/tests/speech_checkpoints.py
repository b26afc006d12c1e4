"""Small Whisper checkpoints with random weights, with the tokens and settings of released ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from models.conftest import write_tokenizer
from tokenizers import AddedToken, Tokenizer
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

POSITIONS = 50
"""Encoder positions, each of 20 ms: a window has one second."""
SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>"),
    *("<|transcribe|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
TOKENS = {text: 256 + index for index, text in enumerate(SPECIAL)}
FIRST_TIMESTAMP = 256 + len(SPECIAL)
VOCABULARY = FIRST_TIMESTAMP + POSITIONS + 1
CONFIG: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "vocab_size": VOCABULARY,
    "num_mel_bins": 80,
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "max_source_positions": POSITIONS,
    "max_target_positions": 64,
    "init_std": 0.1,
    "decoder_start_token_id": TOKENS["<|startoftranscript|>"],
    "bos_token_id": TOKENS["<|endoftext|>"],
    "eos_token_id": TOKENS["<|endoftext|>"],
    "pad_token_id": TOKENS["<|endoftext|>"],
}
GENERATION: dict[str, Any] = {
    "decoder_start_token_id": TOKENS["<|startoftranscript|>"],
    "bos_token_id": TOKENS["<|endoftext|>"],
    "eos_token_id": TOKENS["<|endoftext|>"],
    "pad_token_id": TOKENS["<|endoftext|>"],
    "is_multilingual": True,
    "lang_to_id": {text: TOKENS[text] for text in ("<|en|>", "<|de|>", "<|fr|>")},
    "task_to_id": {text: TOKENS[f"<|{text}|>"] for text in ("transcribe", "translate")},
    "no_timestamps_token_id": TOKENS["<|notimestamps|>"],
    "prev_sot_token_id": TOKENS["<|startofprev|>"],
    "max_initial_timestamp_index": 10,
    "suppress_tokens": [1, 2, 7, *(TOKENS[text] for text in SPECIAL[1:-1])],
    "begin_suppress_tokens": [220, TOKENS["<|endoftext|>"]],
}


def write_speech_model(
    path: Path, config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None
) -> WhisperForConditionalGeneration:
    """Write a checkpoint, and return transformers' own model of it."""
    fields = {**CONFIG, **(config or {})}
    torch.manual_seed(11)
    model = WhisperForConditionalGeneration(WhisperConfig(**fields)).eval().to(torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or "bias" in name:
                tensor.add_(0.05 * torch.randn_like(tensor))
            elif any(part in name for part in ("q_proj", "v_proj", "out_proj", "decoder.embed_p")):
                tensor.mul_(4)  # else a tied head names the newest token again and again
    model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(fields))
    merged = {**GENERATION, **(generation or {})}
    settings = {name: value for name, value in merged.items() if value is not None}
    (path / "generation_config.json").write_text(json.dumps(settings))
    frames = 2 * fields["max_source_positions"]
    WhisperFeatureExtractor(
        feature_size=fields["num_mel_bins"], chunk_length=frames * 160 // 16000
    ).save_pretrained(path)
    write_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    timestamps = [f"<|{0.02 * step:.2f}|>" for step in range(POSITIONS + 1)]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in timestamps])
    tokenizer.save(str(path / "tokenizer.json"))
    loaded: Any = type(model).from_pretrained(path)  # with the settings of generation
    evaluated: WhisperForConditionalGeneration = loaded.eval()
    return evaluated
