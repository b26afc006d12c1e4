"""Whatever stands in a field, the server answers, within a budget for each request."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve.tests.conftest import NAME, STDLIB, Answer, Served
from tests.processes import served as started

from interposer_models import LanguageModel
from interposer_serve._requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

# Generous for a machine without AVX-512 that does something else besides.
MOST_PROCESSOR_SECONDS = 2.0
MOST_BYTES = 128 * 2**20  # of which constraints are kept for later requests
KNOWN = {200, 400, 404, 413, 429, 503, 504}
DEEP: Any = []
for _ in range(60):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**63,
    2**70,
    -0.5,
    1e308,
    "",
    "a",
    "\0",
    "é" * 10,
    "<|endoftext|>",
    "{{ 1 }}{% for i in x %}",
    "x" * 30_000,
    [],
    [None],
    ["a"],
    [1],
    [[1], [2]],
    [1] * 3000,
    ["a"] * 3000,
    [{}],
    {},
    {"a": None},
    {"type": "object"},
    {str(number): number for number in range(3000)},
    DEEP,
    {"$ref": "#"},
    {"type": "string", "pattern": "(a{100}){100}"},
    {"type": "integer", "multipleOf": 9999991},
    {"anyOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(300)]},
]
MESSAGE = {"role": "user", "content": "import os"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield bodies of all endpoints, each with one odd value in one place."""
    bases: list[tuple[str, dict[str, Any], Any]] = [
        ("/v1/completions", {"prompt": "import os", "max_tokens": 2}, CompletionBody),
        ("/v1/chat/completions", {"messages": [MESSAGE], "max_tokens": 2}, ChatBody),
        ("/tokenize", {"prompt": "import os"}, TokenizeBody),
        ("/detokenize", {"tokens": [1]}, DetokenizeBody),
    ]
    for value in VALUES:
        for path, base, kind in bases:
            for name in [*kind.model_fields, "best_of", "user", "unknown"]:
                if (name, value) != ("max_tokens", None):  # which asks for a long answer
                    yield path, {**base, name: value}
            yield path, {**base, "model": NAME, json.dumps(value)[:50_000]: value}
        for kind in ("json", "regex", "choice", "grammar", "other"):
            form = {"structured_outputs": {kind: value}, "max_tokens": 2}
            yield "/v1/completions", {"prompt": "a", **form}
        chat = {"messages": [MESSAGE], "max_tokens": 2}
        for messages in ([value], [{**MESSAGE, "content": value}], [{**MESSAGE, "role": value}]):
            yield "/v1/chat/completions", {**chat, "messages": messages}
        part = {"role": "user", "content": [{"type": "text", "text": value}]}
        calls = {"role": "assistant", "content": "", "tool_calls": value}
        yield "/v1/chat/completions", {**chat, "messages": [part]}
        yield "/v1/chat/completions", {**chat, "messages": [MESSAGE, calls]}
        for tool in (value, {**TOOL, "function": value}):
            yield "/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": "required"}
        tool = {**TOOL, "function": {"name": "f", "parameters": value}}
        yield "/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": "required"}
        described = {**SCHEMA, "json_schema": {"name": "a", "schema": value}}
        yield "/v1/chat/completions", {**chat, "response_format": described}


def ask(served: Served, path: str, body: dict[str, Any]) -> Answer:
    answer = served.ask(path, {"model": NAME, **body})
    assert answer.status in KNOWN, (path, json.dumps(body)[:300], answer.body)
    if answer.status != 200:
        assert len(json.dumps(answer.body)) < 20_000
    return answer


def test_every_body_is_answered(served: Served) -> None:
    """A part of all; ``test-all`` has the others, with what each one costs."""
    for path, body in [*bodies()][::29]:
        ask(served, path, body)
    assert served.complete(max_tokens=1).status == 200


def spent(pid: int) -> float:
    """Return the seconds of processor time of a process, without those it started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS")]
    return 1024 * int(line.split()[1])


@pytest.mark.slow
@pytest.mark.skipif("not os.path.isdir('/proc/self')", reason="needs /proc")
def test_no_body_costs_more_than_its_budget(offline: LanguageModel) -> None:
    command = [sys.executable, "-m", "interposer_tools", "serve", str(STDLIB), "--port=0"]
    with started([*command, "--dtype=float32"]) as (url, process):
        served = Served(int(url.rpartition(":")[2]), offline)
        for path, body in [*bodies()][::40]:
            ask(served, path, body)  # what first uses leave in memory is no body's
        before = resident(process.pid)
        for path, body in bodies():
            began = spent(process.pid)
            ask(served, path, body)
            seconds = spent(process.pid) - began
            assert seconds < MOST_PROCESSOR_SECONDS, (path, json.dumps(body)[:300])
        assert resident(process.pid) - before < MOST_BYTES
