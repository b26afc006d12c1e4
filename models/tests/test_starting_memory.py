"""Anonymous memory of a process that loads a model, told by the system."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models.tests.conftest import write_checkpoint
from transformers import LlamaConfig

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc/self/status")
MIB = 1 << 20
VOCABULARY = 192 * 1024
# Reads the plan first, which imports what loading needs, and samples as often as it can.
SCRIPT = """
import json, re, sys, threading
import interposer_models
from interposer import Config

def anonymous():
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\\s+(\\d+)", status.read())[1]) << 10

def watch():
    while not ended.wait(0.001):
        peaks.append(anonymous())

path, tokens, quantization, packed = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
settings = {"config": Config(packed=packed), "quantization": quantization or None}
interposer_models.plan(path, **settings)
ended, peaks = threading.Event(), []
before = anonymous()
watching = threading.Thread(target=watch)
watching.start()
lm = interposer_models.load(path, cache_tokens=tokens, max_sequences=1, **settings)
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
rises = [max([*peaks, loaded]) - before, first - loaded, anonymous() - first]
print(json.dumps([*rises, note, [n for n in lm.resolver.notes if n.startswith("packed")]]))
"""


def rises(path: Path, tokens: int, quantization: str = "", packed: str = "on") -> list[Any]:
    command = [sys.executable, "-c", SCRIPT, str(path), str(tokens), quantization, packed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_llama(folder: Path, **sizes: Any) -> None:
    config = LlamaConfig(intermediate_size=64, **sizes)
    write_checkpoint(config, folder)


@linux
def test_a_cache_takes_memory_as_tokens_are_stored(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 256}
    write_llama(tmp_path, **heads, **sizes, max_position_embeddings=4096)
    _, first, longer, note, _ = rises(tmp_path, 4096)
    # Of float32: 4 layers, 8 heads of 128 numbers, keys and values.
    assert note == "KV cache of 4096 tokens, 128.0 MiB, as cache_tokens says"
    assert first < 24 * MIB  # one huge page, and what a first step takes besides
    assert longer > 48 * MIB  # half of the cache


@linux
@pytest.mark.slow
def test_packed_weights_are_no_anonymous_memory(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    write_llama(tmp_path, **heads, **sizes, max_position_embeddings=64)
    for _ in range(2):  # packed, and mapped
        loading, *_, notes = rises(tmp_path, 64, "int8")
        # Codes of a byte each are 48 MiB, and as much again packed.
        assert loading < 32 * MIB
        assert "mapped from" in notes[0]
