"""Anthropic's Python SDK: messages with a tool, whole and streamed, and the count of tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import anthropic
from pydantic import BaseModel


class City(BaseModel):
    city: Literal["Göteborg", "Oslo"]


url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
schema = City.model_json_schema()
tools: Any = [{"name": "weather", "description": "Looks it up.", "input_schema": schema}]
question: Any = {"role": "user", "content": "How is the weather?"}


def weather(city: str) -> str:
    """Looks it up."""
    return f"sunny in {city}"


def talk(ask: Callable[..., Any]) -> Any:
    fields: dict[str, Any] = {"model": model, "max_tokens": 99, "tools": tools}
    first = ask(messages=[question], **fields)
    thinking, text, call = first.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = ask(messages=[question, *turns], **fields)
    return {
        "reason": first.stop_reason,
        "thinking": thinking.thinking,
        "text": text.text,
        "name": call.name,
        "arguments": call.input,
        "answer": last.content[0].text,
    }


def stream_message(**fields: Any) -> Any:
    with client.messages.stream(**fields) as stream:
        return stream.get_final_message()


first = client.messages.create(model=model, max_tokens=99, messages=[question], tools=tools)
counted = client.messages.count_tokens(model=model, messages=[question], tools=tools)
parsed = client.messages.parse(model=model, max_tokens=99, messages=[question], output_format=City)
# The runner calls the tools itself.
runner = client.beta.messages.tool_runner(
    model=model, max_tokens=99, messages=[question], tools=[anthropic.beta_tool(weather)]
)
usage = first.usage
results = {
    "whole": talk(client.messages.create),
    "streamed": talk(stream_message),
    "parsed": parsed.parsed_output == City(city="Göteborg"),
    "tools run": runner.until_done().content[0].text,
    "counted": counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens,
}
print(json.dumps(results))
