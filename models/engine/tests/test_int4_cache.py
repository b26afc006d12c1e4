"""The shipped model over a cache of 4 bits, as a user asks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tests.family_checkpoints import examples
from safetensors.torch import save_file

from interposer import Config, explain
from interposer.errors import ConfigError, NoCandidateError
from interposer_engine import LanguageModel, load, plan

SHIPPED = Path(__file__).parents[3] / "examples/models/stdlib-lm"
PROMPTS = [
    "import os\n\ndef walk(path):\n    ",
    "class Thread:\n    def __init__(self, target):\n        ",
    "def parse(text):\n    for line in text.splitlines():\n",
]
INT4 = Config(kv_cache="int4")


def loaded(config: Config, dtype: str = "float32", **more: Any) -> LanguageModel:
    return load(SHIPPED, dtype, "cpu", config, **{"cache_tokens": 1024, **more})


def tokens(lm: LanguageModel) -> list[tuple[int, ...]]:
    return [each.token_ids for each in lm.generate(PROMPTS, temperature=0.0, max_new_tokens=24)]


@pytest.fixture(scope="module")
def greedy() -> list[tuple[int, ...]]:
    return tokens(loaded(INT4))


def test_greedy_tokens_equal_the_portable_backend(greedy: list[tuple[int, ...]]) -> None:
    portable = Config(kv_cache="int4", attention={"decoder": "grouped"})
    assert tokens(loaded(portable)) == greedy


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"cache_tokens": 96}, id="preemption"),
        pytest.param({"prefix_cache": True}, id="prefix cache"),
        pytest.param({"speculation": "ngram"}, id="guesses"),
        pytest.param({"max_step_tokens": 16}, id="chunks"),
    ],
)
def test_features_of_the_engine_change_no_token(
    more: dict[str, Any], greedy: list[tuple[int, ...]]
) -> None:
    lm = loaded(INT4, **more)
    assert tokens(lm) == greedy
    assert tokens(lm) == greedy


def test_logits_move_as_far_as_the_budget_says() -> None:
    text = (SHIPPED.parents[1] / "stdlib_corpus.py").read_text(encoding="utf-8")[:1600]
    lm, exact = loaded(INT4), loaded(Config())
    ids = lm.tokenizer.encode(text)
    found, expected = (each.logits(ids).double().log_softmax(-1) for each in (lm, exact))
    distance = (expected.exp() * (expected - found)).sum(-1).mean()
    following = torch.tensor(ids[1:])[:, None]
    lost = (expected - found)[:-1].gather(1, following).mean()
    # See benchmarks/results/quantization.txt; half as much again is a change of the format.
    assert 0.002 < distance < 0.03
    assert abs(lost) < 0.03


def test_explain_reports_the_bytes_of_a_token() -> None:
    told = str(explain(plan(SHIPPED, "bfloat16", "cpu", INT4)))
    # 6 layers, keys and values of 2 heads of 64 numbers, 5 bits each.
    assert "a token takes 960 bytes in 6 layers, of 3072 in bfloat16" in told
    assert "a token takes" not in str(explain(plan(SHIPPED, "bfloat16", "cpu")))


def test_a_cache_of_as_many_bytes_holds_more_tokens() -> None:
    rounded, plain = (
        loaded(config, cache_tokens=512, dtype="bfloat16").engine.runner
        for config in (INT4, Config())
    )
    assert rounded.cache_bytes * 3.2 == plain.cache_bytes


def test_models_that_int4_pages_cannot_store_are_refused(tmp_path: Path) -> None:
    for name, config, reason in (
        ("latent", examples.deepseek_v2()["lite"], "requested torch.uint4"),
        ("odd", {**examples.llama()["grouped"], "head_dim": 20}, "groups of 32 numbers"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file({}, tmp_path / name / "model.safetensors")
        with pytest.raises(NoCandidateError, match=reason):
            plan(tmp_path / name, platform="cpu", config=INT4)


def test_a_bad_choice_lists_the_good_ones() -> None:
    with pytest.raises(ConfigError, match="int4"):
        Config(kv_cache="int2")  # type: ignore[arg-type]
