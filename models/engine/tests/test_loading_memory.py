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
from torch.multiprocessing.reductions import StorageWeakRef

from interposer import Config, explain
from interposer_engine import Checkpoint, load

LOADING = Path(__file__).parents[3] / "benchmarks" / "loading.py"
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
TABLE_MIB = VOCAB * HIDDEN * 2 / 2**20  # of bfloat16
# Runs the benchmark, then measures a control in the same process: how many MiB the system reports
# for a plain tensor that has the size of the embedding.
SCRIPT = f"""
import importlib, json, sys
sys.path.insert(0, {str(LOADING.parent)!r})
sys.argv[0] = {str(LOADING)!r}
import torch
loading = importlib.import_module("loading")
loading.main()
before = loading.anonymous_bytes()
control = torch.ones({VOCAB}, {HIDDEN}, dtype=torch.bfloat16)
print(json.dumps((loading.anonymous_bytes() - before) / 2**20))
"""

Tensors = dict[str, torch.Tensor]
Stored = Callable[[int, int], Tensors]


def noise(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05)


def plain(outputs: int, inputs: int) -> Tensors:
    return {"weight": noise(outputs, inputs)}


def packed(outputs: int, inputs: int) -> Tensors:
    """Return the tensors of gptq: random packed weights, and the middle less one as zero points."""
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


def measured(path: Path, *options: str) -> tuple[dict[str, float], float]:
    """Return the results of the benchmark and the control, in MiB."""
    command = [sys.executable, "-c", SCRIPT, str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results, control = map(json.loads, done.stdout.splitlines()[-2:])
    return results, control


def shares(path: Path, quantization: str | None = None) -> bool:
    """Return True if the embedding reads the lm_head's weight, also a reordered one."""
    rows = explain(path, dtype="bfloat16", quantization=quantization).rows
    return any(row.choice.chosen.name.endswith("embedding_native") for row in rows)


def mib(sizes: dict[str, tuple[int, int]], bytes_per_weight: float) -> float:
    return BLOCKS * sum(a * b for a, b in sizes.values()) * bytes_per_weight / 2**20


def test_loading_keeps_two_tensors_of_the_checkpoint_at_most(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Checkpoint.stream
    storages: list[StorageWeakRef] = []
    counts: list[int] = []

    def num_alive() -> int:
        return sum(not storage.expired() for storage in storages)

    def watched(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
        for name, mapped in stream(checkpoint):
            tensor = mapped.clone()
            storages.append(StorageWeakRef(tensor.untyped_storage()))
            counts.append(num_alive())
            yield name, tensor
            del tensor

    monkeypatch.setattr(Checkpoint, "stream", watched)
    options: dict[str, Any] = {"quantization": "int8", "config": Config(packed="off")}
    lm = load(llama, cache_tokens=64, **options)
    assert len(counts) > 20
    assert max(counts) <= 2  # the tensor that was placed last goes when the next one is there
    assert num_alive() == 0
    assert lm.generate([[1, 2]], max_new_tokens=1)


linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to measure memory")


@linux
@pytest.mark.process
@pytest.mark.slow
def test_loading_packs_within_the_memory_of_the_packed_form(tmp_path: Path) -> None:
    write(tmp_path, packed, quantization_config=GPTQ)
    results, control = measured(tmp_path)
    # Half a byte for each code, and a scale of four for each group of 128. The head's weight is the
    # embedding's table, unless its kernel reorders it and the lookup's does not read that.
    least = mib(LINEARS, 0.5 + 4 / 128) + TABLE_MIB
    most = least + (0 if shares(tmp_path) else TABLE_MIB)
    assert 0.97 * least <= results["held_mib"] <= 1.03 * most
    # Next to the weights: the cache, a layer that is being packed, and the allocator's slack.
    assert results["load_peak_mib"] <= results["held_mib"] + control
    assert results["update_peak_mib"] <= results["held_mib"] + control
    # The largest unit is the embedding with the head.
    assert results["update_by_block_peak_mib"] <= 3 * control


@linux
@pytest.mark.process
@pytest.mark.slow
def test_quantizing_while_loading_never_holds_all_plain_weights(tmp_path: Path) -> None:
    write(tmp_path, plain)
    results, control = measured(tmp_path, "--quantization", "fp8")
    # Integers of 8 bits, which the head shares as the plain one does.
    least = mib(LINEARS, 1) + TABLE_MIB / 2
    most = least + (0 if shares(tmp_path, "fp8") else TABLE_MIB / 2)
    assert 0.97 * least <= results["held_mib"] <= 1.03 * most
    assert results["load_peak_mib"] <= results["held_mib"] + control
    # The plain weights of the linear layers alone take twice what is allowed.
    assert mib(LINEARS, 2) > 2 * control
