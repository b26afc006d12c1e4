"""Tool calls and reasoning of a checkpoint, in OpenAI's chat completions, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serve.tests.agents import ANSWER, ARGUMENTS, NAME, QUESTION, SCHEMA
from serve.tests.conftest import Served, events, serving

from interposer_engine import LanguageModel

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def server(agent: LanguageModel) -> Iterator[Served]:
    with serving(agent, NAME) as running:
        yield running


def chat(server: Served, content: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    answer = server.ask(
        "/v1/chat/completions", {"model": NAME, "messages": messages, "tools": [TOOL], **fields}
    )
    assert answer.status == 200, answer.body
    return answer.body


def assembled(chunks: list[Any]) -> dict[str, Any]:
    """Return the choice that the chunks of a stream add up to."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    choice: dict[str, Any] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            (part,) = value
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(part)
            else:
                call = message["tool_calls"][part["index"]]["function"]
                call["arguments"] += part["function"]["arguments"]
    return {**choice, "message": message}


def test_reasoning_and_calls_are_fields_of_the_message(server: Served) -> None:
    body = chat(server, "ask")
    (choice,) = body["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == (QUESTION, ANSWER)
    (call,) = message["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    assert choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_adds_up_to_the_whole_message(server: Served, logprobs: bool) -> None:
    whole = chat(server, "ask", logprobs=logprobs)["choices"][0]
    chunks = events(chat(server, "ask", stream=True, logprobs=logprobs))
    streamed = assembled(chunks)
    assert streamed["finish_reason"] == "tool_calls"
    for name in ("content", "reasoning_content"):
        assert streamed["message"][name] == whole["message"][name]
    (call,), (whole_call,) = streamed["message"]["tool_calls"], whole["message"]["tool_calls"]
    assert call["function"] == whole_call["function"]
    if logprobs:
        sent = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        tokens = [token for each in sent if each for token in each["content"]]
        assert tokens == whole["logprobs"]["content"]


def test_text_reasoning_and_arguments_arrive_in_pieces(server: Served) -> None:
    deltas = [chunk["choices"][0]["delta"] for chunk in events(chat(server, "ask", stream=True))]
    calls = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert [call.get("name") for call in calls] == ["weather", *[None] * (len(calls) - 1)]
    assert len([call for call in calls if call["arguments"]]) > 1
    assert len([delta for delta in deltas if "reasoning_content" in delta]) > 1
    assert len([delta for delta in deltas if delta.get("content")]) > 1


def test_a_malformed_call_is_text_with_a_note(server: Served) -> None:
    (choice,) = chat(server, "broken")["choices"]
    assert "oops" in choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert choice["note"] == "a call was returned as text: ':' is missing after a key"
    streamed = assembled(events(chat(server, "broken", stream=True)))
    assert streamed["message"]["content"] == choice["message"]["content"]
    assert streamed["note"] == choice["note"]


def test_without_tools_calls_stay_text(server: Served) -> None:
    (choice,) = chat(server, "ask", tools=None)["choices"]
    assert choice["message"]["reasoning_content"] == QUESTION
    assert "<tool_call>" in choice["message"]["content"]


def test_completions_of_python_are_read(agent: LanguageModel) -> None:
    def weather(city: str) -> str:
        """Look up the weather.

        Args:
            city: Name of a city.
        """
        return city

    completion = agent.chat([{"role": "user", "content": "ask"}], tools=[weather])
    answer = agent.read_answer(completion, [weather])
    assert (answer.reasoning, answer.content) == (QUESTION, ANSWER)
    (call,) = answer.calls
    assert weather(**json.loads(call.arguments)) == "Göteborg"


def test_formats_can_be_chosen(agent: LanguageModel) -> None:
    renderer = agent.tokenizer.chat
    detected = renderer.answer_format
    try:
        renderer.use_formats("none", "none")
        with serving(agent, NAME) as server:
            (choice,) = chat(server, "ask")["choices"]
        assert choice["message"]["content"].startswith(f"<think>{QUESTION}</think>{ANSWER}")
    finally:
        renderer.answer_format = detected


@pytest.mark.parametrize(("effort", "difference"), [("none", 0), ("low", 1), ("high", 1)])
def test_effort_is_a_variable_of_the_template(server: Served, effort: str, difference: int) -> None:
    counts = [
        chat(server, "hello", reasoning_effort=each)["usage"]["prompt_tokens"]
        for each in ("none", effort)
    ]
    assert counts[1] - counts[0] == difference
