"""A server in a thread of the tests, so that they see into its engine."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from serve.tests.agents import write_agent
from tests.waiting import WAIT_SECONDS, wait_until

from interposer_engine import LanguageModel, load
from interposer_serve import ConnectionLimits, Limits, application
from interposer_serve._connections import protocol

STDLIB = Path(__file__).parents[2] / "examples" / "models" / "stdlib-lm"
NAME = "stdlib-lm"
TURNS = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls %}<call>{{ call.function.arguments.x }}</call>{% endfor %}
{%- endfor %}{% if shout %}!{% endif %}{{ reasoning_effort }}
{%- if add_generation_prompt %}[assistant]{% endif %}
"""
# What stands after the first line is a call.
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "[assistant]",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "\n",
            "close_pattern": "$",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "look", "arguments": {"x": "{content}"}},
            },
        },
    },
}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: Any

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.body["error"]
        return error


@dataclass(frozen=True)
class Served:
    """A running server."""

    port: int
    lm: LanguageModel
    app: Any = field(default=None, kw_only=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: Any = None, **headers: str) -> Answer:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json"} if data is not None else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, sent)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
                return read(answer)
        except urllib.error.HTTPError as error:
            return read(error)

    def complete(self, **fields: Any) -> Answer:
        return self.ask("/v1/completions", {"model": NAME, "prompt": "import os", **fields})

    def chat(self, **fields: Any) -> Answer:
        messages = [{"role": "user", "content": "import os"}]
        return self.ask("/v1/chat/completions", {"model": NAME, "messages": messages, **fields})

    def connect(self, path: str, body: dict[str, Any], **headers: str) -> socket.socket:
        """Return a connection on which a request was sent, and nothing was read."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_SECONDS)
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        return connection

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = self.ask("/metrics").body.splitlines()
        matches = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        assert matches, name
        return sum(float(line.rpartition(" ")[2]) for line in matches)


def read(answer: Any) -> Answer:
    content = answer.read().decode()
    headers = {name.lower(): value for name, value in answer.headers.items()}
    is_json = headers.get("content-type") == "application/json"
    return Answer(answer.status, headers, json.loads(content) if is_json else content)


def events(content: str) -> list[Any]:
    """Return the events of a stream, which has to be whole."""
    parts = content.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


@contextmanager
def serving(
    model: Any,
    name: str | None = NAME,
    *,
    limits: Limits | None = None,
    keys: Collection[str] = (),
    connections: ConnectionLimits | None = None,
    drain: int = 5,
    send_bytes: int = 0,
    **options: Any,
) -> Iterator[Served]:
    """Serve a model, or several, in a thread.

    Args:
        send_bytes: that the system takes for a client that reads nothing; 0 leaves it to that.
        options: further arguments of ``application``.
    """
    app = application(model, name, limits=limits, keys=keys, **options)
    listening = socket.create_server(("127.0.0.1", 0))
    if send_bytes:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    config = uvicorn.Config(
        app,
        http=protocol(connections or ConnectionLimits()),
        loop="asyncio",
        lifespan="on",
        log_level="critical",
        timeout_graceful_shutdown=drain,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        wait_until(lambda: server.started, "the start of the server")
        yield Served(listening.getsockname()[1], model, app=app)
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    if isinstance(model, LanguageModel):
        pool = model.engine.pool
        assert (pool.num_free, model.engine.busy) == (pool.num_pages, False)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the shipped model with a template of turns and of tools, and one of responses."""
    path = tmp_path_factory.mktemp("served") / NAME
    shutil.copytree(STDLIB, path)
    (path / "chat_template.jinja").write_text(TURNS)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["response_template"] = RESPONSES
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="session")
def lm(chat_folder: Path) -> LanguageModel:
    """Return the model that is served."""
    return load(chat_folder, "float32", cache_tokens=8192, max_sequences=32)


@pytest.fixture(scope="session")
def offline(chat_folder: Path) -> LanguageModel:
    """Return the same model, which nobody serves."""
    return load(chat_folder, "float32", cache_tokens=8192, max_sequences=32)


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Return the scripted model that reasons and calls tools."""
    return load(write_agent(tmp_path_factory.mktemp("agent")), "float32", cache_tokens=2048)


@pytest.fixture(scope="module")
def served(lm: LanguageModel) -> Iterator[Served]:
    with serving(lm) as running:
        yield running
