"""Adapting needs little memory in addition to the model, measured in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from interposer_cpu import native

VOCAB, HIDDEN = 1 << 17, 512

SCRIPT = f"""
import json
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from interposer_adapt import adapt
from interposer_ops.devices import host_memory

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))

def model(vocab, hidden):
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

adapt(model(256, 64))  # imports, and has plugins examined
large = model({VOCAB}, {HIDDEN})
host_memory.trim()
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
handle = adapt(large)
kernel = handle.places[0].kernel
after, peak = status("VmRSS"), status("VmHWM")
control = torch.ones({VOCAB}, {HIDDEN}, dtype=torch.bfloat16)
print(json.dumps([after - before, peak - before, status("VmRSS") - after, kernel]))
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to measure memory")
@pytest.mark.skipif(bool(native.why_absent()), reason="needs the native kernels, which pack tables")
def test_a_table_is_never_in_memory_three_times() -> None:
    command = [sys.executable, "-c", SCRIPT]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    risen, peak, table, kernel = json.loads(process.stdout.splitlines()[-1])
    assert "native" in kernel
    # Half a table is for imported modules, parts of a check, and rounding to huge pages.
    assert risen <= 0.5 * table
    # Plain and packed; a third one would be there to compare them.
    assert peak <= 1.5 * table
