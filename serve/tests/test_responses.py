"""OpenAI's Responses API: text, reasoning, tools and stored responses, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serve.tests.agents import ANSWER, ARGUMENTS, NAME, QUESTION, SCHEMA
from serve.tests.conftest import Answer, Served, serving

from interposer_engine import LanguageModel
from interposer_serve import Limits

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def server(agent: LanguageModel) -> Iterator[Served]:
    with serving(agent, NAME, keys=["one", "two"]) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0) as client:
        yield client


def respond(server: Served, given: Any, **fields: Any) -> Answer:
    body = {"model": NAME, "input": given, **fields}
    return server.ask("/v1/responses", body, authorization="Bearer one")


def plain(response: Any) -> Any:
    """Return a response without ids and times."""
    if isinstance(response, dict):
        hidden = ("id", "call_id", "created_at")
        return {key: plain(value) for key, value in response.items() if key not in hidden}
    return [plain(item) for item in response] if isinstance(response, list) else response


def test_a_text_is_answered(client: openai.OpenAI) -> None:
    response = client.responses.create(model=NAME, input="hello", instructions="Be kind.")
    assert response.output_text == "Good day!"
    assert (response.status, response.object) == ("completed", "response")
    assert response.usage is not None
    assert response.usage.output_tokens == 3


def test_reasoning_and_calls_are_items(client: openai.OpenAI) -> None:
    tools: Any = [TOOL]
    response = client.responses.create(model=NAME, input="ask", tools=tools)
    reasoning, text, call = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == QUESTION
    assert response.output_text == ANSWER
    assert text.type == "message"
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", ARGUMENTS)
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 3


@pytest.mark.parametrize("given", ["hello", "ask", "count"])
def test_a_stream_adds_up_to_the_whole_response(
    server: Served, client: openai.OpenAI, given: str
) -> None:
    tools: Any = [TOOL]
    with client.responses.stream(model=NAME, input=given, tools=tools) as stream:
        events = [*stream]
        final = stream.get_final_response()
    numbers = [event.sequence_number for event in events]
    assert numbers == [*range(len(numbers))]
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == final.output_text
    whole = respond(server, given, tools=[TOOL]).body
    retrieved = server.ask(f"/v1/responses/{final.id}", authorization="Bearer one").body
    assert plain(retrieved) == plain(whole)


def test_a_response_is_continued_by_its_id(client: openai.OpenAI) -> None:
    tools: Any = [TOOL]
    first = client.responses.create(model=NAME, input="ask", tools=tools)
    call = first.output[-1]
    assert call.type == "function_call"
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    by_id = client.responses.create(
        model=NAME, input=output, tools=tools, previous_response_id=first.id
    )
    assert by_id.output_text == "It is sunny."
    conversation: Any = [{"role": "user", "content": "ask"}, *first.output, *output]
    whole = client.responses.create(model=NAME, input=conversation, tools=tools)
    assert whole.output_text == by_id.output_text
    assert whole.usage is not None
    assert by_id.usage is not None
    assert whole.usage.input_tokens == by_id.usage.input_tokens


def test_stored_responses_belong_to_a_key(server: Served, client: openai.OpenAI) -> None:
    response = client.responses.create(model=NAME, input="hello")
    assert client.responses.retrieve(response.id).output_text == "Good day!"
    items = client.responses.input_items.list(response.id).data
    assert [item.type for item in items] == ["message"]
    path = f"/v1/responses/{response.id}"
    other = server.ask(path, authorization="Bearer two")
    assert (other.status, other.error["code"]) == (404, "response_not_found")
    body = {"model": NAME, "input": "hello", "previous_response_id": response.id}
    refused = server.ask("/v1/responses", body, authorization="Bearer two")
    assert (refused.status, refused.error["param"]) == (404, "previous_response_id")
    client.responses.delete(response.id)
    assert server.ask(path, authorization="Bearer one").status == 404
    unstored = client.responses.create(model=NAME, input="hello", store=False)
    assert server.ask(f"/v1/responses/{unstored.id}", authorization="Bearer one").status == 404


def test_the_oldest_responses_are_dropped(agent: LanguageModel) -> None:
    with serving(agent, NAME, limits=Limits(stored_bytes=6000)) as server:
        body = {"model": NAME, "input": "hello"}
        ids = [server.ask("/v1/responses", body).body["id"] for _ in range(10)]
        statuses = [server.ask(f"/v1/responses/{each}").status for each in ids]
    assert statuses == sorted(statuses, reverse=True)
    assert {*statuses} == {404, 200}


def test_functions_have_namespaces(server: Served, client: openai.OpenAI) -> None:
    namespace = {"type": "namespace", "name": "city", "description": "", "tools": [TOOL]}
    fields: Any = {"model": NAME, "tools": [namespace], "tool_choice": "required"}
    whole = client.responses.create(input="hello", **fields)
    with client.responses.stream(input="hello", **fields) as stream:
        streamed = stream.get_final_response()
    calls: list[Any] = [*whole.output, *streamed.output]
    assert [call.type for call in calls] == ["function_call"] * 2
    assert [(call.namespace, call.name) for call in calls] == [("city", "weather")] * 2
    output = {"type": "function_call_output", "call_id": "x", "output": "sunny"}
    call = {"type": "function_call", "call_id": "x", "name": "city__weather", "arguments": "{}"}
    known = {**call, "name": "weather", "namespace": "city"}
    plain, named = (respond(server, [each, output], tools=[namespace]) for each in (call, known))
    assert plain.body["usage"]["input_tokens"] == named.body["usage"]["input_tokens"]


def test_the_first_system_messages_are_joined(server: Served) -> None:
    texts = ["Be kind.", "Be brief.", "Be exact."]
    items = [{"role": "developer", "content": text} for text in texts[1:]]
    question = {"role": "user", "content": "hello"}
    several = respond(server, [*items, question], instructions=texts[0], client_metadata={"a": 1})
    one = respond(server, [question], instructions="\n\n".join(texts))
    assert several.body["usage"]["input_tokens"] == one.body["usage"]["input_tokens"]


def test_limits_and_formats_are_followed(server: Served, client: openai.OpenAI) -> None:
    cut = respond(server, "count", max_output_tokens=2).body
    assert (cut["status"], cut["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    formatted: Any = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}}
    response = client.responses.create(model=NAME, input="hello", text=formatted)
    assert json.loads(response.output_text).keys() == {"city"}
    forced: Any = {"type": "function", "name": "weather"}
    tools: Any = [TOOL]
    called = client.responses.create(model=NAME, input="hello", tools=tools, tool_choice=forced)
    assert [item.type for item in called.output] == ["function_call"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0] is"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"tools": [TOOL, {"type": "web_search"}]}, "tools[1] has the type 'web_search'; allowed"),
        (
            {"tools": [{"type": "mcp", "server_label": "a"}]},
            "This server runs no tools. Try: ",
        ),
        ({"tools": [{"type": ["mcp"]}]}, "tools[0] has the type ['mcp']; allowed is 'function'"),
        ({"tools": [{"type": "function"}]}, "tools[0] is {'type': 'function'}; tools must be"),
        ({"background": True}, "background is True"),
        ({"truncation": "auto"}, "truncation is 'auto'"),
        ({"reasoning": {"effort": "most"}}, "reasoning is"),
        ({"text": {"format": {"type": "xml"}}}, "text is"),
        ({"conversation": "x"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"max_output_tokens": 2**70}, "max_output_tokens is 1180591620717411303424"),
        (
            {"tools": [TOOL], "text": {"format": {"type": "json_object"}}},
            "Try: tool_choice 'none', or leave text out",
        ),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "text has a constraint that cannot be used",
        ),
    ],
)
def test_wrong_fields_are_named(server: Served, fields: dict[str, Any], named: str) -> None:
    answer = respond(server, "hello", **fields)
    assert answer.status == 400
    assert named in answer.error["message"]


@pytest.mark.parametrize(("given", "num_tokens"), [("ask", 13), ("count", 5)])
def test_a_cut_answer_is_equal_whole_and_streamed(
    server: Served, client: openai.OpenAI, given: str, num_tokens: int
) -> None:
    tools: Any = [TOOL]
    for limit in range(1, num_tokens):
        fields: Any = {"tools": tools, "max_output_tokens": limit}
        with client.responses.stream(model=NAME, input=given, **fields) as stream:
            *_, last = stream
        whole = respond(server, given, **fields).body
        assert last.type == "response.incomplete"
        assert whole["status"] == "incomplete"
        output: Any = last.response.output
        streamed = [(item.type, item.status) for item in output]
        if streamed[-1] == ("function_call", "incomplete"):
            del streamed[-1]  # a whole response has complete calls only
            streamed[-1] = (streamed[-1][0], "incomplete")
        assert [(item["type"], item["status"]) for item in whole["output"]] == streamed


def test_a_call_that_is_cut_is_incomplete_and_not_continued(
    server: Served, client: openai.OpenAI
) -> None:
    tools: Any = [TOOL]
    fields: Any = {"model": NAME, "input": "ask", "tools": tools, "max_output_tokens": 9}
    with client.responses.stream(**fields) as stream:
        *_, last = stream
    assert last.type == "response.incomplete"
    *_, call = last.response.output
    assert call.type == "function_call"
    assert call.status == "incomplete"
    later = respond(server, "sunny", previous_response_id=last.response.id)
    assert (later.status, later.body["output"][0]["type"]) == (200, "message")


def test_two_conversations_continue_from_one_response(client: openai.OpenAI) -> None:
    first = client.responses.create(model=NAME, input="hello")
    given: Any = [{"role": "assistant", "content": "sunny"}]
    responses = [
        client.responses.create(model=NAME, input=given, previous_response_id=first.id)
        for _ in range(2)
    ]
    one, other = (response.usage.input_tokens for response in responses if response.usage)
    assert one == other


def test_an_empty_answer_is_an_empty_text(server: Served, client: openai.OpenAI) -> None:
    with client.responses.stream(model=NAME, input="nothing") as stream:
        final = stream.get_final_response()
    (whole,) = respond(server, "nothing").body["output"]
    assert [item.type for item in final.output] == [whole["type"]] == ["message"]
    assert final.output_text == whole["content"][0]["text"] == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "content": 5}, 5]}, "input"),
        (
            {"input": [{"type": "function_call", "name": "x", "arguments": "", "call_id": 5}]},
            "input",
        ),
        ({"input": [{"type": "other", "role": "assistant", "content": "x"}]}, "input"),
        (
            {"input": [{"type": "function_call", "name": "x", "arguments": "{", "call_id": "y"}]},
            "input",
        ),
    ],
)
def test_settings_without_effect_and_wrong_types_are_refused(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    answer = respond(server, "hello", **fields)
    assert (answer.status, answer.error["param"]) == (400, param)


def num_input_tokens(server: Served, given: Any, **fields: Any) -> int:
    num_tokens: int = respond(server, given, **fields).body["usage"]["input_tokens"]
    return num_tokens


def test_agents_need_no_support_of_the_template_for_their_messages(server: Served) -> None:
    """Agents send instructions, messages of the developer and several of the user."""
    message = "hello"
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "It is Monday."},
        {"role": "developer", "content": "Write files."},
        {"role": "user", "content": message},
    ]
    reminder = "<system-reminder>\nWrite files.\n</system-reminder>"
    joined = f"It is Monday.\n\n{reminder}\n\n{message}"
    assert num_input_tokens(server, items, instructions="Be kind.") == num_input_tokens(
        server, joined, instructions="Be kind.\n\nBe brief."
    )
