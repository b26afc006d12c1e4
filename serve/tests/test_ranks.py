"""The command serves a model of two processes: its answers are those of one, and all end together.

One server answers all tests but the last one, in their order.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from serve.tests.conftest import NAME, Answer, Served, events
from tests.processes import lives, served, shared_files
from tests.waiting import WAIT_SECONDS, wait_until

from interposer_engine import LanguageModel

pytestmark = [
    pytest.mark.process,
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif("not os.path.isdir('/proc/self')", reason="needs /proc"),
]
PROMPTS = ["import os", "def f(", "class A:\n    def", "return [x for"]


@dataclass(frozen=True)
class Ranks(Served):
    """A server of two processes, by their ids."""

    process: subprocess.Popen[str]
    follower: int


@contextmanager
def started(folder: Path, offline: LanguageModel, *options: str) -> Iterator[Ranks]:
    asked = [sys.executable, "-m", "interposer_tools", "serve", str(folder), "--port=0"]
    asked += ["--tensor-parallel=2", "--dtype=float32", "--cache-tokens=2048", *options]
    with served(asked, signal.SIGKILL) as (url, process):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (follower,) = (c for c in children if "_distributed.launcher" in command_of(c))
        yield Ranks(int(url.rpartition(":")[2]), offline, process, int(follower))


def command_of(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.fixture(scope="module")
def server(chat_folder: Path, offline: LanguageModel) -> Iterator[Ranks]:
    with started(chat_folder, offline, "--prefix-cache") as running_server:
        yield running_server


def generated(offline: LanguageModel, prompt: str, **settings: Any) -> str:
    """Return the text that a single process generates."""
    return offline.generate(prompt, **settings)[0].text


def test_completions_match_a_single_process(server: Ranks, offline: LanguageModel) -> None:
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 5}

    def complete(prompt: str) -> Answer:
        return server.complete(prompt=prompt, **fields)

    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        answers = [*clients.map(complete, PROMPTS)]
    expected = [
        generated(offline, prompt, max_new_tokens=24, temperature=0.8, seed=5) for prompt in PROMPTS
    ]
    assert [answer.body["choices"][0]["text"] for answer in answers] == expected
    refused = server.complete(prompt=[10**6])
    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")


def test_chats_and_streams_match_a_single_process(server: Ranks, offline: LanguageModel) -> None:
    prompt = offline.chat_prompt([{"role": "user", "content": "import os"}])
    expected = offline.generate([prompt], max_new_tokens=16)[0].text
    fields: dict[str, Any] = {"max_tokens": 16, "temperature": 0}
    assert server.chat(**fields).body["choices"][0]["message"]["content"] == expected
    content = server.chat(**fields, stream=True).body
    deltas = [event["choices"][0]["delta"].get("content") or "" for event in events(content)]
    assert len(deltas) > 1
    assert "".join(deltas) == expected


def test_both_ranks_explain_their_selection(server: Ranks) -> None:
    explanation = server.ask("/explanation").body
    first, second = explanation.pop("ranks")
    assert first == explanation
    assert first["choices"] == second["choices"]
    assert any(
        note.startswith("sharded by heads: model.layers.self_attn") for note in first["notes"]
    )


def test_a_disconnect_ends_the_answer_on_both_ranks(server: Ranks, offline: LanguageModel) -> None:
    body = {"model": NAME, "prompt": "import os", "max_tokens": 1000, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    with server.connect("/v1/completions", body) as connection:
        assert b"data:" in connection.recv(1 << 16) + connection.recv(1 << 16)
    left = f'interposer_generations_total{{end="left",model="{NAME}"}} 1.0'
    wait_until(lambda: left in metrics(server))
    wait_until(lambda: server.metric("interposer_sequences_running") == 0)
    assert server.metric("interposer_generated_tokens_total") > 0
    # Ranks that differed would raise at the next step.
    text = server.complete(max_tokens=12, temperature=0).body["choices"][0]["text"]
    assert text == generated(offline, "import os", max_new_tokens=12)


def metrics(server: Ranks) -> str:
    text: str = server.ask("/metrics").body
    return text


def test_running_answers_end_before_both_ranks_stop(server: Ranks, offline: LanguageModel) -> None:
    files = shared_files(server.process.pid, server.follower)
    body = {"model": NAME, "prompt": "def f(", "max_tokens": 300, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    with server.connect("/v1/completions", body) as connection:
        content = connection.recv(1 << 16)
        server.process.send_signal(signal.SIGTERM)
        while part := connection.recv(1 << 16):
            content += part
    streamed_events = re.findall(r"^data: (\{.*\})\r?$", content.decode(), re.MULTILINE)
    text = "".join(json.loads(event)["choices"][0]["text"] for event in streamed_events)
    assert "data: [DONE]" in content.decode()
    assert text == generated(offline, "def f(", max_new_tokens=300, ignore_eos=True)
    assert server.process.wait(WAIT_SECONDS) == -signal.SIGTERM
    wait_until(lambda: not lives(server.follower))
    assert not any(file.exists() for file in files)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_server_with_the_reason(
    chat_folder: Path, offline: LanguageModel
) -> None:
    # The server does not wait for answers that cannot finish.
    with started(chat_folder, offline, f"--drain={2 * round(WAIT_SECONDS)}") as server:
        body = {"model": NAME, "prompt": "def f(", "max_tokens": 1000, "ignore_eos": True}
        with server.connect("/v1/completions", {**body, "stream": True}) as connection:
            assert connection.recv(1)  # of an answer that runs
            files = shared_files(server.process.pid, server.follower)
            os.kill(server.follower, signal.SIGKILL)
            _, stderr = server.process.communicate(timeout=WAIT_SECONDS)
    assert server.process.returncode == 1
    assert re.search(r"error: Rank 0: rank 1 was ended by SIGKILL", stderr)
    assert not lives(server.follower)
    assert not any(file.exists() for file in files)


@pytest.mark.slow
def test_a_lost_rank_is_noticed_without_a_request(
    chat_folder: Path, offline: LanguageModel
) -> None:
    with started(chat_folder, offline) as server:
        assert server.ask("/ready").status == 200
        os.kill(server.follower, signal.SIGKILL)
        _, stderr = server.process.communicate(timeout=WAIT_SECONDS)
    assert server.process.returncode == 1
    assert re.search(r"error: Rank 0: rank 1 was ended by SIGKILL", stderr)
