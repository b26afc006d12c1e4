"""The shipped vision-language model reads pictures that it has never seen."""

from __future__ import annotations

import base64
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from serve.tests.conftest import serving
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from interposer import explain
from interposer_engine import LanguageModel, load
from interposer_engine.parts import num_tokens as num_tokens_of

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


def chat_body(question: str, image: bytes) -> dict[str, Any]:
    address = {"url": f"data:image/png;base64,{base64.b64encode(image).decode()}"}
    parts = [{"type": "image_url", "image_url": address}, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": parts}]}


def responses_body(question: str, image: bytes) -> dict[str, Any]:
    address = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    parts = [
        {"type": "input_image", "image_url": address},
        {"type": "input_text", "text": question},
    ]
    return {"input": [{"role": "user", "content": parts}]}


def messages_body(question: str, image: bytes) -> dict[str, Any]:
    content = base64.b64encode(image).decode()
    source = {"type": "base64", "media_type": "image/png", "data": content}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": blocks}], "max_tokens": 8}


@dataclass(frozen=True)
class Api:
    """An endpoint: its body for a picture, and the fields of its response."""

    path: str
    body: Callable[[str, bytes], dict[str, Any]]
    text: Callable[[Any], str]
    num_prompt_tokens: Callable[[Any], int]


APIS = {
    "chat": Api(
        "/v1/chat/completions",
        chat_body,
        lambda body: str(body["choices"][0]["message"]["content"]),
        lambda body: int(body["usage"]["prompt_tokens"]),
    ),
    "responses": Api(
        "/v1/responses",
        responses_body,
        lambda body: str(body["output"][0]["content"][0]["text"]),
        lambda body: int(body["usage"]["input_tokens"]),
    ),
    "messages": Api(
        "/v1/messages",
        messages_body,
        lambda body: str(body["content"][0]["text"]),
        lambda body: int(body["usage"]["input_tokens"]),
    ),
}


@pytest.mark.process
def test_the_server_reads_pictures_of_each_api(pictures: ModuleType, lm: LanguageModel) -> None:
    drawn = held_out(pictures, NUM_PICTURES)
    expected = [lm.chat(message(pictures, file)) for file, _ in drawn]
    num_tokens = [num_tokens_of(lm.chat_prompt(message(pictures, file))) for file, _ in drawn]
    with serving(lm, "digits") as served:
        for api in APIS.values():
            bodies = [api.body(pictures.QUESTION, file) for file, _ in drawn]
            answers = [served.ask(api.path, {"model": "digits", **body}).body for body in bodies]
            assert [*map(api.text, answers)] == [completion.text for completion in expected]
            assert [*map(api.num_prompt_tokens, answers)] == num_tokens
            damaged = api.body(pictures.QUESTION, drawn[0][0][:40])
            refused = served.ask(api.path, {"model": "digits", **damaged})
            assert refused.status == 400
            field = next(iter(api.body("", b"").keys() & {"input", "messages"}))
            place = f"{field}[0].content[0] is not a readable picture"
            assert refused.error["message"].startswith(place)
        # A later question about the picture of an earlier one.
        first = served.ask(
            "/v1/responses",
            {"model": "digits", **responses_body(pictures.QUESTION, drawn[0][0])},
        ).body
        later = served.ask(
            "/v1/responses",
            {
                "model": "digits",
                "input": pictures.QUESTION,
                "previous_response_id": first["id"],
            },
        ).body
    assert later["usage"]["input_tokens_details"]["image_tokens"] > 0
    dialog = [
        *message(pictures, drawn[0][0]),
        {"role": "assistant", "content": expected[0].text},
        {"role": "user", "content": pictures.QUESTION},
    ]
    assert APIS["responses"].text(later) == lm.chat(dialog).text


@contextmanager
def counted_images() -> Iterator[list[nn.Module]]:
    """Yield a list that gets an item for each run of an image encoder."""
    runs: list[nn.Module] = []

    def count(module: nn.Module, _: Any) -> None:
        if type(module).__name__.startswith("Qwen2VisionTransformer"):
            runs.append(module)

    hook = register_module_forward_pre_hook(count)
    try:
        yield runs
    finally:
        hook.remove()


@pytest.mark.process
def test_clients_share_no_vectors_of_pictures(pictures: ModuleType) -> None:
    (file, _) = held_out(pictures, 1)[0]
    with (
        load(SHIPPED, cache_tokens=4096) as lm,
        serving(lm, "digits", keys=["first", "second"]) as served,
        counted_images() as runs,
    ):

        def num_encoded(key: str, api: Api = APIS["chat"], **fields: str) -> int:
            before = len(runs)
            body = {"model": "digits", **api.body(pictures.QUESTION, file), **fields}
            answer = served.ask(api.path, body, authorization=f"Bearer {key}")
            assert answer.status == 200, answer.body
            return len(runs) - before

        assert num_encoded("first") == 1
        assert [num_encoded("first", api) for api in APIS.values()] == [0, 0, 0]
        assert num_encoded("second") == 1
        assert num_encoded("second") == 0
        assert num_encoded("first", cache_salt="a") == 1
        assert num_encoded("first", cache_salt="a") == 0
        assert num_encoded("first", cache_salt="b") == 1
        for name, api in APIS.items():
            assert num_encoded("first", api, cache_salt=f"of {name}") == 1
            assert num_encoded("first", api, cache_salt=f"of {name}") == 0
        # Both paths count the tokens of a picture, and so encode it.
        for path, name in (("/v1/messages/count_tokens", "messages"), ("/tokenize", "chat")):
            messages = {"messages": APIS[name].body(pictures.QUESTION, file)["messages"]}
            counting = replace(APIS[name], path=path, body=lambda *_, body=messages: body)
            assert num_encoded("first", counting, cache_salt=path) == 1
            assert num_encoded("first", counting, cache_salt=path) == 0


def test_salts_separate_the_vectors_of_pictures(pictures: ModuleType, lm: LanguageModel) -> None:
    (file, digits) = held_out(pictures, 1)[0]
    question = message(pictures, file)
    with counted_images() as runs:
        answers = {
            salt: [lm.chat(question, cache_salt=salt).text for _ in range(2)]
            for salt in ("here", "there")
        }
        prompts = [lm.chat_prompt(question, cache_salt=salt) for salt in answers]
    assert answers == dict.fromkeys(answers, [digits] * 2)
    # Each salt encodes the picture once.
    assert len(runs) == 2
    first, second = ([part for part in prompt if not isinstance(part, int)] for prompt in prompts)
    assert all(one is not other for one, other in zip(first, second, strict=True))


def test_a_step_of_the_encoder_has_at_most_max_step_tokens(pictures: ModuleType) -> None:
    files = [pictures.png(pictures.draw_digits(seed, (80, 40))[0]) for seed in range(4)]
    with load(SHIPPED, cache_tokens=4096, max_step_tokens=32) as lm, counted_images() as runs:
        prompt = lm.chat_prompt(message(pictures, *files))
        num_tokens = {len(part) for part in prompt if not isinstance(part, int)}
        explanation = str(explain(lm))
    (each,) = num_tokens
    # Four pictures, as many of them in a step as have 32 tokens.
    assert len(runs) == -(-4 // (32 // each)) > 1
    assert "the input encoder computes up to 32 tokens at once" in explanation
