"""Several answers to one prompt: each is the one that its seed alone gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models.engine.tests.test_speculation import idle

from interposer.errors import RequestError, UnknownNameError
from interposer_engine import LanguageModel, SamplingParams, load

WARM: dict[str, Any] = {"max_new_tokens": 8, "temperature": 1.5}


@pytest.fixture(scope="module")
def lm(llama: Path) -> LanguageModel:
    return load(llama, "float32", cache_tokens=512, max_sequences=3)


def test_answers_follow_each_other_and_have_the_next_seeds(lm: LanguageModel) -> None:
    actual = lm.generate(["import", [1, 2]], n=3, seed=7, **WARM)
    alone = [
        lm.generate([prompt], seed=seed, **WARM)[0]
        for prompt in ("import", [1, 2])
        for seed in (7, 8, 9)
    ]
    assert [each.token_ids for each in actual] == [each.token_ids for each in alone]
    assert [each.prompt_token_ids for each in actual[2:4]] == [
        tuple(lm.tokenizer.encode("import")),
        (1, 2),
    ]
    last = lm.generate([[1, 2]], n=2, seed=2**63 - 1, **WARM)[1]
    assert last.token_ids == lm.generate([[1, 2]], seed=0, **WARM)[0].token_ids


def test_answers_without_a_seed_differ(lm: LanguageModel) -> None:
    actual = lm.generate("import", n=4, **WARM)
    assert len({each.token_ids for each in actual}) > 1


def test_stream_deltas_name_their_answer(lm: LanguageModel) -> None:
    whole = lm.generate("import", n=2, seed=3, **WARM)
    deltas = list(lm.stream("import", n=2, seed=3, **WARM))
    for index, answer in enumerate(whole):
        own = [delta for delta in deltas if delta.index == index]
        assert tuple(delta.token_id for delta in own) == answer.token_ids
        assert own[-1].finish_reason == answer.finish_reason
    streamed = lm.stream("import", n=2, **WARM)
    next(streamed)
    streamed.close()  # type: ignore[attr-defined]
    assert idle(lm)


def test_an_invalid_number_of_answers_is_refused(lm: LanguageModel) -> None:
    for n in (0, -1, 1.5, True, "2"):
        with pytest.raises(RequestError, match="must be an integer of at least 1"):
            lm.generate("import", n=n)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="outside the vocabulary"):
        lm.generate(["a", [999]], n=2)
    assert idle(lm)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("n", "beside params"), ("best_of", "choose among"), ("echo", "prompt_token_ids")],
)
def test_an_error_says_where_a_parameter_of_all_answers_belongs(name: str, hint: str) -> None:
    with pytest.raises(UnknownNameError, match=f"(?s)Unknown sampling parameter '{name}'.*{hint}"):
        SamplingParams(**dict[str, Any]({name: 2}))
