"""litellm: the answer to sampling settings, whole and streamed, and the error of a refusal."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the list of prices comes from a network

import litellm

litellm.suppress_debug_info = True
url, model = sys.argv[1:]
server: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none"}
chat: dict[str, Any] = {
    **server,
    "model": f"openai/{model}",
    "messages": [{"role": "user", "content": "import os"}],
    "max_tokens": 9,
    "temperature": 0.8,
    "seed": 5,
}
whole = litellm.completion(**chat)
chunks = litellm.completion(**chat, stream=True, stream_options={"include_usage": True})
completed = litellm.text_completion(
    **server,
    model=f"text-completion-openai/{model}",
    prompt="import os",
    max_tokens=9,
    temperature=0,
)
refusal = ""
try:
    litellm.completion(**{**chat, "temperature": -1})
except litellm.BadRequestError as error:
    refusal = str(error)
results = {
    "whole": whole.choices[0].message.content,
    "num_tokens": whole.usage.completion_tokens,
    "streamed": "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices),
    "completed": completed.choices[0].text,
    "refusal": refusal,
}
print(json.dumps(results))
