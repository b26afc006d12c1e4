"""Sounds in chats with a speech model: OpenAI's client gets the answer of the model alone."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from models.adapt.tests.audio_checkpoints import (
    FAMILIES,
    POSITIONS,
    samples_of,
    wav_of,
    write_checkpoint,
)
from serve.tests.conftest import Served, serving

from interposer_engine import LanguageModel, load
from interposer_serve import Limits

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

NAME = "voxtral"
WORD, SENTENCE = (wav_of(samples_of(seconds, seed=2)) for seconds in (0.4, 2.5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(NAME)
    write_checkpoint(FAMILIES[NAME], path)
    return path


@pytest.fixture(scope="module")
def offline(folder: Path) -> LanguageModel:
    """Return the same model, which nobody serves."""
    return load(folder, "float32", cache_tokens=2048)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    model = load(folder, "float32", cache_tokens=2048)
    with serving(model, NAME, limits=Limits(audio_seconds=3.0)) as running:
        yield running


def sound(content: bytes) -> dict[str, Any]:
    data = base64.b64encode(content).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def test_openai_client_sends_sounds(served: Served, offline: LanguageModel) -> None:
    question = {"type": "text", "text": "Which is longer?"}
    parts: Any = [sound(WORD), sound(SENTENCE), question]
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": parts}],
            max_tokens=6,
            temperature=0.0,
        )
    local = [{"type": "audio", "audio": content} for content in (WORD, SENTENCE)]
    expected = offline.chat(
        [{"role": "user", "content": [*local, question]}], max_new_tokens=6, temperature=0.0
    )
    assert answer.choices[0].message.content == expected.text
    details = answer.usage.prompt_tokens_details if answer.usage else None
    assert details is not None
    # One window, and two.
    assert details.audio_tokens == 3 * POSITIONS // 4


def test_hostile_and_long_sounds_are_refused(served: Served) -> None:
    for content, reason in (
        (WORD[:30], r"messages[0].content[0]: The WAV file is damaged"),
        (wav_of(samples_of(3.5)), r"messages[0].content[0]: The audio lasts 4 seconds"),
    ):
        messages = [{"role": "user", "content": [sound(content)]}]
        answer = served.ask("/v1/chat/completions", {"model": NAME, "messages": messages})
        assert answer.status == 400
        assert reason in answer.error["message"]
