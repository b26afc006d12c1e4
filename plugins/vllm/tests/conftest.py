"""Engines of vLLM in processes of their own, and tiny models for them.

One process runs engine after engine, but for those with guesses by n-grams: these load numba, and
no engine of vLLM 0.32 starts afterwards, as it asks every object of every module for a kernel.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

PROGRAM = Path(__file__).with_name("engine_run.py")
RANK = 4
Runs = list[dict[str, Any]]


def start(runs: Runs, **variables: str) -> subprocess.CompletedProcess[str]:
    """Return the completed process that ran the engines, one after the other."""
    if importlib.util.find_spec("vllm") is None:
        pytest.fail("vLLM is not installed here. Try: make test-vllm")
    environment = {**os.environ, **variables}
    if "VLLM_CPU_OMP_THREADS_BIND" not in variables:
        environment.pop("OMP_NUM_THREADS", None)
    return subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps(runs)],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="session")
def started() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that starts engines with environment variables, and what they wrote."""
    return start


@pytest.fixture(scope="session")
def run_in_vllm() -> Callable[..., Runs]:
    """Return a function of runs and variables that returns what vLLM made of each run."""

    def run(runs: Runs, **variables: str) -> Runs:
        together = [asked for asked in runs if "speculative_config" not in asked["options"]]
        remaining_runs = iter(process(together, variables) if together else ())
        return [
            next(remaining_runs) if asked in together else process([asked], variables)[0]
            for asked in runs
        ]

    def process(runs: Runs, variables: dict[str, str]) -> Runs:
        done = start(runs, **variables)
        marked = (line for line in done.stdout.splitlines() if line.startswith("RESULT"))
        found: Runs = [json.loads(line.removeprefix("RESULT")) for line in marked]
        assert len(found) == len(runs), done.stdout[-4000:] + done.stderr[-8000:]
        return found

    return run


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model whose layers are wide enough for every kernel."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("llama")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapter(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an adapter as PEFT saves it, of attention and MLP, which changes what is said."""
    config = transformers.LlamaConfig.from_pretrained(llama)
    generator = torch.Generator().manual_seed(1)
    hidden, inner = config.hidden_size, config.intermediate_size
    narrow = hidden // 2  # two kv heads of four
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, narrow),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    stored = {}
    for number in range(config.num_hidden_layers):
        for name, (inputs, outputs) in sizes.items():
            front = f"base_model.model.model.layers.{number}.{name}"
            shapes = {"lora_A": (RANK, inputs), "lora_B": (outputs, RANK)}
            for part, shape in shapes.items():
                value = torch.randn(shape, generator=generator) / 8
                stored[f"{front}.{part}.weight"] = value
    folder = tmp_path_factory.mktemp("adapter")
    save_file(stored, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(name.rpartition(".")[2] for name in sizes),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
