"""Answers have the form that a request asks for, whole and streamed."""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from serve.tests.conftest import NAME, RESPONSES, STDLIB, Served, events, serving
from tests.landing import landing_sample

from interposer_engine import LanguageModel, load

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["os", "sys"]},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "maxItems": 2},
    },
    "required": ["name", "lines"],
    "additionalProperties": False,
    "$defs": {"line": {"type": "integer", "minimum": 1, "maximum": 99}},
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "module", "schema": SCHEMA, "strict": True},
}
WARM: Any = {"temperature": 1.2, "max_tokens": 200}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop_here"}},
]
CALLS: dict[str, dict[str, Any]] = {
    "content holds the name": {
        "open_pattern": r"\s*<tool_call>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    "the opening holds the name": {
        "open_pattern": r"\[call:(?P<name>\w+)\]",
        "close_pattern": r"\s*\[/call\]",
        "repeats": True,
        "content": "json",
        "transform": {
            "type": "function",
            "function": {"name": "{name}", "arguments": "{content}"},
        },
    },
    # <|endoftext|> is the control token of the shipped model.
    "a control token opens": {
        "open": "<|endoftext|>",
        "close": "<end>",
        "content": "json",
        "repeats": True,
        "transform": {"type": "function", "function": "{content}"},
    },
}


def valid(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.landing(1)
@pytest.mark.parametrize("seed", range(4))
def test_an_answer_is_json_of_the_schema(served: Served, seed: int) -> None:
    fields = {"response_format": FORMAT, "seed": seed, **WARM}
    choice = served.chat(**fields).body["choices"][0]
    assert choice["finish_reason"] == "stop"
    valid(choice["message"]["content"])
    parts = [part for event in events(served.chat(**fields, stream=True).body)
             for part in event["choices"]]  # fmt: skip
    text = "".join(part["delta"].get("content", "") for part in parts)
    assert text == choice["message"]["content"]
    assert parts[-1]["finish_reason"] == "stop"
    valid(served.complete(**fields).body["choices"][0]["text"])


def test_without_the_package_only_the_operator_gets_the_command(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = served.complete(response_format=FORMAT)
    assert (answer.status, answer.error["code"]) == (400, "not_available")
    assert answer.error["message"] == (
        "response_format asks for structured output, which is not available on this server"
    )
    caplog.set_level(logging.INFO, "interposer")
    with serving(load(STDLIB, cache_tokens=64)):
        assert "Try: pip install --find-links dist 'interposer-engine[constraints]'" in caplog.text


def test_json_object_accepts_any_object(served: Served) -> None:
    fields = {"response_format": {"type": "json_object"}, "seed": 3, "n": 8, **WARM}
    choices = served.complete(**fields).body["choices"]
    finished_texts = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    assert finished_texts
    assert all(isinstance(json.loads(text), dict) for text in finished_texts)


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "[a-f]{3}"}, "[a-f]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "x" [0-9]\n'}, "x[0-9]"),
        ({"json": {"type": "boolean"}}, "true|false"),
    ],
)
def test_structured_outputs_of_vllm(served: Served, structured: Any, pattern: str) -> None:
    text = served.complete(structured_outputs=structured, **WARM).body["choices"][0]["text"]
    assert re.fullmatch(pattern, text)


def test_biases_and_least_lengths(served: Served, offline: LanguageModel) -> None:
    (token,) = offline.tokenizer.encode("x")[1:]
    biased = served.complete(logit_bias={str(token): 100}, max_tokens=3).body["choices"][0]
    assert biased["text"] == "xxx"
    alone = offline.generate("import os", logit_bias={0: 100.0}, min_tokens=4)[0]
    assert alone.finish_reason == "stop"
    assert len(alone.token_ids) == 5
    fields: Any = {"logit_bias": {"0": 100}, "min_tokens": 4}
    assert served.complete(**fields).body["choices"][0]["text"] == alone.text


