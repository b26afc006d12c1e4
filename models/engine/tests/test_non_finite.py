"""Requests of a model whose weights or results are NaN end with an error, and no other does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from models.adapt.tests.test_encoder import BERT, write
from models.engine.tests.test_speculation import idle

from interposer.errors import InterposerError
from interposer_adapt import load_encoder
from interposer_engine import AsyncLanguageModel, LanguageModel, load

BAD = 7  # the token whose logits are NaN
SETTINGS: dict[str, Any] = {"max_new_tokens": 3, "ignore_eos": True}


@pytest.fixture
def lm(llama: Path, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    """Return a model that computes NaN for prompts that end with ``BAD``."""
    lm = load(llama, "float32", cache_tokens=256)
    compute = lm.engine.runner.compute

    def broken(chunks: Any) -> torch.Tensor:
        logits = compute(chunks).clone()
        for row, chunk in enumerate(chunks):
            if chunk.sequence.prompt[-1] == BAD:
                logits[row, 5] = float("inf")
        return logits

    monkeypatch.setattr(lm.engine.runner, "compute", broken)
    return lm


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 1}])
def test_a_request_whose_logits_are_not_finite_ends_with_an_error(
    lm: LanguageModel, settings: dict[str, Any]
) -> None:
    expected = lm.generate([[1, 2]], **SETTINGS, **settings)[0].token_ids
    started = lm.stream([1, 2], **SETTINGS, **settings)
    with pytest.raises(ArithmeticError, match="logits after 2 prompt and 0 new tokens are not fin"):
        lm.generate([[4, BAD]], **SETTINGS, **settings)
    with pytest.raises(InterposerError, match="Try: dtype='float32'"):
        next(lm.stream([BAD], **SETTINGS, **settings))
    assert tuple(delta.token_id for delta in started) == expected
    assert idle(lm)


def test_an_asynchronous_request_fails_alone(lm: LanguageModel) -> None:
    expected = lm.generate([[1, 2]], **SETTINGS)[0].token_ids

    async def both() -> list[Any]:
        async with AsyncLanguageModel(lm) as front:
            prompts = ([[1, 2]], [[4, BAD]])
            asked = [front.generate(prompt, **SETTINGS) for prompt in prompts]
            return await asyncio.gather(*asked, return_exceptions=True)

    good, failed = asyncio.run(both())
    assert good[0].token_ids == expected
    assert isinstance(failed, ArithmeticError)
    assert idle(lm)


def test_scores_and_vectors_that_are_not_finite_are_refused(
    lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        lm.engine, "logits", lambda tokens, *_: torch.full((len(tokens), 256), float("nan"))
    )
    with pytest.raises(ArithmeticError, match="logits of the continuation"):
        lm.score([1], [[2]])
    write(tmp_path, BERT)
    encoder = load_encoder(tmp_path)
    with torch.no_grad():
        encoder.adapted.model.embeddings.word_embeddings.weight[ord("z")] = float("nan")
        wrong = encoder.tokenizer("b")["input_ids"][1]
        encoder.adapted.model.embeddings.word_embeddings.weight[wrong] = float("nan")
    with pytest.raises(ArithmeticError, match="the text 1 are not finite"):
        encoder.embed(["a", "b"])
