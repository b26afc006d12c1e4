"""Loading needs little memory, measured in a process of its own on models like Qwen3-0.6B."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from interposer import explain

LOADING = Path(__file__).parents[2] / "benchmarks" / "loading.py"
HIDDEN, INNER, BLOCKS, HEADS, KV_HEADS, HEAD, VOCAB = 1024, 3072, 28, 16, 8, 128, 151936
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
# Outputs and inputs.
LINEARS = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
# Beside the weights: the cache, one layer on the way and its temporaries, the allocator's slack.
ROOM_MIB = 300

Tensors = dict[str, torch.Tensor]
Stored = Callable[[int, int], Tensors]


def noise(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05)


def plain(outputs: int, inputs: int) -> Tensors:
    return {"weight": noise(outputs, inputs)}


def packed(outputs: int, inputs: int) -> Tensors:
    """Return what gptq stores: random codes, and the middle as every zero point, less one."""
    groups = inputs // 128
    return {
        "qweight": torch.empty(inputs // 8, outputs, dtype=torch.int32).random_(),
        "qzeros": torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.full((groups, outputs), 0.005, dtype=torch.float16),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // 128,
    }


def shards(stored: Stored) -> Iterator[Tensors]:
    for first in range(0, BLOCKS, 7):
        tensors: Tensors = {}
        for index in range(first, first + 7):
            prefix = f"model.layers.{index}"
            for name, shape in LINEARS.items():
                parts = stored(*shape).items()
                tensors |= {f"{prefix}.{name}.{key}": value for key, value in parts}
            for name, size in (
                ("input_layernorm", HIDDEN),
                ("post_attention_layernorm", HIDDEN),
                ("self_attn.q_norm", HEAD),
                ("self_attn.k_norm", HEAD),
            ):
                tensors[f"{prefix}.{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        yield tensors
    yield {
        "model.embed_tokens.weight": noise(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }


def write(path: Path, stored: Stored, **facts: Any) -> None:
    """Write a checkpoint shard by shard, so that this process stays small as well."""
    places: dict[str, str] = {}
    for index, tensors in enumerate(shards(stored)):
        name = f"model-{index}.safetensors"
        save_file(tensors, path / name)
        places |= dict.fromkeys(tensors, name)
    index_file = path / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": places}))
    (path / "config.json").write_text(json.dumps({**CONFIG, **facts}))
    Tokenizer(models.WordLevel({"x": 0}, unk_token="x")).save(str(path / "tokenizer.json"))


def measured(path: Path, *options: str) -> dict[str, float]:
    """Return the figures of the benchmark, in MiB."""
    command = [sys.executable, str(LOADING), str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def shares(path: Path, quantization: str | None = None) -> bool:
    """Return True if the embedding reads the lm_head's weight, also a reordered one."""
    rows = explain(path, dtype="bfloat16", quantization=quantization).rows
    return any(row.choice.chosen.name.endswith("embedding_native") for row in rows)


def mib(sizes: dict[str, tuple[int, int]], bytes_per_weight: float) -> float:
    return BLOCKS * sum(a * b for a, b in sizes.values()) * bytes_per_weight / 2**20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to measure memory")
def test_a_packed_checkpoint_takes_what_it_is_packed_to(tmp_path: Path) -> None:
    write(tmp_path, packed, quantization_config=GPTQ)
    figures = measured(tmp_path)
    table = VOCAB * HIDDEN * 2 / 2**20
    # Half a byte for each code, and a scale of four for each group of 128. The head's weight is the
    # embedding's table, unless its kernel reorders it and the lookup's does not read that.
    least = mib(LINEARS, 0.5 + 4 / 128) + table
    most = least + (0 if shares(tmp_path) else table)
    assert least - 20 <= figures["held_mib"] <= most + 20
    assert figures["load_peak_mib"] <= figures["held_mib"] + ROOM_MIB
    assert figures["update_peak_mib"] <= figures["held_mib"] + ROOM_MIB
    # The largest unit is the embedding with the head.
    assert figures["update_by_block_peak_mib"] <= 2 * table + ROOM_MIB


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to measure memory")
def test_quantizing_while_loading_never_holds_the_plain_weights_besides(tmp_path: Path) -> None:
    write(tmp_path, plain)
    figures = measured(tmp_path, "--quantization", "fp8")
    # Integers of 8 bits, which the head shares as the plain one does.
    table = VOCAB * HIDDEN / 2**20
    least = mib(LINEARS, 1) + table
    most = least + (0 if shares(tmp_path, "fp8") else table)
    assert least - 20 <= figures["held_mib"] <= most + 20
    assert figures["load_peak_mib"] <= figures["held_mib"] + ROOM_MIB
    # The plain weights of the linear layers alone would not fit into the room.
    assert mib(LINEARS, 2) > 2 * ROOM_MIB
