"""Pictures and sounds in requests: the forms of each API, limits, usage and refusals."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve.tests.conftest import Answer, Served, serving
from serve.tests.test_media_addresses import peer
from tests.media_model import ColourEncoder, picture, sound, write_media_model

from interposer_engine import LanguageModel, load
from interposer_serve import Limits

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

NAME = "colours"
CAT, DOG, WORD = picture(4, 6), picture(3, 2, seed=1), sound(7)
NUM_CAT, NUM_DOG, NUM_WORD = 6, 2, 2  # tokens
LIMITS = Limits(media=4, media_bytes=2000, image_pixels=200, media_seconds=5.0)


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def data(content: bytes) -> str:
    return f"data:image/x-portable-pixmap;base64,{base64_of(content)}"


def load_colours(folder: Path) -> LanguageModel:
    model = load(folder, "float32", cache_tokens=8192, max_sequences=32)
    model.input_encoder = ColourEncoder(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_media_model(tmp_path_factory.mktemp("media") / NAME)


@pytest.fixture(scope="module")
def offline(folder: Path) -> LanguageModel:
    """Return the same model, which nobody serves."""
    return load_colours(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return load_colours(folder)


@pytest.fixture(scope="module")
def served(model: LanguageModel) -> Iterator[Served]:
    with serving(model, NAME, limits=LIMITS) as running:
        yield running


def image(content: bytes | str) -> dict[str, Any]:
    url = content if isinstance(content, str) else data(content)
    return {"type": "image_url", "image_url": {"url": url}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def chat(served: Served, *parts: Any, **fields: Any) -> Answer:
    messages = [{"role": "user", "content": [*parts]}]
    body = {"model": NAME, "messages": messages, "max_tokens": 6, **fields}
    return served.ask("/v1/chat/completions", body)


def answer_of(offline: LanguageModel, *parts: Any, num_tokens: int = 6) -> str:
    return offline.chat([{"role": "user", "content": [*parts]}], max_new_tokens=num_tokens).text


def local(content: bytes) -> dict[str, Any]:
    return {"type": "image", "image": content}


def test_openai_client_sends_pictures_and_sounds(served: Served, offline: LanguageModel) -> None:
    content: Any = [text("a"), image(CAT), text("b"), image(DOG)]
    content.append(
        {"type": "input_audio", "input_audio": {"data": base64_of(WORD), "format": "wav"}}
    )
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": content}], max_tokens=6
        )
    parts = [text("a"), local(CAT), text("b"), local(DOG), {"type": "audio", "audio": WORD}]
    assert answer.choices[0].message.content == answer_of(offline, *parts)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    assert details is not None
    assert details.model_dump()["image_tokens"] == NUM_CAT + NUM_DOG
    assert details.audio_tokens == NUM_WORD
    prompt = offline.chat_prompt([{"role": "user", "content": parts}])
    num_texts = sum(isinstance(part, int) for part in prompt)
    num_tokens = num_texts + NUM_CAT + NUM_DOG + NUM_WORD
    assert answer.usage.prompt_tokens == num_tokens
    tokenized = served.ask("/tokenize", {"model": NAME, "messages": user(*content)}).body
    # The tokens are those of the template, with a placeholder for each medium.
    assert (tokenized["count"], len(tokenized["tokens"])) == (num_tokens, num_texts + 3)


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


def test_a_text_has_no_media_details(served: Served) -> None:
    answer = chat(served, text("a"))
    assert answer.body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_the_pixels_decide_the_answer(served: Served) -> None:
    contents = {
        chat(served, image(picture(4, 6, seed=seed))).body["choices"][0]["message"]["content"]
        for seed in range(4)
    }
    assert len(contents) > 1


def test_streams_count_pictures(served: Served, offline: LanguageModel) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = chat(served, image(CAT), text("a"), **options)
    assert f'"image_tokens": {NUM_CAT}' in answer.body


def test_the_responses_api_takes_pictures_and_continues_them(
    served: Served, offline: LanguageModel
) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": data(CAT)}]
    body: dict[str, Any] = {"model": NAME, "max_output_tokens": 6}
    first = served.ask("/v1/responses", {**body, "input": [{"role": "user", "content": parts}]})
    assert first.status == 200, first.body
    written = first.body["output"][0]["content"][0]["text"]
    assert written == answer_of(offline, text("a"), local(CAT))
    assert first.body["usage"]["input_tokens_details"]["image_tokens"] == NUM_CAT
    items = served.ask(f"/v1/responses/{first.body['id']}/input_items").body["data"]
    assert items[0]["content"] == parts
    second = served.ask(
        "/v1/responses", {**body, "input": "b", "previous_response_id": first.body["id"]}
    )
    assert second.status == 200, second.body
    messages = [
        {"role": "user", "content": [text("a"), local(CAT)]},
        {"role": "assistant", "content": written},
        {"role": "user", "content": "b"},
    ]
    expected = offline.chat(messages, max_new_tokens=6).text
    assert second.body["output"][0]["content"][0]["text"] == expected


def test_consecutive_messages_with_pictures_are_joined(
    served: Served, offline: LanguageModel
) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "input_image", "image_url": data(CAT)}]},
        {"role": "developer", "content": [{"type": "input_image", "image_url": data(DOG)}]},
    ]
    body = {"model": NAME, "input": items, "max_output_tokens": 6}
    answer = served.ask("/v1/responses", body)
    assert answer.status == 200, answer.body
    reminder = [text("<system-reminder>\n"), local(DOG), text("\n</system-reminder>")]
    parts = [text("a\n\n"), local(CAT), text("\n\n"), *reminder]
    assert answer.body["output"][0]["content"][0]["text"] == answer_of(offline, *parts)


def test_the_messages_api_takes_pictures(served: Served, offline: LanguageModel) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(CAT)}
    block = {"type": "image", "source": source}
    body = {"model": NAME, "messages": user(text("a"), block), "max_tokens": 6}
    answer = served.ask("/v1/messages", body)
    assert answer.status == 200, answer.body
    assert answer.body["content"][0]["text"] == answer_of(offline, text("a"), local(CAT))
    del body["max_tokens"]
    count = served.ask("/v1/messages/count_tokens", body).body["input_tokens"]
    assert count == answer.body["usage"]["input_tokens"]


def test_results_of_tools_can_be_pictures(served: Served, offline: LanguageModel) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(CAT)}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [text("seen:"), {"type": "image", "source": source}],
    }
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    messages: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [text("b"), call]},
        {"role": "user", "content": [result]},
    ]
    answer = served.ask("/v1/messages", {"model": NAME, "messages": messages, "max_tokens": 6})
    assert answer.status == 200, answer.body
    offline_messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": [text("seen:\n"), local(CAT)]},
    ]
    expected = offline.chat(offline_messages, max_new_tokens=6).text
    assert answer.body["content"][0]["text"] == expected


def test_a_picture_is_fetched_from_an_allowed_host(folder: Path, offline: LanguageModel) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(CAT)
    with peer({"/cat": head + CAT}) as running:
        hosts = [f"127.0.0.1:{running.port}"]
        with serving(load_colours(folder), NAME, limits=LIMITS, media_hosts=hosts) as served:
            answer = chat(served, image(f"http://{hosts[0]}/cat"))
            assert answer.status == 200, answer.body
            written = answer.body["choices"][0]["message"]["content"]
            assert written == answer_of(offline, local(CAT))
            refused = chat(served, text("a"), image("http://other.example/cat"))
            assert "messages[0].content[1]: http://other.ex" in refused.error["message"]
            assert refused.error["param"] == "messages"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, "allowed is {'type': 'image_url'"),
        ({"type": "image_url", "image_url": {"url": 3}}, "allowed is {'type': 'image_url'"),
        (
            {"type": "input_audio", "input_audio": {"data": "a"}},
            "allowed is {'type': 'input_audio'",
        ),
        (image("data:image/png;base64,a*"), "has base64 that cannot be read"),
        (image("data:image/png,text"), "is no data: address in base64"),
        (image("http://127.0.0.1/cat.png"), "is of a host that this server does not fetch from"),
        (image("file:///etc/passwd"), "has the scheme 'file'; allowed is data:"),
        (image("/etc/passwd"), "has the scheme ''"),
        (image(b"GIF89a"), "is no picture"),
        (image(picture(20, 11)), "has 20 x 11 pixels; allowed are 200"),
        (image(bytes(2001)), "has more than the allowed 2000 bytes"),
        (image(bytes(20_000)), "has more than the allowed 2000 bytes"),
        ({"type": "image", "image": "/etc/passwd"}, "of the type 'image', which the model cannot"),
        ({"type": "image", "image": data(CAT)}, "of the type 'image', which the model cannot read"),
        ({"type": "audio", "audio": "/etc/passwd"}, "of the type 'audio'"),
        ({"type": "file", "file": {"file_id": "a"}}, "of the type 'file'"),
    ],
)
def test_parts_that_cannot_be_read_are_named(served: Served, part: Any, message: str) -> None:
    answer = chat(served, text("a"), part)
    assert (answer.status, answer.error["param"]) == (400, "messages"), answer.body
    assert answer.error["message"].startswith("messages[0].content[1]")
    assert message in answer.error["message"]
    assert len(answer.error["message"]) < 500


def test_errors_name_the_places_of_the_other_apis(served: Served) -> None:
    item = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,a"}]}
    items = [{"role": "user", "content": "a"}, item]
    answer = served.ask("/v1/responses", {"model": NAME, "input": items})
    assert answer.error["message"].startswith("input[1].content[0] is no data: address")
    assert answer.error["param"] == "input"
    by_id = {"type": "input_image", "file_id": "file-1"}
    answer = served.ask("/v1/responses", {"model": NAME, "input": user(by_id)})
    assert "allowed is {'type': 'input_image', 'image_url'" in answer.error["message"]
    image_of_assistant = {
        "role": "assistant",
        "content": [{"type": "input_image", "image_url": data(CAT)}],
    }
    answer = served.ask("/v1/responses", {"model": NAME, "input": [image_of_assistant]})
    assert answer.error["message"].startswith("input[0] is")
    block = {"type": "image", "source": {"type": "url", "url": "http://a.example"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    body = {"model": NAME, "max_tokens": 1, "messages": user(result)}
    message = served.ask("/v1/messages", body).error["message"]
    assert message.startswith("messages[0].content[0].content[0]: http://a.example is of a host")


def test_the_number_of_media_is_limited(served: Served) -> None:
    assert chat(served, *[image(CAT)] * 4).status == 200
    answer = chat(served, *[image(CAT)] * 5)
    assert (answer.status, answer.error["code"]) == (400, "too_many_items")
    assert "more than the allowed 4 pictures and sounds" in answer.error["message"]


def test_media_of_all_requests_share_a_size_limit(folder: Path) -> None:
    limits = Limits(total_media_bytes=100)
    with serving(load_colours(folder), NAME, limits=limits) as served:
        answer = chat(served, image(picture(10, 10)))
        assert (answer.status, answer.error["code"]) == (503, "media_full")
        assert chat(served, image(picture(2, 2))).status == 200


def test_vectors_of_all_requests_share_a_size_limit(folder: Path) -> None:
    size = load_colours(folder).engine.model.config.hidden_size * 4  # bytes of a token
    with serving(load_colours(folder), NAME, limits=Limits(total_vector_bytes=4 * size)) as served:
        answer = chat(served, image(picture(2, 5)))
        assert (answer.status, answer.error["code"]) == (503, "media_full")
        for _ in range(2):  # the end of an answer frees its vectors
            assert chat(served, image(picture(2, 4))).status == 200


def test_base64_is_no_text_of_the_prompt(model: LanguageModel) -> None:
    large = picture(600, 300)
    with serving(model, NAME) as served:
        answer = chat(served, image(large))
        assert answer.status == 200, answer.body
        assert answer.body["usage"]["prompt_tokens_details"]["image_tokens"] == 300


def test_a_prompt_of_many_picture_tokens_is_too_long(model: LanguageModel) -> None:
    with serving(model, NAME, limits=Limits(prompt_tokens=100)) as served:
        answer = chat(served, image(picture(1, 120)))
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    with serving(model, NAME) as served:
        answer = chat(served, image(picture(1, 5000)))
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


def test_a_model_without_an_encoder_refuses_media(lm: LanguageModel) -> None:
    with serving(lm, NAME) as served:
        large = image(bytes(1_000_000))
        refusal = "messages[0].content[0] is of the type 'image_url', which the model cannot read"
        assert chat(served, large).error["message"].startswith(refusal)
        content = [{"type": "input_image", "image_url": data(CAT)}]
        body: dict[str, Any] = {"model": NAME, "input": [{"role": "user", "content": content}]}
        answer = served.ask("/v1/responses", body)
        assert (
            "type 'input_image', which the model cannot read; allowed is 'input_text' or"
            in (answer.error["message"])
        )
        block = {"type": "image", "source": {"type": "base64", "media_type": "a", "data": "a"}}
        body = {"model": NAME, "max_tokens": 1, "messages": user(block)}
        refused = served.ask("/v1/messages", body)
        assert "is of the type 'image', which the model cannot read" in refused.error["message"]


def test_media_are_described(served: Served) -> None:
    document = served.ask("/openapi.json").body
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(CAT)}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": user(image(CAT))},
        "/v1/messages": {"messages": user({"type": "image", "source": source}), "max_tokens": 1},
        "/v1/responses": {"input": user({"type": "input_image", "image_url": data(CAT)})},
    }
    for path, body in bodies.items():
        (content,) = document["paths"][path]["post"]["requestBody"]["content"].values()
        schema = {**content["schema"], "components": document["components"]}
        check = jsonschema.Draft202012Validator(schema)
        check.validate({"model": NAME, **body})
        field = "input" if "input" in body else "messages"
        assert not check.is_valid({"model": NAME, **body, field: user({"type": "image_url"})}), path


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12) | st.just(data(DOG)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["url", "data", "format", "type", "source", "text", "media_type"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
PARTS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["text", "image_url", "input_audio", "input_image", "image", "audio"]
        )
    },
    optional=dict.fromkeys(
        ["text", "image_url", "input_audio", "source", "image", "content", "tool_use_id"], VALUES
    ),
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(parts=st.lists(PARTS | VALUES, max_size=4))
def test_no_part_makes_the_server_fail(served: Served, path: str, parts: list[Any]) -> None:
    field, limit = "messages", "max_tokens"
    if path == "/v1/responses":
        field, limit = "input", "max_output_tokens"
    body = {"model": NAME, field: user(*parts), limit: 1}
    answer = served.ask(path, body)
    assert answer.status in (200, 400), answer.body
