"""Windows, caps and sinks give vLLM's own tokens by backends chosen here, caches of 8 bits others.

vLLM's kernels for CPUs cut keys and values to 8 bits, where backends here round to the nearest. So
these caches are compared with ``interposer_engine``.

The models are tiny and random. Prompts are longer than their windows, and than a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
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

from interposer_engine import load

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
# By kind: the model's configuration, and what it has besides the sizes.
KINDS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "windows": (MistralConfig, {"sliding_window": WINDOW}),
    "windows and caps": (
        Gemma2Config,
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "windows of some layers": (
        Gemma3TextConfig,
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "windows and sinks": (
        GptOssConfig,
        {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
TOKENS = 64

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600), pytest.mark.xdist_group("vllm")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return one eager run of each kind, in float32; the last one has a cache of 8 bits."""
    folder = tmp_path_factory.mktemp("kinds")
    models = [made(folder / kind, *facts) for kind, facts in KINDS.items()]
    models.append(with_scales(made(folder / "8 bits", LlamaConfig, {})))
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(SIZES["vocab_size"], (count,), generator=generator).tolist()
        for count in (5, 3 * WINDOW, WINDOW + 9)
    ]
    eager = {"dtype": "float32", "enforce_eager": True, "max_num_batched_tokens": 2 * WINDOW}
    return [
        {"model": str(model), "options": eager, "prompts": prompts, "tokens": TOKENS}
        for model in models
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


def with_scales(path: Path) -> Path:
    """Give a model scales of keys and values for caches of 8 bits, and return its path."""
    tensors = load_file(path / "model.safetensors")
    for layer in range(SIZES["num_hidden_layers"]):
        for name, scale in (("k_scale", 0.02), ("v_scale", 0.01)):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    integers = {"num_bits": 8, "type": "int", "symmetric": True}
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "int-quantized",
        # No layer is left for the group.
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**integers, "strategy": "channel"},
                "input_activations": {**integers, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["re:.*"],
        "kv_cache_scheme": {
            "num_bits": 8,
            "type": "float",
            "strategy": "tensor",
            "dynamic": False,
            "symmetric": True,
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def own(runs: list[dict[str, Any]], run_in_vllm: Engines) -> list[dict[str, Any]]:
    """Return the results of vLLM alone for each kind of attention."""
    return run_in_vllm(runs[: len(KINDS)], VLLM_PLUGINS="")


@pytest.fixture(scope="module")
def bridged(runs: list[dict[str, Any]], run_in_vllm: Engines) -> list[dict[str, Any]]:
    """Return the results of vLLM with interposer's kernels for all runs."""
    return run_in_vllm(runs)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_attention_generates_the_tokens_of_vllm(
    own: list[dict[str, Any]], bridged: list[dict[str, Any]], kind: str
) -> None:
    number = list(KINDS).index(kind)
    expected, actual = own[number], bridged[number]
    assert (actual["alone"], actual["batch"]) == (expected["alone"], expected["batch"])
    assert all(len(set(tokens)) > 8 for tokens in actual["alone"])


def test_requests_have_the_facts_of_the_layers(bridged: list[dict[str, Any]]) -> None:
    reports = [result["report"] for result in bridged]
    vllm_layers = [place for report in reports for place in report["kept"]]
    assert not [place for place in vllm_layers if place.endswith(".attn")]
    choices = [choice for report in reports for choice in report["explanation"]["choices"]]
    attention_dims = [choice["dims"] for choice in choices if choice["kind"] == "attention"]
    assert any(dims["windowed"] and dims["softcapped"] for dims in attention_dims)
    assert any(dims["windowed"] and dims["sinks"] for dims in attention_dims)
    assert any(dims["cache_dtype"] == "float8_e4m3fn" for dims in attention_dims)


def test_an_8_bit_cache_generates_the_same_tokens_as_without_vllm(
    runs: list[dict[str, Any]], bridged: list[dict[str, Any]]
) -> None:
    run, actual = runs[-1], bridged[-1]
    lm = load(run["model"], dtype="float32", cache_tokens=512)
    completions = lm.generate(run["prompts"], max_new_tokens=TOKENS, ignore_eos=True)
    expected = [list(completion.token_ids) for completion in completions]
    assert actual["alone"] == actual["batch"] == expected
