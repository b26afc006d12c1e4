"""OpenAI's Python SDK: chats and responses with a tool, whole and streamed, and parsed answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import openai
from pydantic import BaseModel


class City(BaseModel):
    city: Literal["Göteborg", "Oslo"]


url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
weather = {"name": "weather", "description": "Looks it up.", "parameters": City.model_json_schema()}
question: Any = {"role": "user", "content": "How is the weather?"}


def chat(ask: Callable[..., Any]) -> Any:
    tools = [{"type": "function", "function": weather}]
    first = ask(model=model, messages=[question], tools=tools).choices[0]
    (call,) = first.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    last = ask(model=model, messages=[question, first.message, result], tools=tools).choices[0]
    return {
        "reason": first.finish_reason,
        "text": first.message.content,
        "name": call.function.name,
        "arguments": json.loads(call.function.arguments),
        "answer": last.message.content,
    }


def stream_chat(**fields: Any) -> Any:
    with client.chat.completions.stream(**fields) as stream:
        return stream.get_final_completion()


def respond(ask: Callable[..., Any]) -> Any:
    tools = [{"type": "function", **weather}]
    first = ask(model=model, input=[question], tools=tools)
    (call,) = (item for item in first.output if item.type == "function_call")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    whole = ask(model=model, input=[question, *first.output, output], tools=tools)
    by_id = ask(model=model, input=[output], tools=tools, previous_response_id=first.id)
    return {
        "text": first.output_text,
        "name": call.name,
        "arguments": json.loads(call.arguments),
        "answer": whole.output_text,
        "continued": by_id.output_text,
    }


def stream_response(**fields: Any) -> Any:
    with client.responses.stream(**fields) as stream:
        return stream.get_final_response()


parsed = client.chat.completions.parse(model=model, messages=[question], response_format=City)
parsed_response = client.responses.parse(model=model, input=[question], text_format=City)
results = {
    "chat": chat(client.chat.completions.create),
    "chat streamed": chat(stream_chat),
    "chat parsed": parsed.choices[0].message.parsed == City(city="Göteborg"),
    "responses": respond(client.responses.create),
    "responses streamed": respond(stream_response),
    "responses parsed": parsed_response.output_parsed == City(city="Göteborg"),
}
print(json.dumps(results))
