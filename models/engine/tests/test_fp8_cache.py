"""The shipped model over a cache of 8 bits that the checkpoint has no scales for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from interposer import Config, explain
from interposer_engine import LanguageModel, load, plan

SHIPPED = Path(__file__).parents[3] / "examples/models/stdlib-lm"
PROMPTS = [
    "import os\n\ndef walk(path):\n    ",
    "class Thread:\n    def __init__(self, target):\n        ",
]
FP8 = Config(kv_cache="fp8")


def loaded(config: Config, dtype: str = "float32", **more: Any) -> LanguageModel:
    return load(SHIPPED, dtype, "cpu", config, **{"cache_tokens": 1024, **more})


def tokens(lm: LanguageModel) -> list[tuple[int, ...]]:
    return [each.token_ids for each in lm.generate(PROMPTS, temperature=0.0, max_new_tokens=24)]


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"cache_tokens": 96}, id="preemption"),
        pytest.param({"prefix_cache": True}, id="prefix cache"),
        pytest.param({"max_step_tokens": 16}, id="chunks"),
    ],
)
def test_features_of_the_engine_change_no_token(more: dict[str, Any]) -> None:
    expected = tokens(loaded(FP8))
    lm = loaded(FP8, **more)
    assert tokens(lm) == expected
    assert tokens(lm) == expected


def test_logits_move_by_the_rounding_of_8_bits() -> None:
    text = (SHIPPED.parents[1] / "stdlib_corpus.py").read_text(encoding="utf-8")[:1600]
    lm, exact = loaded(FP8), loaded(Config())
    ids = lm.tokenizer.encode(text)
    actual, expected = (each.logits(ids).double().log_softmax(-1) for each in (lm, exact))
    distance = (expected.exp() * (expected - actual)).sum(-1).mean()
    assert 0 < distance < 0.003  # a cache of 4 bits moves them by 0.011 nats


def test_a_cache_of_as_many_tokens_takes_half_of_the_memory() -> None:
    rounded, plain = (loaded(config, "bfloat16").engine.runner for config in (FP8, Config()))
    assert rounded.cache_bytes * 2 == plain.cache_bytes
    report = str(explain(plan(SHIPPED, "bfloat16", "cpu", FP8)))
    assert "stored in 8 bits, as kv_cache says: a token takes 1536 bytes in 6 layers" in report


def test_a_cache_that_memory_limits_suggests_8_bits() -> None:
    suggestion = "Config(kv_cache='fp8') stores twice as many tokens"
    limited: dict[str, Any] = {"memory_fraction": 1e-4}
    assert suggestion in str(explain(load(SHIPPED, "bfloat16", "cpu", **limited)))
    unlimited = {"cache_tokens": 64}
    for config, options in ((FP8, limited), (Config(), unlimited)):
        assert suggestion not in str(explain(load(SHIPPED, "bfloat16", "cpu", config, **options)))
