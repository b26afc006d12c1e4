"""End tokens: the files that name them, in their order, and values that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from interposer.errors import CheckpointError
from interposer_adapt import adapt, language_model
from interposer_engine import load

STDLIB = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"


def written(path: Path, config: Any, generation: Any, eos_token: Any = None) -> Path:
    """Copy the shipped model with other end tokens, and return its folder."""
    shutil.copytree(STDLIB, path)
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, "eos_token_id": config}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    return path


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("config", "generation", "in_tokenizer"),
    [(7, None, False), (5, [7, 8], False), (None, None, True)],
)
def test_end_tokens_are_read_from_each_file(
    tmp_path: Path, config: Any, generation: Any, in_tokenizer: bool
) -> None:
    text = Tokenizer.from_file(str(STDLIB / "tokenizer.json")).id_to_token(7)
    path = written(tmp_path / "m", config, generation, text if in_tokenizer else None)
    lm = load(path, cache_tokens=64)
    (completion,) = lm.generate([[1]], max_new_tokens=3, logit_bias={7: 100.0})
    assert (list(completion.token_ids), completion.finish_reason) == ([7], "stop")


@pytest.mark.landing(2)
@pytest.mark.parametrize("value", [True, -1, 10**9, "2", [1, None]])
def test_end_tokens_that_are_no_tokens_are_refused(tmp_path: Path, value: Any) -> None:
    told = (
        r"generation_config\.json: eos_token_id is .*\nTry: state the id of the end token, or null"
    )
    with pytest.raises(CheckpointError, match=told):
        load(written(tmp_path / "m", None, value), cache_tokens=64)


@pytest.mark.parametrize(("own", "general", "ends"), [(7, None, {7}), (5, [7, 8], {7, 8})])
def test_end_tokens_of_an_adapted_model_are_read_by_the_same_rule(
    own: Any, general: Any, ends: set[int]
) -> None:
    lm = language_model(adapt(model_with(own, general)), cache_tokens=64)
    assert lm.engine.stop_token_ids == ends


@pytest.mark.parametrize("value", [True, -1])
def test_end_tokens_of_an_adapted_model_that_are_no_tokens_are_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="GenerationConfig of LlamaForCausalLM: eos_token_id"):
        language_model(adapt(model_with(1, value)), cache_tokens=64)


def model_with(own: Any, general: Any) -> LlamaForCausalLM:
    """Return a small model with end tokens of its configuration and of generation."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
    model: LlamaForCausalLM = LlamaForCausalLM(
        LlamaConfig(
            **sizes, num_hidden_layers=1, num_attention_heads=4, vocab_size=32, eos_token_id=own
        )
    ).eval()
    model.generation_config.eos_token_id = general
    return model
