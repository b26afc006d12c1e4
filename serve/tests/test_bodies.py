"""What is not honoured is refused by field, value and what is allowed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve.tests.conftest import STDLIB, Served, serving

from interposer_engine import load

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

REFUSED: list[tuple[str, Any, str]] = [
    ("response_format", {}, "allowed is {'type': 'text'}, {'type': 'json_object'} or"),
    ("response_format", {"type": "xml"}, "allowed is {'type': 'text'}"),
    ("response_format", {"type": "json_object", "schema": {}}, "allowed is {'type': 'text'}"),
    ("response_format", {"type": "json_schema", "json_schema": {}}, "allowed is {'type': 'text'}"),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
        "Unimplemented",
    ),
    ("response_format", "json", "an object with a type"),
    ("structured_outputs", {}, "with one of 'json', 'regex', 'choice', 'grammar'"),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}, "with one of 'json'"),
    ("structured_outputs", {"choice": []}, "is malformed: choice is empty"),
    ("logit_bias", {"5": 101}, "token ids with numbers from -100 to 100"),
    ("logit_bias", {"-5": 1}, "token ids with numbers"),
    ("logit_bias", {"x": 1}, "token ids with numbers"),
    ("logit_bias", {"²": 1}, "token ids with numbers"),
    ("prompt_logprobs", -1, "an integer from 0 to 20"),
    ("min_tokens", -1, "an integer of at least 0"),
    ("best_of", 2, "allowed is 1"),
    ("suffix", "end", "Try: a prompt that holds both parts"),
    ("functions", [{"name": "f"}], "Try: tools"),
    ("parallel_tool_calls", 1, "allowed is True or False"),
    ("store", "yes", "allowed is False or True"),
    ("metadata", "job", "allowed is an object of texts"),
    ("metadata", {"job": 3}, "allowed is an object of texts"),
    ("user", 3, "user is 3; allowed is a text"),
    ("service_tier", "fast", "allowed is 'auto' or 'default' or 'flex'"),
    ("verbosity", "low", "allowed is None"),
    ("temperature", -1, "a number from 0, which is greedy, to 1000"),
    ("temperature", "hot", "a number from 0"),
    ("temperature", True, "a number from 0"),
    ("top_p", 2, "a number from 0 to 1"),
    ("n", 0, "an integer from 1 to 128"),
    ("n", 1.5, "an integer from 1 to 128"),
    ("max_tokens", -1, "an integer of at least "),
    ("top_k", -2, "0 or -1, which keep all tokens, or a positive integer"),
    ("seed", -1, "an integer from 0 to 2^63 - 1"),
    ("seed", 2**63, "an integer from 0 to 2^63 - 1"),
    ("stop", ["a", ""], "up to 16 texts of 1 to 4096 characters"),
    ("stop", ["a"] * 17, "up to 16 texts"),
    ("presence_penalty", 3, "a number from -2 to 2"),
    ("stream", "yes", "true or false"),
    ("stream_options", {"include_obfuscation": True}, '{"include_usage": true or false}'),
    ("stream_options", {"include_usage": 1}, '{"include_usage": true or false}'),
    ("temperatur", 1, "Unknown field 'temperatur'. Known, nearest first: 'temperature'"),
]
CHAT: list[tuple[str, Any, str]] = [
    (
        "tools",
        [{"type": "web_search"}],
        "tools[0] has the type 'web_search'; allowed is",
    ),
    ("tool_choice", "required", "without tools"),
    ("tool_choice", "any", "'auto', 'none', 'required' or {'type': 'function'"),
    ("tool_choice", {"type": "function"}, "'auto', 'none', 'required' or"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}, "allowed is one of []"),
    ("echo", True, "allowed is False"),
    ("max_tokens", 0, "an integer of at least 1"),
    ("top_logprobs", 3, "without"),
    ("top_logprobs", 21, "an integer from 0 to 20"),
    ("logprobs", 1, "true or false"),
    ("messages", [], "a list of messages"),
    ("messages", "hello", "a list of messages"),
    ("messages", [{"role": "user", "content": 3}], "messages[0].content is 3"),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "allowed is 'text'"),
]
COMPLETION: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "max_tokens is 0 without echo or prompt_logprobs"),
    ("logprobs", 21, "an integer from 0 to 20"),
    ("logprobs", True, "an integer from 0 to 20"),
    ("top_logprobs", 3, "allowed is 0 or None. Try: logprobs"),
    ("prompt", "", "none empty"),
    ("prompt", [], "texts, token ids or a list of those"),
    ("prompt", [1, "a"], "texts, token ids or a list of those"),
    ("prompt", 5, "texts, token ids or a list of those"),
]


def check(answer: Any, field: str | None, message: str) -> None:
    assert answer.status == 400, answer.body
    assert message in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"
    if field is not None:
        assert answer.error["param"] == field
        assert field in answer.error["message"]


@pytest.mark.parametrize(("field", "value", "message"), REFUSED)
def test_unsupported_fields_are_refused(
    served: Served, field: str, value: Any, message: str
) -> None:
    check(served.complete(**{field: value}), field, message)
    check(served.chat(**{field: value}), field, message)


@pytest.mark.parametrize(("field", "value", "message"), CHAT)
def test_fields_of_chats_are_checked(served: Served, field: str, value: Any, message: str) -> None:
    check(served.chat(**{field: value}), field, message)


@pytest.mark.parametrize(("field", "value", "message"), COMPLETION)
def test_fields_of_completions_are_checked(
    served: Served, field: str, value: Any, message: str
) -> None:
    check(served.complete(**{field: value}), field, message)


def test_requests_that_the_engine_refuses_fail_before_streaming(served: Served) -> None:
    for fields, message in (
        ({"prompt": "x " * 2000}, "the model's context is 1024"),
        ({"prompt": [""]}, "The prompt is empty"),
        ({"prompt": [4096]}, "Token id 4096 is outside the vocabulary"),
        ({"prompt": ["a"] * 3, "n": 128}, "asks for 384 answers; allowed are 288"),
        ({"logit_bias": {"4096": 1}}, "outside the vocabulary of 4096"),
    ):
        check(served.complete(**{"prompt": "a", **fields}, stream=True), None, message)
    unsafe = {"sanitize_control_tokens": False}
    check(served.chat(chat_template_kwargs=unsafe), None, "no variable of a chat template")
    check(served.chat(messages=[{"content": "a"}]), None, "must have a 'role'")


def test_fields_that_contradict_each_other_are_refused(served: Served) -> None:
    check(served.chat(max_tokens=1, max_completion_tokens=2), "max_tokens", "both given")
    # The options of a stream change no whole answer.
    assert served.chat(stream_options={"include_usage": True}, max_tokens=1).status == 200
    check(served.ask("/tokenize", {}), "prompt", "either prompt or messages")
    for ask in (served.complete, served.chat):
        check(ask(prompt_logprobs=0, stream=True), "prompt_logprobs", "Try: one of them")
    json_object, regex = {"type": "json_object"}, {"regex": "a"}
    both = {"response_format": json_object, "structured_outputs": regex}
    check(served.complete(**both), "structured_outputs", "both given")
    check(served.complete(structured_outputs=regex, min_tokens=1), "min_tokens", "a constraint")
    check(served.complete(min_tokens=3, max_tokens=2), None, "more than max_new_tokens")
    only_prompt = {"max_tokens": 0, "echo": True}
    check(served.complete(**only_prompt, min_tokens=1), "min_tokens", "more than max_tokens, 0")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    check(
        served.chat(tools=tools, response_format=json_object),
        "response_format",
        "A constrained answer",
    )


def test_fields_that_request_nothing_are_accepted(served: Served) -> None:
    neutral = {"response_format": {"type": "text"}, "logit_bias": {}, "store": False, "user": "me"}
    neutral["min_tokens"] = 0
    assert served.chat(max_tokens=1, **neutral, top_logprobs=0, audio=None).status == 200
    assert served.complete(max_tokens=1, **neutral, best_of=1, echo=False, suffix="").status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"job": "nightly"}, "store": True, "service_tier": "flex"},
        {"metadata": {}, "store": False, "parallel_tool_calls": True},
        {"parallel_tool_calls": False, "safety_identifier": "a", "prompt_cache_key": "b"},
        {"prompt_cache_retention": "24h"},
    ],
)
def test_fields_that_change_no_token_are_accepted(served: Served, fields: dict[str, Any]) -> None:
    plain, labelled = served.chat(max_tokens=4), served.chat(max_tokens=4, **fields)
    assert plain.body["choices"] == labelled.body["choices"]


@pytest.mark.parametrize("options", [{"include_usage": None}, {"include_obfuscation": False}])
def test_options_of_a_stream_that_request_nothing_are_accepted(
    served: Served, options: dict[str, Any]
) -> None:
    assert served.complete(max_tokens=1, stream=True, stream_options=options).status == 200


def test_missing_fields_and_unknown_models_are_reported(served: Served) -> None:
    answer = served.ask("/v1/completions", {"model": "stdlib-lm"})
    check(answer, "prompt", "prompt is missing; needed are prompt")
    wrong_model = served.complete(model="gpt")
    assert (wrong_model.status, wrong_model.error["code"]) == (404, "model_not_found")
    assert wrong_model.error["message"] == "model is 'gpt'; allowed is 'stdlib-lm'"


def test_bodies_that_are_no_objects_are_refused(served: Served) -> None:
    path = "/v1/completions"
    check(served.ask(path, b"{"), None, "The body is not valid JSON")
    check(served.ask(path, b"\xff"), None, "The body is not valid JSON")
    check(served.ask(path, b"[" * 100_000), None, "The body is not valid JSON")
    for number in (b"NaN", b"-Infinity", b"1e999"):
        nested = b'{"prompt": "a", "metadata": [{"x": %b}]}' % number
        check(served.ask(path, nested), None, "too large for a float")
    check(served.ask(path, []), None, "The body is a list; allowed is an object")
    plain = served.ask(path, b"{}", content_type="text/plain")
    assert (plain.status, "allowed is 'application/json'" in plain.error["message"]) == (415, True)


def test_an_unknown_address_names_the_known_ones(served: Served) -> None:
    answer = served.ask("/v1/answers", {})
    assert answer.status == 404
    assert "There is no POST '/v1/answers'; there are " in answer.error["message"]
    assert "/v1/chat/completions" in answer.error["message"]
    assert served.ask("/v1/completions").status == 405


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
FIELDS = [field for field, *_ in (*REFUSED, *CHAT, *COMPLETION)]


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), JSON, max_size=4))
def test_no_body_makes_the_server_fail(served: Served, body: dict[str, Any]) -> None:
    bounds = {"max_tokens": 1}
    for path, key in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        content = {"model": "stdlib-lm", key: "a", **body, **bounds}
        content = json.loads(json.dumps(content))
        assert served.ask(path, content).status in (200, 400)


def test_tools_and_chats_need_a_template(tmp_path: Path) -> None:
    folder = shutil.copytree(STDLIB, tmp_path / "stdlib-lm")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with serving(load(folder, "float32", cache_tokens=512)) as plain:
        check(plain.chat(tools=tools), None, "does not write tools")
    (folder / "chat_template.jinja").unlink()
    with serving(load(folder, "float32", cache_tokens=512)) as bare:
        check(bare.chat(), None, "holds no chat template")
        assert str(tmp_path) not in bare.chat().error["message"]
    (folder / "tokenizer.json").unlink()
    with serving(load(folder, "float32", cache_tokens=512)) as blind:
        check(blind.complete(), None, "holds no tokenizer, so texts cannot be read")
        assert blind.complete(prompt=[5], max_tokens=3).body["usage"]["completion_tokens"] == 3
        check(blind.complete(prompt=[5], stop="a"), None, "holds no tokenizer to find texts with")
