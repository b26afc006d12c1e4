"""Arguments that are neither texts nor lists are refused, and not read by their keys or bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from interposer.errors import RequestError
from interposer_engine import AsyncLanguageModel, LanguageModel, load

STDLIB = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"
WRONG: tuple[Any, ...] = ({"prompt": "import os"}, b"import os", bytearray(b"a"), {1, 2}, 5, None)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return load(STDLIB, cache_tokens=256, dtype="float32")


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
def test_values_that_are_no_prompts_are_refused(lm: LanguageModel, value: Any) -> None:
    said = rf"of the type {type(value).__name__}, must be a"
    with pytest.raises(RequestError, match=f"prompts is .*{said} text or a list of texts"):
        lm.generate(value)
    for call in (
        lambda: lm.generate([value]),
        lambda: lm.stream(value),
        lambda: lm.score(value, ["a"]),
        lambda: lm.score("a", [value]),
        lambda: lm.score("a", value),
        lambda: lm.logits(value),
    ):
        with pytest.raises(RequestError, match=said):
            call()
    assert not lm.engine.busy


@pytest.mark.parametrize("prompt", [[["a"]], [[[1]]], [["import os"]], [[1.5]], [[True]]])
def test_nested_values_that_are_no_tokens_are_refused(lm: LanguageModel, prompt: Any) -> None:
    with pytest.raises(RequestError, match="is not an integer"):
        lm.generate(prompt)


def test_letters_of_a_text_are_no_continuations(lm: LanguageModel) -> None:
    with pytest.raises(RequestError, match=r"continuations is the text 'bc'.*Try: \['bc'\]"):
        lm.score("a", "bc")


def test_the_asynchronous_model_refuses_the_same(lm: LanguageModel) -> None:
    async def refused(value: Any) -> None:
        async with AsyncLanguageModel(lm) as model:
            with pytest.raises(RequestError, match=r"prompts is .* of the type"):
                await model.generate(value)
            with pytest.raises(RequestError, match=r"The prompt is .* of the type"):
                await model.generate([value])
            with pytest.raises(RequestError, match=r"The prompt is .* of the type"):
                await anext(model.stream(value))

    asyncio.run(refused(WRONG[0]))


def test_arrays_and_generators_of_tokens_are_prompts(lm: LanguageModel) -> None:
    tokens = [3, 1, 4]
    expected = lm.generate([tokens], max_new_tokens=2)
    for prompt in (np.array(tokens), torch.tensor(tokens), tuple(tokens)):
        assert lm.generate([prompt], max_new_tokens=2) == expected  # type: ignore[list-item]
    assert lm.generate((each for each in [tokens]), max_new_tokens=2) == expected  # type: ignore[arg-type]
