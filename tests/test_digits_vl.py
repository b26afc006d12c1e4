"""The shipped vision-language model reads pictures that it has never seen."""

from __future__ import annotations

import base64
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from serve.tests.conftest import serving

from interposer_engine import LanguageModel, load

EXAMPLES = Path(__file__).parents[1] / "examples"
SHIPPED = EXAMPLES / "models" / "digits-vl"
NUM_PICTURES = 10


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digit_pictures", EXAMPLES / "digit_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["digit_pictures"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lm() -> Iterator[LanguageModel]:
    with load(SHIPPED, cache_tokens=4096) as model:
        yield model


def held_out(pictures: ModuleType, count: int) -> list[tuple[bytes, str]]:
    """Return PNG files and their digits, far from the seeds that the training script measures."""
    first = pictures.HELD_OUT_SEED + (1 << 30)
    drawn = [pictures.draw_digits(seed) for seed in range(first, first + count)]
    return [(pictures.png(image), digits) for image, digits in drawn]


def message(pictures: ModuleType, *files: bytes) -> list[dict[str, Any]]:
    content: list[Any] = [{"type": "image", "image": file} for file in files]
    return [{"role": "user", "content": [*content, {"type": "text", "text": pictures.QUESTION}]}]


def test_it_takes_at_most_1_mb() -> None:
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) <= 1e6


def test_it_reads_pictures_that_it_has_never_seen(pictures: ModuleType, lm: LanguageModel) -> None:
    drawn = held_out(pictures, NUM_PICTURES)
    right = [lm.chat(message(pictures, file)).text == digits for file, digits in drawn]
    assert sum(right) >= 0.9 * NUM_PICTURES


def test_it_reads_two_pictures_in_their_order(pictures: ModuleType, lm: LanguageModel) -> None:
    drawn = held_out(pictures, 2 * NUM_PICTURES)
    pairs = list(zip(drawn[::2], drawn[1::2], strict=True))
    prompts = [lm.chat_prompt(message(pictures, first[0], second[0])) for first, second in pairs]
    expected = [pictures.SEPARATOR.join((first[1], second[1])) for first, second in pairs]
    answers = [completion.text for completion in lm.generate(prompts)]
    right = [answer == text for answer, text in zip(answers, expected, strict=True)]
    assert sum(right) >= 0.8 * NUM_PICTURES


@pytest.mark.process
def test_the_server_reads_pictures(pictures: ModuleType, lm: LanguageModel) -> None:
    right = []
    with serving(lm, "digits") as served:
        for file, digits in held_out(pictures, NUM_PICTURES):
            address = f"data:image/png;base64,{base64.b64encode(file).decode()}"
            content = [
                {"type": "image_url", "image_url": {"url": address}},
                {"type": "text", "text": pictures.QUESTION},
            ]
            body = {"model": "digits", "messages": [{"role": "user", "content": content}]}
            answer = served.ask("/v1/chat/completions", body).body
            assert answer["usage"]["prompt_tokens_details"]["image_tokens"] > 0
            right.append(answer["choices"][0]["message"]["content"] == digits)
    assert sum(right) >= 0.9 * NUM_PICTURES
