"""Anthropic's Messages API: text, reasoning, tools and errors, whole and streamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from serve.tests.agents import ANSWER, ARGUMENTS, NAME, QUESTION, SCHEMA
from serve.tests.conftest import Answer, Served, serving

from interposer_engine import LanguageModel
from interposer_serve._messages import MessagesBody

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
TOOL = {"name": "weather", "description": "Looks it up.", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def server(agent: LanguageModel) -> Iterator[Served]:
    with serving(agent, NAME) as running:
        yield running


def message(server: Served, content: Any, **fields: Any) -> Answer:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    body = {"model": NAME, "max_tokens": 100, "messages": messages, **fields}
    return server.ask("/v1/messages", body)


def stream(server: Served, content: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed message."""
    answer = message(server, content, stream=True, **fields)
    assert answer.status == 200, answer.body
    events = []
    for text in answer.body.strip().split("\n\n"):
        kind, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return events


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events add up to."""
    message: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    pieces: list[str] = []
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                pieces = []
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                (name,) = event["delta"].keys() - {"type"}
                pieces.append(event["delta"][name])
                if name != "partial_json":
                    blocks[-1][name] += event["delta"][name]
            case "content_block_stop":
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads("".join(pieces))
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert events[-1] == {"type": "message_stop"}
    return {**message, "content": blocks}


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in body["content"]]
    return {**body, "id": "", "content": blocks}


def test_a_text_is_answered(server: Served) -> None:
    body = message(server, "hello").body
    assert body["content"] == [{"type": "text", "text": "Good day!"}]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", NAME)
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["output_tokens"] == 3


def test_reasoning_and_calls_are_blocks(server: Served) -> None:
    body = message(server, "ask", tools=[TOOL]).body
    thinking, text, call = body["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", QUESTION)
    assert text == {"type": "text", "text": ANSWER}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", ARGUMENTS)
    assert call["id"].startswith("toolu_")
    assert body["stop_reason"] == "tool_use"


@pytest.mark.parametrize("content", ["hello", "ask", "count", "broken"])
def test_a_stream_adds_up_to_the_whole_message(server: Served, content: str) -> None:
    whole = message(server, content, tools=[TOOL]).body
    assert without_ids(assembled(stream(server, content, tools=[TOOL]))) == without_ids(whole)


def test_arguments_arrive_in_pieces(server: Served) -> None:
    deltas = [e["delta"] for e in stream(server, "ask", tools=[TOOL]) if "delta" in e]
    pieces = [delta["partial_json"] for delta in deltas if "partial_json" in delta]
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == ARGUMENTS


def test_a_conversation_with_results_of_tools_is_continued(server: Served) -> None:
    first = message(server, "ask", tools=[TOOL]).body
    result = {
        "type": "tool_result",
        "tool_use_id": first["content"][-1]["id"],
        "content": [{"type": "text", "text": "sunny"}],
        "cache_control": {"type": "ephemeral"},
    }
    messages = [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    body = message(server, messages, tools=[TOOL], system=[{"type": "text", "text": "Be kind."}])
    assert body.body["content"] == [{"type": "text", "text": "It is sunny."}]


def test_limits_and_stop_texts_are_named(server: Served) -> None:
    cut = message(server, "count", max_tokens=2).body
    assert (cut["content"][0]["text"], cut["stop_reason"]) == ("one,two,", "max_tokens")
    stopped = message(server, "count", stop_sequences=["x", "three"]).body
    assert stopped["content"][0]["text"] == "one,two,"
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "three")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_can_be_required(server: Served, choice: dict[str, Any]) -> None:
    body = message(server, "hello", tools=[TOOL], tool_choice=choice, max_tokens=400).body
    assert [block["type"] for block in body["content"]] == ["tool_use"]
    assert body["content"][0]["input"].keys() == {"city"}


def test_thinking_is_a_variable_of_the_template(server: Served) -> None:
    count = [
        server.ask(
            "/v1/messages/count_tokens",
            {
                "model": NAME,
                "messages": [{"role": "user", "content": "hello"}],
                "thinking": {"type": kind},
            },
        ).body["input_tokens"]
        for kind in ("disabled", "enabled")
    ]
    assert count[1] == count[0] + 1
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert message(server, "hello", thinking=thinking).body["usage"]["input_tokens"] == count[1]


@pytest.mark.parametrize(
    ("effort", "thinking", "variable"),
    [
        ("low", "adaptive", "low"),
        ("high", "enabled", "high"),
        ("max", "adaptive", "high"),
        ("high", "disabled", ""),
    ],
)
def test_the_effort_is_a_variable_of_the_template(
    served: Served, effort: str, thinking: str, variable: str
) -> None:
    messages = [{"role": "user", "content": "import os"}]
    body = {"model": "stdlib-lm", "messages": messages}
    variables = {"chat_template_kwargs": {"reasoning_effort": variable}}
    expected = served.ask("/tokenize", {**body, **variables}).body["count"]
    settings = {"output_config": {"effort": effort}, "thinking": {"type": thinking}}
    counted = served.ask("/v1/messages/count_tokens", {**body, **settings}).body["input_tokens"]
    assert counted == expected
    assert (counted > served.ask("/tokenize", body).body["count"]) is bool(variable)


def test_a_schema_forms_the_text(server: Served) -> None:
    format = {"type": "json_schema", "schema": SCHEMA}
    body = message(server, "hello", output_config={"format": format, "effort": "high"}).body
    assert json.loads(body["content"][0]["text"]).keys() == {"city"}


def count(server: Served, messages: list[dict[str, Any]], **fields: Any) -> int:
    body = {"model": NAME, "messages": messages, **fields}
    num_tokens: int = server.ask("/v1/messages/count_tokens", body).body["input_tokens"]
    return num_tokens


def test_later_system_messages_need_no_support_of_the_template(server: Served) -> None:
    hello = {"role": "user", "content": "hello"}
    later = [hello, {"role": "system", "content": "Be kind."}, {"role": "user", "content": "ask"}]
    reminder = "<system-reminder>\nBe kind.\n</system-reminder>"
    one = {"role": "user", "content": f"hello\n\n{reminder}\n\nask"}
    assert count(server, later) == count(server, [one])
    first = [{"role": "system", "content": "Be brief."}, hello]
    assert count(server, first, system="Be kind.") == count(
        server, [hello], system="Be kind.\n\nBe brief."
    )


def test_clients_learn_that_threads_are_not_supported(server: Served) -> None:
    refused = message(server, "hello", thread={"type": "create"})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (refused.status, refused.error["details"]) == (400, details)


def test_errors_have_the_format_of_the_api(server: Served) -> None:
    missing = server.ask("/v1/messages", {"model": NAME, "messages": []})
    assert missing.status == 400
    assert missing.body["type"] == "error"
    assert missing.error["type"] == "invalid_request_error"
    image = [{"type": "image", "source": {"type": "base64"}}]
    refused = message(server, [{"role": "user", "content": image}])
    assert "messages[0].content[0] is" in refused.error["message"]
    unknown = server.ask("/v1/messages", {"model": "other", "max_tokens": 1, "messages": [{}]})
    assert (unknown.status, unknown.error["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0] has the type 'web_search_20250305'; allowed is 'custom'. This server runs no",
        ),
        ({"tools": [{"type": "custom", "name": "a"}]}, "tools[0] is"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences is ['a', '']"),
        ({"output_config": {"effort": "most"}}, "output_config is"),
        (
            {"tools": [TOOL], "output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "leave output_config out",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice names"),
        ({"thread": {"type": "create"}}, "thread is"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config is"),
        ({"mcp_servers": [1]}, "mcp_servers"),
        ({"temperature": -1.0}, "temperature"),
        ({"system": [{"type": "image"}]}, "system is"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages[0].role is"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages[0].content is"),
    ],
)
def test_wrong_fields_are_named(server: Served, fields: dict[str, Any], named: str) -> None:
    answer = message(server, "hello", **fields)
    assert answer.status == 400
    assert named in answer.error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"system": [{"type": [], "text": "x"}]},
        {"system": [{"type": "text", "text": 5}]},
        {"messages": [{"role": "user", "content": [RESULT | {"content": [{"type": {}}]}]}]},
        {"messages": [{"role": "user", "content": [RESULT | {"content": 0}]}]},
    ],
)
def test_wrong_types_are_refused(server: Served, fields: dict[str, Any]) -> None:
    assert message(server, "hello", **fields).status == 400


def test_an_empty_answer_is_an_empty_text(server: Served) -> None:
    whole = message(server, "nothing").body
    assert whole["content"] == [{"type": "text", "text": ""}]
    assert without_ids(assembled(stream(server, "nothing"))) == without_ids(whole)


def test_half_of_a_surrogate_pair_in_a_call_is_replaced(server: Served) -> None:
    (call,) = message(server, "surrogate", tools=[TOOL]).body["content"]
    assert call["input"] == {"city": "?"}


def test_a_call_with_a_number_beyond_floats_is_answered(server: Served) -> None:
    (call,) = message(server, "infinity", tools=[TOOL]).body["content"]
    assert call["input"] == {"city": -sys.float_info.max}


def test_null_counts_as_left_out(server: Served) -> None:
    tool = {**TOOL, "description": None, "type": None, "strict": None}
    assert message(server, "hello", tools=[tool]).status == 200


def test_many_messages_take_linear_time() -> None:
    many = [{"role": "user", "content": "x"} for _ in range(40_000)]
    body = MessagesBody.read({"model": "m", "max_tokens": 1, "messages": many})
    (merged,) = body.chat().messages
    assert merged == {"role": "user", "content": "\n\n".join("x" * len(many))}