def test_an_echoed_prompt_precedes_the_answer(served: Served) -> None:
    fields: dict[str, Any] = {"prompt": ["def f(", "x = ["], "n": 2, "max_tokens": 5}
    plain = served.complete(**fields).body["choices"]
    echoed = served.complete(**fields, echo=True).body["choices"]
    fronts = ["def f(", "def f(", "x = [", "x = ["]
    texts = [front + choice["text"] for front, choice in zip(fronts, plain, strict=True)]
    assert [choice["text"] for choice in echoed] == texts
    streamed = events(served.complete(**fields, echo=True, stream=True).body)
    for index, text in enumerate(texts):
        parts = [part for event in streamed for part in event["choices"]]
        assert "".join(part["text"] for part in parts if part["index"] == index) == text
    ids = served.ask("/tokenize", {"prompt": "x = ["}).body["tokens"]
    by_ids = served.complete(prompt=ids, max_tokens=5, echo=True).body["choices"][0]
    assert by_ids["text"] == texts[2]


def test_likely_tokens_of_completions(served: Served, offline: LanguageModel) -> None:
    alone = offline.generate("import os", max_new_tokens=4, top_logprobs=3)[0]
    fields = {"max_tokens": 4, "logprobs": 3}
    logprobs = served.complete(**fields).body["choices"][0]["logprobs"]
    for told, token, likely in zip(
        logprobs["top_logprobs"], logprobs["tokens"], alone.top_logprobs, strict=True
    ):
        assert token in told
        expected = {offline.tokenizer.decode([token_id]): value for token_id, value in likely}
        assert told == pytest.approx(expected, abs=1e-3)
    streamed = events(served.complete(**fields, stream=True).body)
    parts = [event["choices"][0]["logprobs"]["top_logprobs"] for event in streamed]
    assert [one for part in parts for one in part] == logprobs["top_logprobs"]


@pytest.fixture(scope="module", params=CALLS)
def calling(
    request: pytest.FixtureRequest, chat_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Return a server of a model whose response template says how calls are written."""
    path = tmp_path_factory.mktemp("calling") / NAME
    shutil.copytree(chat_folder, path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    fields = {"content": {}, "tool_calls": CALLS[request.param]}
    settings["response_template"] = {**RESPONSES, "fields": fields}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with serving(load(path, "float32", cache_tokens=4096, max_sequences=8)) as running:
        yield running


@pytest.mark.landing(1)
@pytest.mark.parametrize("seed", landing_sample(range(2), every=2))
def test_a_required_call_is_made(calling: Served, seed: int) -> None:
    # The control token would end the answer otherwise.
    fields = {"tools": TOOLS, "seed": seed, "ignore_eos": True, **WARM}
    named_choice = {"type": "function", "function": {"name": "look"}}
    for choice in ("required", named_choice):
        answer = calling.chat(**fields, tool_choice=choice).body["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] in ("look", "stop_here")
        if choice is named_choice or call["function"]["name"] == "look":
            assert call["function"]["name"] == "look"
            valid(call["function"]["arguments"])
        parts = events(calling.chat(**fields, tool_choice=choice, stream=True).body)
        told = [
            p["delta"] for part in parts for p in part["choices"] if p["delta"].get("tool_calls")
        ]
        assert [delta["tool_calls"][0]["function"] for delta in told] == [call["function"]]


def test_required_calls_need_a_known_format(served: Served) -> None:
    refused = served.chat(tools=TOOLS, tool_choice="required")
    assert (refused.status, refused.error["param"]) == (400, "tool_choice")
    assert (
        "the format of its calls is unknown: its calls are not plain JSON"
        in (refused.error["message"])
    )
    unknown_function = {"type": "function", "function": {"name": "other"}}
    refused = served.chat(tools=TOOLS, tool_choice=unknown_function)
    assert "allowed is one of ['look', 'stop_here']" in refused.error["message"]
