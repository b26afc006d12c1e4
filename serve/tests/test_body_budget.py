"""The server answers any value in any field, within a budget of time and memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve.tests.conftest import NAME, STDLIB, Answer, Served
from tests.processes import served as serve_in_process

from interposer_engine import LanguageModel
from interposer_serve._requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

# Generous for a busy machine without AVX-512.
MAX_PROCESSOR_SECONDS = 2.0
MAX_GROWN_BYTES = 128 * 2**20  # includes cached constraints
STATUSES = {200, 400, 404, 413, 429, 503, 504}
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
    """Yield the paths and bodies of requests, each with one unusual value in one field."""
    bases: list[tuple[str, dict[str, Any], Any]] = [
        ("/v1/completions", {"prompt": "import os", "max_tokens": 2}, CompletionBody),
        ("/v1/chat/completions", {"messages": [MESSAGE], "max_tokens": 2}, ChatBody),
        ("/tokenize", {"prompt": "import os"}, TokenizeBody),
        ("/detokenize", {"tokens": [1]}, DetokenizeBody),
    ]
    for value in VALUES:
        for path, base, body_type in bases:
            for name in [*body_type.model_fields, "best_of", "user", "unknown"]:
                if (name, value) != ("max_tokens", None):  # null requests a long answer
                    yield path, {**base, name: value}
            yield path, {**base, "model": NAME, json.dumps(value)[:50_000]: value}
        for kind in ("json", "regex", "choice", "grammar", "other"):
            fields = {"structured_outputs": {kind: value}, "max_tokens": 2}
            yield "/v1/completions", {"prompt": "a", **fields}
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
        response_format = {**SCHEMA, "json_schema": {"name": "a", "schema": value}}
        yield "/v1/chat/completions", {**chat, "response_format": response_format}


def ask(served: Served, path: str, body: dict[str, Any]) -> Answer:
    answer = served.ask(path, {"model": NAME, **body})
    assert answer.status in STATUSES, (path, json.dumps(body)[:300], answer.body)
    if answer.status != 200:
        assert len(json.dumps(answer.body)) < 20_000
    return answer


def test_every_body_is_answered(served: Served) -> None:
    """A sample of the bodies. ``make test-all`` sends all of them and measures their cost."""
    for path, body in [*bodies()][::29]:
        ask(served, path, body)
    assert served.complete(max_tokens=1).status == 200


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process without its children, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS")]
    return 1024 * int(line.split()[1])


@pytest.mark.slow
@pytest.mark.skipif("not os.path.isdir('/proc/self')", reason="needs /proc")
def test_no_body_costs_more_than_its_budget(offline: LanguageModel) -> None:
    command = [sys.executable, "-m", "interposer_tools", "serve", str(STDLIB), "--port=0"]
    with serve_in_process([*command, "--dtype=float32", "--log-level=warning"]) as (
        url,
        process,
    ):
        served = Served(int(url.rpartition(":")[2]), offline)
        for path, body in [*bodies()][::40]:
            ask(served, path, body)  # memory allocated at first use does not count
        bytes_before = resident_bytes(process.pid)
        for path, body in bodies():
            seconds_before = processor_seconds(process.pid)
            ask(served, path, body)
            seconds = processor_seconds(process.pid) - seconds_before
            assert seconds < MAX_PROCESSOR_SECONDS, (path, json.dumps(body)[:300])
        assert resident_bytes(process.pid) - bytes_before < MAX_GROWN_BYTES
