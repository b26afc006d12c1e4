"""Adapted models with weights sharded over several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapted_models import NARROW
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Starcoder2Config,
)

from interposer_adapt import adapt

EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": LlamaConfig(**NARROW),
    # Every projection has a bias, also row-parallel ones with summed results.
    "starcoder2": Starcoder2Config(**NARROW, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**NARROW),
    "tied": LlamaConfig(**NARROW, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**NARROW, **EXPERTS),
    # Caps and sinks of heads that are parted.
    "gemma2": Gemma2Config(**NARROW, head_dim=8),
    "gpt_oss": GptOssConfig(**NARROW, **EXPERTS, head_dim=8),
}


def run(folder: Path, *cases: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the results of each model in both processes."""
    for name in {case.partition(":")[2] for case in cases}:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
        for held, parameter in model.named_parameters():
            if held.endswith("bias"):
                torch.nn.init.normal_(parameter)
        model.save_pretrained(folder / name)
    script = Path(__file__).with_name("parallel_model.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), str(folder), *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300
    )
    assert completed.returncode == 0, completed.stderr[-6000:]
    return [outcome for process in json.loads(completed.stdout) for outcome in process.items()]


def check(outcome: dict[str, Any]) -> None:
    assert outcome["tokens"]
    # As far as float32 results of some twenty operations in a row may be apart.
    assert max(outcome["distances"]) <= 2e-5
    assert outcome["saved"]
    assert outcome["restored"]
    assert outcome["hooks"]
    assert outcome["engine"]
    assert "scales of parts are not those of the whole" in outcome["quantization"]


@pytest.mark.process
@pytest.mark.slow
def test_tensor_parallel_models_compute_the_same(tmp_path: Path) -> None:
    for _, outcome in run(tmp_path, "tp:llama", "tp:starcoder2"):
        check(outcome)
        assert outcome["linears"] >= 13
        assert outcome["left"] == []


@pytest.mark.process
@pytest.mark.slow
def test_sharded_experts_and_tied_tables_compute_the_same(tmp_path: Path) -> None:
    cases = ("tp:qwen2", "tp:tied", "tp:gemma2", "tp:gpt_oss", "tp:mixtral", "ep:mixtral")
    for name, outcome in run(tmp_path, *cases):
        check(outcome)
        # Rows of a table that is parted are looked up in all processes, so that it stays as it is.
        assert outcome["left"] == (["lm_head"] if name in ("tp:tied", "tp:gemma2") else [])
        if name.endswith(("mixtral", "gpt_oss")):
            assert outcome["experts"] == [True, True]


@torch.no_grad()
@pytest.mark.parametrize("kind", [MixtralConfig, GptOssConfig])
def test_experts_of_other_ranks_contribute_nothing(kind: Any) -> None:
    """transformers numbers them after this process's last expert, with any weight."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**NARROW, **EXPERTS)).eval()
    experts = model.model.layers[0].mlp.experts
    for name, parameter in experts.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    experts._is_expert_parallel = True
    ids = torch.tensor([[0, 4], [4, 4], [3, 1], [4, 2], [1, 0]])
    x, weights = torch.randn(5, 32), 0.1 + torch.rand(5, 2)
    expected = experts(x, ids, weights)
    adapted = adapt(model)
    assert next(p for p in adapted.places if p.name.endswith("experts")).is_bound
    actual = experts(x, ids, weights)
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert not actual[1].any()
