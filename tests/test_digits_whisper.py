"""The shipped speech model recognises digits of voices that it has never heard."""

from __future__ import annotations

import wave
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serve.tests.conftest import serving
from serve.tests.test_speech import FORM, form

from interposer_engine import LanguageModel, load

EXAMPLES = Path(__file__).parents[1] / "examples"
SHIPPED = EXAMPLES / "models" / "digits-whisper"
SOUNDS = sorted((EXAMPLES / "sounds").glob("*.wav"))
RATE = 8000


@pytest.fixture(scope="module")
def lm() -> Iterator[LanguageModel]:
    with load(SHIPPED, cache_tokens=2048) as model:
        yield model


def samples_of(file: Path) -> torch.Tensor:
    with wave.open(str(file)) as reader:
        assert (reader.getframerate(), reader.getsampwidth(), reader.getnchannels()) == (RATE, 1, 1)
        content = bytearray(reader.readframes(reader.getnframes()))
    return torch.frombuffer(content, dtype=torch.uint8).float() / 128 - 1


def test_model_and_sounds_are_small() -> None:
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) <= 500_000
    assert sum(file.stat().st_size for file in SOUNDS) <= 60_000


def test_it_recognises_digits_of_new_voices(lm: LanguageModel) -> None:
    assert len(SOUNDS) == 6
    texts = [lm.transcribe(file).text for file in SOUNDS]
    right = [text == file.stem for text, file in zip(texts, SOUNDS, strict=True)]
    assert sum(right) >= 5, texts


def test_a_long_sound_has_its_words_at_their_times(lm: LanguageModel) -> None:
    """Also where a window ends amid a word, which the next window hears whole."""
    parts: list[torch.Tensor] = []
    expected: list[tuple[str, float, float]] = []
    at = 0.0
    for file in SOUNDS:
        samples = samples_of(file)
        expected.append((file.stem, at, at + len(samples) / RATE))
        parts += [samples, torch.zeros(RATE // 2)]
        at = sum(map(len, parts)) / RATE
    transcript = lm.transcribe(torch.cat(parts), sampling_rate=RATE, seed=1)
    assert transcript.duration > 5
    right = [
        any(
            segment.text.strip() == digits
            and abs(segment.start - start) < 0.2
            and abs(segment.end - end) < 0.2
            for segment in transcript.segments
        )
        for digits, start, end in expected
    ]
    assert sum(right) >= 5, transcript.segments


@pytest.mark.process
def test_the_server_recognises_digits(lm: LanguageModel) -> None:
    with serving(lm, "digits") as served:
        texts = [
            served.ask(
                "/v1/audio/transcriptions",
                form(file=file.read_bytes(), model="digits"),
                content_type=FORM,
            ).body["text"]
            for file in SOUNDS
        ]
    assert sum(text == file.stem for text, file in zip(texts, SOUNDS, strict=True)) >= 5
