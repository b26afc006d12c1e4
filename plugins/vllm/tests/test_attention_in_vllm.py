"""Windows, caps, sinks and caches of 8 bits give vLLM's own tokens by backends chosen here.

The models are tiny and random. Prompts are longer than their windows, and than a step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
)

Engines = Callable[..., list[dict[str, Any]]]

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = 24
# By kind: the model's configuration, what it has besides the sizes, and options of vLLM.
KINDS: dict[str, tuple[type[PretrainedConfig], dict[str, Any], dict[str, Any]]] = {
    "windows": (MistralConfig, {"sliding_window": WINDOW}, {}),
    "windows and caps": (
        Gemma2Config,
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
        },
        {},
    ),
    "windows of some layers": (
        Gemma3TextConfig,
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
        {},
    ),
    "windows and sinks": (
        GptOssConfig,
        {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
        {},
    ),
    "8 bits": (LlamaConfig, {}, {"kv_cache_dtype": "fp8"}),
    "8 bits of a wide range": (LlamaConfig, {}, {"kv_cache_dtype": "fp8_e5m2"}),
}
TOKENS = 64

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600), pytest.mark.xdist_group("vllm")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return one eager run of each kind, in float32."""
    folder = tmp_path_factory.mktemp("kinds")
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(SIZES["vocab_size"], (count,), generator=generator).tolist()
        for count in (5, 3 * WINDOW, WINDOW + 9)
    ]
    eager = {"dtype": "float32", "enforce_eager": True, "max_num_batched_tokens": 2 * WINDOW}
    return [
        {
            "model": str(made(folder / kind, *KINDS[kind][:2])),
            "options": {**eager, **KINDS[kind][2]},
            "prompts": prompts,
            "tokens": TOKENS,
        }
        for kind in KINDS
    ]


def made(path: Path, config: type[PretrainedConfig], facts: dict[str, Any]) -> Path:
    """Write a random model and return its path.

    Sinks are no zeros. Embeddings are small beside what layers add to them: with a tied head, the
    next token would be the last one.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES, **facts))
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
        elif "embed_tokens" in name:
            parameter.data *= 0.1
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def own(runs: list[dict[str, Any]], run_engines: Engines) -> list[dict[str, Any]]:
    """Return what vLLM makes of each kind by itself."""
    return run_engines(runs, VLLM_PLUGINS="")


@pytest.fixture(scope="module")
def bridged(runs: list[dict[str, Any]], run_engines: Engines) -> list[dict[str, Any]]:
    """Return what it makes of them with interposer's kernels."""
    return run_engines(runs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_attention_says_what_vllms_own_says(
    own: list[dict[str, Any]], bridged: list[dict[str, Any]], kind: str
) -> None:
    number = list(KINDS).index(kind)
    expected, found = own[number], bridged[number]
    assert (found["alone"], found["batch"]) == (expected["alone"], expected["batch"])
    assert all(len(set(tokens)) > 8 for tokens in found["alone"])
    layers = [f"model.layers.{layer}.self_attn.attn" for layer in range(SIZES["num_hidden_layers"])]
    assert set(layers) <= set(found["report"]["taken"])
