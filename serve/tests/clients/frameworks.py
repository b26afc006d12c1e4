"""Frameworks on top of the APIs: each asks, runs the tool that the model calls, and asks again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterable
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the list of prices comes from a network

import litellm
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

litellm.suppress_debug_info = True
url, model = sys.argv[1:]
QUESTION = "How is the weather?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Looks it up.", "parameters": SCHEMA}


class City(BaseModel):
    """The city of the question."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Göteborg", "Oslo"]


def weather(city: str) -> str:
    """Look up the weather."""
    return f"sunny in {city}"


def with_litellm(name: str, base: str, *, stream: bool) -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"type": "function", "function": FUNCTION}]
    fields: dict[str, Any] = {"model": name, "api_base": base, "api_key": "none", "tools": tools}
    for _ in range(2):
        response = litellm.completion(messages=messages, stream=stream, **fields)
        if stream:
            response = litellm.stream_chunk_builder([*response], messages=messages)
        message = response.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            content = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return str(messages[-1].content)


def with_langchain(chat: Any, *, stream: bool) -> str:
    bound = chat.bind_tools([weather])
    messages: list[Any] = [HumanMessage(QUESTION)]
    for _ in range(2):
        if stream:
            first, *rest = bound.stream(messages)
            message = sum(rest, first)
        else:
            message = bound.invoke(messages)
        messages.append(message)
        messages.extend(
            ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
            for call in message.tool_calls
        )
    return str(messages[-1].text)


async def read_events(_context: Any, events: AsyncIterable[Any]) -> None:
    async for _ in events:
        pass


def with_pydantic_ai(chat: Any, *, stream: bool) -> str:
    handler = read_events if stream else None  # with a handler, the agent streams each answer
    return str(Agent(chat, tools=[weather]).run_sync(QUESTION, event_stream_handler=handler).output)


openai_provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
anthropic_provider = AnthropicProvider(base_url=url, api_key="none")
openai_fields = {"model": model, "base_url": f"{url}/v1", "api_key": "none"}
langchain_chats = {
    "langchain chat": ChatOpenAI(**openai_fields),
    "langchain responses": ChatOpenAI(**openai_fields, use_responses_api=True),
    "langchain messages": ChatAnthropic(model=model, base_url=url, api_key="none"),
}
pydantic_models = {
    "pydantic-ai chat": OpenAIChatModel(model, provider=openai_provider),
    "pydantic-ai responses": OpenAIResponsesModel(model, provider=openai_provider),
    "pydantic-ai messages": AnthropicModel(model, provider=anthropic_provider),
}
answers: dict[str, str] = {}
structured: dict[str, str] = {}
for stream in (False, True):
    suffix = " streamed" if stream else ""
    for name, base in ((f"openai/{model}", f"{url}/v1"), (f"anthropic/{model}", url)):
        answers[f"litellm {name}{suffix}"] = with_litellm(name, base, stream=stream)
    for name, chat in langchain_chats.items():
        answers[name + suffix] = with_langchain(chat, stream=stream)
    for name, chat in pydantic_models.items():
        answers[name + suffix] = with_pydantic_ai(chat, stream=stream)
# Structured answers, by a schema and by a required call of a tool. pydantic-ai takes a schema for
# Anthropic's models from those that it knows only.
for name, chat in langchain_chats.items():
    for method in ("json_schema", "function_calling"):
        parsing = chat.with_structured_output(City, method=method)
        structured[f"{name} {method}"] = parsing.invoke(QUESTION).city
for name, chat in pydantic_models.items():
    for output in (ToolOutput, NativeOutput)[: 1 if isinstance(chat, AnthropicModel) else 2]:
        city = Agent(chat, output_type=output(City)).run_sync(QUESTION).output.city
        structured[f"{name} {output.__name__}"] = city
print(json.dumps({"answers": answers, "structured": structured}))
