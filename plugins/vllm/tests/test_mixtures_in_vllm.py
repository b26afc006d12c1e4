"""Mixtures generate the same tokens in vLLM with interposer's experts as with its own.

``make test-vllm`` runs this in an environment with vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

# One worker starts the engines.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600), pytest.mark.xdist_group("vllm")]

Runs = list[dict[str, Any]]

PROMPTS = [[5, 17, 99, 200, 31], [400, 401, 7, 8], [100, 22, 3, 4, 5, 6, 7, 8, 9, 10]]
TOKENS = 48
LAYERS = 2
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
# The width of experts of Mixtral is no multiple of what vLLM's kernel takes.
CONFIGS: dict[str, Callable[[], Any]] = {
    "Qwen3-MoE": lambda: Qwen3MoeConfig(
        **SIZES,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
    "Mixtral": lambda: MixtralConfig(
        **SIZES, intermediate_size=80, num_local_experts=4, num_experts_per_tok=2
    ),
    "Qwen2-MoE, with a shared expert": lambda: Qwen2MoeConfig(
        **SIZES,
        intermediate_size=256,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=False,
    ),
}
EXPERTS = {"Mixtral": "block_sparse_moe.experts"}
RUNS = [
    ("Qwen3-MoE", "eager"),
    ("Qwen3-MoE", "compiled"),
    ("Mixtral", "eager"),
    ("Mixtral", "compiled"),
    ("Qwen2-MoE, with a shared expert", "eager"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the model, options, prompts and number of tokens for each of ``RUNS``."""
    folders: dict[str, Path] = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        folders[name] = tmp_path_factory.mktemp("mixture")
        AutoModelForCausalLM.from_config(config()).save_pretrained(folders[name])
    return [
        {
            "model": str(folders[name]),
            "options": {"dtype": "float32", "enforce_eager": mode == "eager"},
            "prompts": PROMPTS,
            "tokens": TOKENS,
        }
        for name, mode in RUNS
    ]


@pytest.fixture(scope="module")
def own(runs: Runs, run_in_vllm: Callable[..., Runs]) -> Runs:
    """Return the results of vLLM alone for each run."""
    return run_in_vllm(runs, VLLM_PLUGINS="")


@pytest.fixture(scope="module")
def bridged(runs: Runs, run_in_vllm: Callable[..., Runs]) -> Runs:
    """Return the results of vLLM with interposer's kernels for each run."""
    return run_in_vllm(runs)


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[f"{name}, {mode}" for name, mode in RUNS])
def test_an_moe_model_generates_the_same_tokens(own: Runs, bridged: Runs, number: int) -> None:
    ours, theirs = bridged[number], own[number]
    assert "error" not in ours, ours["error"]
    assert "error" not in theirs, theirs["error"]
    assert (ours["alone"], ours["batch"]) == (theirs["alone"], theirs["batch"])
    assert all(len(tokens) == TOKENS for tokens in theirs["alone"])


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[f"{name}, {mode}" for name, mode in RUNS])
def test_experts_are_taken_over_and_explained(bridged: Runs, number: int) -> None:
    name, _ = RUNS[number]
    report = bridged[number]["report"]
    places = [f"model.layers.{layer}.{EXPERTS.get(name, 'mlp.experts')}" for layer in range(LAYERS)]
    assert report["seams"]["experts"] == ""
    assert set(places) <= set(report["taken"])
    assert not [place for place in report["kept"] if "experts" in place]
    choices = report["explanation"]["choices"]
    chosen = [choice for choice in choices if set(places) & set(choice["places"])]
    assert any(choice["name"] == "fused_experts" and choice["why"] for choice in chosen)


def test_norms_and_activations_are_taken_over_in_eager_mode(bridged: Runs) -> None:
    taken = bridged[0]["report"]["taken"]
    # Of the stream, and of the heads.
    assert {"RMSNorm of 128", "RMSNorm of 32"} <= set(taken)
    assert "SiluAndMul of 96" in bridged[-1]["report"]["taken"]
