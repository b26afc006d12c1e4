"""Write a model of random weights in a known shape, to measure speed on.

python benchmarks/random_model.py qwen3-0.6b DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

SHAPES: dict[str, Any] = {
    "llama-100m": lambda: LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=4096,
    ),
    "llama-3-8b": lambda: LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    "qwen3-0.6b": lambda: Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
}


def main() -> None:
    """Write the model in bfloat16, with a tokenizer that is only there to be loaded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[arguments.shape](), dtype=torch.bfloat16)
    model.save_pretrained(arguments.directory)
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer.save(str(arguments.directory / "tokenizer.json"))
    print(f"{sum(p.numel() for p in model.parameters())} parameters in {arguments.directory}")


if __name__ == "__main__":
    main()
