"""Write a model of random weights in a known shape, to measure speed on.

    python benchmarks/random_model.py qwen3-0.6b DIR [--device cuda] [--plan]

Weights are drawn on the device, since a processor draws 8 billion numbers in minutes. With
``--plan`` there are none: enough for whatever plans a model without reading weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Mamba2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

_SHARD_BYTES = 4 << 30

SHAPES: dict[str, Any] = {
    "tiny": lambda: LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=256,
        max_position_embeddings=512,
    ),
    # Blocks enough to take turns in buffers.
    "tiny-deep": lambda: LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=9,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=256,
        max_position_embeddings=512,
    ),
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
    # Sixteen experts of which four are asked: 0.9 billion parameters, 0.4 of them in a step.
    "qwen3-moe-16e": lambda: Qwen3MoeConfig(
        hidden_size=1024,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        moe_intermediate_size=768,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        vocab_size=32000,
        max_position_embeddings=8192,
    ),
    # As many layers and as large heads as DeepSeek-V2-Lite has, and fewer, smaller experts: 1.3
    # billion parameters, 0.8 of them in a step. llama.cpp takes 27 layers for a sign of this model.
    "deepseek-v2-lite-cut": lambda: DeepseekV2Config(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_intermediate_size=512,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=2,
        first_k_dense_replace=1,
        topk_method="greedy",
        routed_scaling_factor=1.0,
        norm_topk_prob=False,
        vocab_size=32000,
        max_position_embeddings=8192,
    ),
    # Heads, states and experts are as large as those of Qwen3-Next-80B-A3B, of which there are 8
    # layers in place of 48 and 32 experts in place of 512: 1.2 billion parameters, 0.6 in a step.
    "qwen3-next-cut": lambda: Qwen3NextConfig(
        num_hidden_layers=8,
        num_experts=32,
        vocab_size=32000,
        max_position_embeddings=8192,
    ),
    "gemma-3-1b": lambda: Gemma3TextConfig(
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=262144,
        max_position_embeddings=32768,
    ),
    "qwen3.5-0.8b": lambda: Qwen3_5TextConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        vocab_size=248320,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "mamba2-370m": lambda: Mamba2Config(
        hidden_size=1024,
        num_hidden_layers=48,
        num_heads=32,
        head_dim=64,
        state_size=128,
        n_groups=1,
        vocab_size=50288,
        tie_word_embeddings=True,
    ),
}


def write_model(shape: str, folder: Path, device: str = "cpu", plan: bool = False) -> int:
    """Write the model in bfloat16, with a tokenizer that is only there to be loaded.

    Args:
        plan: write no weight, but the empty file that whoever plans wants to see.
    Returns: the number of its parameters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer.save(str(folder / "tokenizer.json"))
    if plan:
        (folder / "model.safetensors").touch()
    else:
        _write_weights(model, folder, device)
    return sum(parameter.numel() for parameter in model.parameters())


def _write_weights(model: Any, folder: Path, device: str) -> None:
    index: dict[str, str] = {}
    for number, shard in enumerate(_shards(model, device), 1):
        file = f"model-{number:05}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
    facts = {"metadata": {}, "weight_map": index}
    text = json.dumps(facts, indent=1)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _shards(model: Any, device: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights as transformers draws them: norms of ones, all else of a normal law."""
    generator = torch.Generator(device).manual_seed(0)
    spread = model.config.initializer_range
    shard: dict[str, torch.Tensor] = {}
    size = 0
    # A tied weight is one parameter under its first name, which is that of the embedding.
    for name, parameter in model.named_parameters():
        weight = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        if parameter.ndim == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, spread, generator=generator)
        shard |= _stored(name, weight.cpu())
        size += weight.nbytes
        if size > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _stored(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a weight as checkpoints hold it: of experts that are one parameter, each apart."""
    layer, _, kind = name.rpartition(".experts.")
    if not layer or weight.ndim != 3:
        return {name: weight}
    found = {}
    for number, expert in enumerate(weight):
        parts = {"down_proj": expert}
        if kind == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
        for part, held in parts.items():
            found[f"{layer}.experts.{number}.{part}.weight"] = held.contiguous()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plan", action="store_true", help="write no weights")
    given = parser.parse_args()
    number = write_model(given.shape, given.directory, given.device, given.plan)
    print(f"{number} parameters in {given.directory}")


if __name__ == "__main__":
    main()
