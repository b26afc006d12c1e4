"""Anonymous memory of a process that loads a model, as the system reports it.

Each process also measures a control: how much the system reports for a plain tensor of known size.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models.conftest import write_checkpoint
from transformers import LlamaConfig

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc/self/status"),
    pytest.mark.process,
    pytest.mark.slow,
]
VOCABULARY = 192 * 1024
# Reads the plan first, which imports what loading needs, and samples as often as it can.
SCRIPT = """
import json, re, sys, threading
import torch
import interposer_engine
from interposer import Config

def anonymous():
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\\s+(\\d+)", status.read())[1]) << 10

def watch():
    while not ended.wait(0.001):
        peaks.append(anonymous())

path, tokens, control_bytes, quantization = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4]
settings = {"config": Config(packed="on"), "quantization": quantization or None}
interposer_engine.plan(path, **settings)
ended, peaks = threading.Event(), []
before = anonymous()
watching = threading.Thread(target=watch)
watching.start()
lm = interposer_engine.load(path, cache_tokens=tokens, max_sequences=1, **settings)
ended.set()
watching.join()
loaded = anonymous()
lm.generate([[1, 2, 3]], max_new_tokens=2)
first = anonymous()
lm.generate([[at % 200 for at in range(tokens // 2)]], max_new_tokens=2)
for thread in threading.enumerate():
    if thread.name == "interposer-packed":
        thread.join()
(note,) = [note for note in lm.resolver.notes if note.startswith("KV cache")]
longer = anonymous()
control = torch.ones(control_bytes, dtype=torch.uint8)
print(json.dumps({
    "loading": max([*peaks, loaded]) - before,
    "first": first - loaded,
    "longer": longer - first,
    "control": anonymous() - longer,
    "cache": note,
    "packed": [note for note in lm.resolver.notes if note.startswith("packed")],
}))
"""


def measured(path: Path, tokens: int, control_bytes: int, quantization: str = "") -> dict[str, Any]:
    """Return how far memory rises in each step, and for a plain tensor of ``control_bytes``."""
    command = [sys.executable, "-c", SCRIPT, str(path), str(tokens), str(control_bytes)]
    done = subprocess.run([*command, quantization], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def write_llama(folder: Path, **sizes: Any) -> None:
    config = LlamaConfig(intermediate_size=64, **sizes)
    write_checkpoint(config, folder)


def test_a_cache_takes_memory_as_tokens_are_stored(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 256}
    write_llama(tmp_path, **heads, **sizes, max_position_embeddings=4096)
    # Of float32: 4 layers, 8 heads of 128 numbers, keys and values.
    cache_bytes = 4096 * 4 * 8 * 128 * 2 * 4
    found = measured(tmp_path, 4096, cache_bytes // 2)
    assert found["cache"] == "KV cache of 4096 tokens, 128.0 MiB, as cache_tokens says"
    assert found["first"] < 0.4 * found["control"]  # a huge page, and memory of a first step
    assert found["longer"] > 0.75 * found["control"]  # half of the cache is filled


def test_packed_weights_are_no_anonymous_memory(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    write_llama(tmp_path, **heads, **sizes, max_position_embeddings=64)
    for _ in range(2):  # packed, and mapped
        # Quantized values of a byte each; packed they take as much again.
        found = measured(tmp_path, 64, 256 * VOCABULARY, "int8")
        assert found["loading"] < 0.7 * found["control"]
        assert "mapped from" in found["packed"][0]
