"""Whatever generation_config.json states is suggested and applied as in transformers, or named.

``variants/generation_files.py`` holds the spellings; ``make test-checkpoints`` compares thousands.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from models.engine.tests.variants import generation_files
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from interposer import explain
from interposer.errors import CheckpointError
from interposer_adapt import adapt, language_model
from interposer_engine import load, plan

STDLIB = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"


def written(path: Path, generation: Any, **config: Any) -> Path:
    """Copy the shipped model with other settings of generation, and return its folder."""
    shutil.copytree(STDLIB, path)
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, **config}))
    (path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def find_faults(first: int, end: int) -> list[str]:
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about settings that go with no other
        compared = [*generation_files.compare(first, end)]
    assert sum(case.outcome.kind == "equal" for case in compared) > len(compared) / 3
    return [str(case) for case in compared if case.outcome.is_fault]


def test_answers_equal_transformers() -> None:
    assert find_faults(0, 20) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20, 520, 100))
def test_answers_to_five_hundred_files_equal_transformers(first: int) -> None:
    assert find_faults(first, first + 100) == []


def test_a_repetition_penalty_is_suggested_for_greedy_answers_too(tmp_path: Path) -> None:
    path = written(tmp_path / "m", {"repetition_penalty": 1.2, "temperature": 0.5, "top_k": 5})
    assert load(path, cache_tokens=64).suggested == {"repetition_penalty": 1.2}


def test_config_json_suggests_settings_without_the_file(tmp_path: Path) -> None:
    stated: dict[str, Any] = {"do_sample": True, "top_p": 0.9}
    expected = {"temperature": 1.0, "top_p": 0.9}
    alone = written(tmp_path / "alone", None, **stated)
    beside = written(tmp_path / "beside", {}, **stated)
    assert load(alone, cache_tokens=64).suggested == expected
    assert load(beside, cache_tokens=64).suggested == {}


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("name", "value"), [("do_sample", "false"), ("temperature", "0.7"), ("top_k", 20.0)]
)
def test_a_setting_of_another_type_is_refused_by_file_and_name(
    name: str, value: Any, tmp_path: Path
) -> None:
    lm = load(written(tmp_path / "m", {"do_sample": True, name: value}), cache_tokens=64)
    assert lm.generate([[1]], max_new_tokens=1)  # which reads no such setting
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {name} is {value!r}"):
        _ = lm.suggested


def test_settings_that_are_not_applied_are_named(tmp_path: Path) -> None:
    neutral = {"min_length": 0, "suppress_tokens": None, "typical_p": 0.9, "max_length": 8}
    path = written(tmp_path / "m", {"no_repeat_ngram_size": 3, "num_beams": 4, **neutral})
    (note,) = (n for n in explain(plan(path, platform="cpu")).notes if "not applied" in n)
    assert note.endswith("transformers: no_repeat_ngram_size 3, num_beams 4")


def test_an_adapted_model_has_the_settings_of_its_generation_config() -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 32}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=4)
    model = LlamaForCausalLM(config).eval()
    own = model.generation_config
    own.do_sample, own.top_p, own.no_repeat_ngram_size = True, 0.9, 3
    lm = language_model(adapt(model), cache_tokens=64)
    assert lm.suggested == {"temperature": 1.0, "top_p": 0.9}
    assert any(n.endswith(": no_repeat_ngram_size 3") for n in explain(lm).notes)
