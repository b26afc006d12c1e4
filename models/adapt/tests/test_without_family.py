"""``load`` of architectures that no installed family is for: the model of transformers, adapted."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.conftest import write_tokenizer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    FalconConfig,
    GemmaConfig,
    GlmConfig,
    MambaConfig,
    OlmoeConfig,
)

import interposer
from interposer.errors import CheckpointError, ConfigError, UnsupportedModelError
from interposer_adapt._loading import load_adapted
from interposer_engine import LanguageModel, load, plan
from interposer_tools import main

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FALCON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "gemma": lambda: GemmaConfig(**SIZES, head_dim=16),
    "glm": lambda: GlmConfig(**SIZES, head_dim=16),
    "cohere": lambda: CohereConfig(**SIZES),
    "olmoe": lambda: OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "mimo-v2-flash": lambda: AutoConfig.for_model(
        "mimo_v2_flash",
        **{**SIZES, **EXPERTS},
        head_dim=16,
        v_head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        swa_v_head_dim=16,
        sliding_window=8,
    ),
    # Their sequences have caches of transformers: one attends by itself, one by an indexer, one
    # keeps a state.
    "falcon": lambda: FalconConfig(**FALCON, alibi=True),
    "glm-moe-dsa": lambda: AutoConfig.for_model(
        "glm_moe_dsa",
        **{**SIZES, **EXPERTS, "num_key_value_heads": 4},
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        index_topk=8,
        index_n_heads=16,
        index_head_dim=16,
    ),
    # The class of its caches is its own.
    "minimax": lambda: AutoConfig.for_model(
        "minimax",
        **{**SIZES, "head_dim": 16},
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=8,
        layer_types=["full_attention", "linear_attention"],
    ),
    "mamba": lambda: MambaConfig(
        hidden_size=64, num_hidden_layers=2, vocab_size=256, state_size=8, eos_token_id=None
    ),
}
OWN_CACHES = ("falcon", "glm-moe-dsa", "mamba", "minimax")
PROMPTS = [[5, 9, 3, 7, 2, 11, 40], [6, 2, 3], [77, 12, 31] * 8]
COUNT = 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return a function that writes a family's tiny model once and returns its folder and model."""
    checkpoints: dict[str, tuple[Path, Any]] = {}

    def write(name: str) -> tuple[Path, Any]:
        if name not in checkpoints:
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(FAMILIES[name]()).eval()
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            checkpoints[name] = folder, model
        return checkpoints[name]

    return write


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Return the likeliest tokens, each computed without a cache."""
    tokens = list(prompt)
    for _ in range(COUNT):
        logits = model(torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def generated(lm: LanguageModel) -> list[list[int]]:
    return [list(completion.token_ids) for completion in lm.generate(PROMPTS, max_new_tokens=COUNT)]


@pytest.mark.landing(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_transformers(
    name: str, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, model = checkpoint(name)
    # The longest prompt comes in chunks, and more requests wait than run.
    lm = load(folder, "float32", cache_tokens=256, max_sequences=2, max_step_tokens=9)
    assert generated(lm) == [greedy(model, prompt) for prompt in PROMPTS]
    notes = interposer.explain(lm).notes
    assert any("so the model of transformers is adapted" in note for note in notes)
    cache_notes = [note for note in notes if "each sequence has a cache of transformers" in note]
    assert bool(cache_notes) == (name in OWN_CACHES)


def test_cache_memory_of_adapted_models_is_bounded(
    checkpoint: Callable[[str], tuple[Path, Any]],
) -> None:
    folder, model = checkpoint("falcon")
    # Room for one of the prompts at a time, so that others are put off and computed again.
    lm = load(folder, "float32", cache_tokens=48, max_sequences=3)
    assert generated(lm) == [greedy(model, prompt) for prompt in PROMPTS]
    with pytest.raises(ConfigError, match=r"cache_tokens is 1000000000000, the free memory holds"):
        load(folder, "float32", cache_tokens=10**12)


def test_end_tokens_of_the_checkpoint_end_an_answer(
    checkpoint: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, model = checkpoint("gemma")
    expected = greedy(model, PROMPTS[0])
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(
        json.dumps({**settings, "eos_token_id": expected[3]})
    )
    (completion,) = load(tmp_path, "float32").generate([PROMPTS[0]], max_new_tokens=COUNT)
    assert list(completion.token_ids) == expected[: expected.index(expected[3]) + 1]
    assert completion.finish_reason == "stop"
    assert folder != tmp_path


def test_an_end_token_of_the_tokenizer_counts(
    checkpoint: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    _, model = checkpoint("gemma")
    expected = greedy(model, PROMPTS[0])
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    end = next(text for text, index in vocabulary.items() if index == expected[3])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    (completion,) = load(tmp_path, "float32").generate([PROMPTS[0]], max_new_tokens=COUNT)
    assert list(completion.token_ids) == expected[: expected.index(expected[3]) + 1]


def test_weights_that_are_not_finite_are_refused(
    checkpoint: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    _, model = checkpoint("gemma")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 2] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"safetensors: .*1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_weights_are_quantized_on_request(checkpoint: Callable[[str], tuple[Path, Any]]) -> None:
    folder, model = checkpoint("gemma")
    lm = load(folder, "float32", quantization="int8", cache_tokens=64)
    assert lm.quantization == "int8"
    with torch.no_grad():
        plain = model(torch.tensor([PROMPTS[0]])).logits[0]
    logits = lm.logits(PROMPTS[0])
    assert 0 < float((logits - plain).norm() / plain.norm()) < 0.1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_fraction", 0.5),
        ("prefix_cache", True),
        ("adapters", {"sql": "somewhere"}),
        ("speculation", "ngram"),
        ("offload", "50%"),
    ],
)
def test_unsupported_options_of_adapted_models_are_named(
    name: str, value: Any, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, _ = checkpoint("gemma")
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=rf"{name}=.* no family .*'GemmaForCausalLM'.* without"):
        load(folder, "float32", **options)


def test_the_page_lists_the_refused_options() -> None:
    page = (Path(__file__).parents[3] / "docs" / "adapt.md").read_text(encoding="utf-8")
    row = re.search(r"`load` refuses (.*) \|", page)
    assert row is not None
    supported = inspect.signature(load_adapted).parameters.keys() | {"path", "platform"}
    refused = inspect.signature(load).parameters.keys() - supported
    assert set(re.findall(r"`(\w+)`", row[1])) == refused


def test_the_error_of_plan_names_load(checkpoint: Callable[[str], tuple[Path, Any]]) -> None:
    folder, _ = checkpoint("gemma")
    with pytest.raises(UnsupportedModelError, match=r"not supported.*\n.*load.*which adapt"):
        plan(folder)


def test_an_encoder_error_names_load_encoder(tmp_path: Path) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"config\.json.*generate.*\n.*load_encoder"):
        load(tmp_path)


def test_an_architecture_that_transformers_lacks_is_named(
    checkpoint: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    _, model = checkpoint("gemma")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchLM"]}))
    with pytest.raises(
        UnsupportedModelError,
        match=r"'NoSuchLM' is not supported: transformers .*ForCausalLM', and ",
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"), [("lacks", "lacks the tensor"), ("more", "no place")]
)
def test_weights_that_do_not_fit_the_model_are_refused(
    change: str, reason: str, checkpoint: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    _, model = checkpoint("gemma")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "lacks":
        del weights[name]
    else:
        name = "model.layers.1.mlp.side_proj.weight"
        weights[name] = torch.zeros(3)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{reason}|{name}") as raised:
        load(tmp_path)
    assert name in str(raised.value)
    assert reason in str(raised.value)


def test_interposer_run_runs_an_adapted_model(
    checkpoint: Callable[[str], tuple[Path, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, model = checkpoint("gemma")
    write_tokenizer(folder)
    prompt = load(folder, "float32", cache_tokens=64).tokenizer.encode("def f")
    options = ["--prompt", "def f", "--dtype", "float32", "--max-new-tokens", str(COUNT), "--json"]
    monkeypatch.setattr(sys, "argv", ["interposer", "run", str(folder), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["token_ids"] == greedy(model, prompt)
