"""An end token that is not special ends answers over HTTP, and its text is not shown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve.tests.conftest import STDLIB, Served, events, serving

from interposer_engine import EmbeddedInput, LanguageModel, Speculation, load

pytestmark = pytest.mark.process

ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
# What it guesses is right, so that guesses go on beyond the end token.
SPECULATION = {"alone": None, "speculation": Speculation(STDLIB, tokens=6, adaptive=False)}


def chat_answer(lm: LanguageModel) -> list[int]:
    (completion,) = lm.generate([chat_prompt(lm)], max_new_tokens=16, ignore_eos=True)
    return list(completion.token_ids)


def chat_prompt(lm: LanguageModel) -> list[int | EmbeddedInput]:
    return lm.chat_prompt([{"role": "user", "content": "import os"}])


@pytest.fixture(scope="module", params=SPECULATION)
def ending(
    request: pytest.FixtureRequest, chat_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, list[int]]]:
    """Return a server whose model ends at an ordinary token, and the tokens of its chat."""
    folder = tmp_path_factory.mktemp("ending") / "model"
    shutil.copytree(chat_folder, folder)
    sizes: dict[str, Any] = {"cache_tokens": 2048, "max_sequences": 4}
    answer = chat_answer(load(folder, "float32", **sizes))
    # The first token from the third on that did not come before, with others to follow.
    at = next(i for i in range(2, 12) if answer[i] not in answer[:i])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": answer[at]}))
    lm = load(folder, "float32", speculation=SPECULATION[request.param], **sizes)
    assert lm.tokenizer.decode([answer[at]])  # it is no special token
    with serving(lm) as served:
        yield served, answer[: at + 1]
    if lm.speculation is not None:
        assert lm.speculation.accepted_tokens > 0


@pytest.mark.landing(1)
def test_a_chat_ends_before_an_end_token(ending: tuple[Served, list[int]]) -> None:
    served, tokens = ending
    expected = served.lm.tokenizer.decode(tokens[:-1])
    body = served.chat(**ASKED).body
    (choice,) = body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "stop")
    assert body["usage"]["completion_tokens"] == len(tokens)
    parts = [e["choices"][0] for e in events(served.chat(**ASKED, stream=True).body)]
    assert "".join(part["delta"].get("content", "") for part in parts) == expected
    assert parts[-1]["finish_reason"] == "stop"


def test_a_completion_ends_before_an_end_token(ending: tuple[Served, list[int]]) -> None:
    served, tokens = ending
    fields = {**ASKED, "prompt": chat_prompt(served.lm)}
    expected = served.lm.tokenizer.decode(tokens[:-1])
    (choice,) = served.complete(**fields).body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    streamed = events(served.complete(**fields, stream=True).body)
    assert "".join(event["choices"][0]["text"] for event in streamed) == expected
    (longer,) = served.complete(**fields, ignore_eos=True).body["choices"]
    assert longer["text"].startswith(served.lm.tokenizer.decode(tokens))
    assert longer["finish_reason"] == "length"
