"""LlamaIndex with a server that is like OpenAI's: its agent runs the tool that the model calls."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]
llm = OpenAILike(
    model=model,
    api_base=f"{url}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
)


def weather(city: str) -> str:
    """Look up the weather."""
    return f"sunny in {city}"


async def answer(*, streaming: bool) -> Any:
    tools = [FunctionTool.from_defaults(weather)]
    agent = FunctionAgent(tools=tools, llm=llm, streaming=streaming)
    return str(await agent.run("How is the weather?"))


results = {
    "whole": asyncio.run(answer(streaming=False)),
    "streamed": asyncio.run(answer(streaming=True)),
}
print(json.dumps(results))
