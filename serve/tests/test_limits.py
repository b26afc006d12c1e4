"""Clients leave, queues fill up, deadlines pass, steps fail and servers end; nothing is lost."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from serve.tests.conftest import NAME, Served, events, serving
from tests.stalled_steps import StalledSteps, stalled_steps
from tests.waiting import WAIT_SECONDS, wait_until

from interposer.errors import ConfigError
from interposer_engine import LanguageModel, Speculation, load
from interposer_serve import Limits, application

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

LONG = {"model": NAME, "prompt": "import os", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def steps(lm: LanguageModel) -> Iterator[StalledSteps]:
    """Let no answer end until the test says so."""
    with stalled_steps(lm) as steps:
        yield steps


@pytest.mark.landing(1)
@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_frees_its_pages(
    lm: LanguageModel, steps: StalledSteps, stream: bool
) -> None:
    with serving(lm) as served, ThreadPoolExecutor(1) as pool:
        other_answer = pool.submit(served.complete, max_tokens=200, ignore_eos=True, prompt="x")
        wait_until(lambda: len(lm.engine.scheduler.running) == 1)
        connection = served.connect("/v1/completions", {**LONG, "stream": stream})
        wait_until(lambda: len(lm.engine.scheduler.running) == 2)
        first, second = lm.engine.scheduler.running
        wait_until(lambda: second.output)
        connection.close()
        wait_until(lambda: second.finish_reason is not None)
        wait_until(lambda: lm.engine.scheduler.running == [first])
        assert (second.finish_reason, second.pages) == ("cancelled", [[]])
        steps.release()
        assert other_answer.result().body["usage"]["completion_tokens"] == 200
        wait_until(lambda: lm.engine.pool.num_free == lm.engine.pool.num_pages)
        wait_until(lambda: served.metric("interposer_generations_total") == 2)


def test_a_stream_whose_client_left_before_it_began_is_cancelled(
    lm: LanguageModel, steps: StalledSteps
) -> None:
    """As servers tell it that follow a later version of ASGI."""
    app = application(lm, NAME, hosts=None)
    headers = [(b"content-type", b"application/json")]
    scope: Any = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": ""}

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps({**LONG, "stream": True}).encode()}

    running: list[Any] = []

    async def send(_: Any) -> None:
        await asyncio.to_thread(wait_until, lambda: lm.engine.scheduler.running)
        running.extend(lm.engine.scheduler.running)
        raise OSError("the client left")

    async def run() -> None:
        async with app.router.lifespan_context(app):
            with pytest.raises(OSError, match="the client left"):
                await app(scope, receive, send)
            await asyncio.to_thread(wait_until, lambda: not lm.engine.scheduler.running)

    asyncio.run(run())
    assert [sequence.finish_reason for sequence in running] == ["cancelled"]


def test_a_disconnect_takes_effect_before_the_next_step(lm: LanguageModel) -> None:
    """Steps that wait to be allowed show what stands between two of them."""
    allowed, at_step = threading.Semaphore(0), threading.Semaphore(0)
    step, num_unfinished = lm.engine.step, []

    def counted() -> Any:
        num_unfinished.append(len(lm.engine.scheduler.running) + len(lm.engine.scheduler.waiting))
        at_step.release()
        assert allowed.acquire(timeout=WAIT_SECONDS)
        return step()

    with pytest.MonkeyPatch.context() as patch, serving(lm) as served:
        patch.setattr(lm.engine, "step", counted)
        leaving = served.connect("/v1/completions", {**LONG, "stream": True})
        assert at_step.acquire(timeout=WAIT_SECONDS)
        staying = served.connect("/v1/completions", {**LONG, "max_tokens": 3, "stream": True})

        def next_step() -> int:
            allowed.release()
            assert at_step.acquire(timeout=WAIT_SECONDS)
            return num_unfinished[-1]

        wait_until(lambda: next_step() == 2)
        leaving.close()
        wait_until(lambda: served.metric("interposer_generations_total") == 1)
        assert next_step() == 1  # after the step that waited
        for _ in range(8):
            allowed.release()
        assert b"[DONE]" in read_all(staying)


def test_tokens_do_not_wait_for_a_step_that_takes_long(lm: LanguageModel) -> None:
    """The second token comes while the loop rests after the first one, and then no step ends."""
    allowed, step = threading.Semaphore(0), lm.engine.step

    def waiting() -> Any:
        assert allowed.acquire(timeout=WAIT_SECONDS)
        return step()

    with pytest.MonkeyPatch.context() as patch, serving(lm) as served:
        patch.setattr(lm.engine, "step", waiting)
        fields = {"prompt": [1, 2, 3], "max_tokens": 5, "stream": True, "logprobs": 0}
        connection = served.connect("/v1/completions", {**LONG, **fields})
        content = b""
        for num_tokens in (1, 4):
            for _ in range(num_tokens - content.count(b"data: ")):
                allowed.release()
            while content.count(b"data: ") < num_tokens:
                content += connection.recv(65536)
            assert content.count(b"data: ") == num_tokens
        allowed.release()
        content += read_all(connection)
        assert content.count(b"data: ") == 6  # each token has an event of its own
        assert content.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def read_all(connection: Any) -> bytes:
    """Return the bytes of a chunked response until its end, and close the connection."""
    content = b""
    while not content.endswith(b"0\r\n\r\n"):
        part = connection.recv(65536)
        assert part, content
        content += part
    connection.close()
    return content


def test_a_full_queue_is_refused_with_retry_after(lm: LanguageModel, steps: StalledSteps) -> None:
    room = lm.engine.scheduler.max_sequences + 2
    with serving(lm, limits=Limits(queue=2)) as served:
        running = [
            served.connect("/v1/completions", {**LONG, "n": room // 2, "stream": True})
            for _ in range(2)
        ]
        wait_until(lambda: len(lm.engine.scheduler.running) == room - 2)
        wait_until(lambda: len(lm.engine.scheduler.waiting) == 2)
        answer = served.complete()
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        assert answer.error["message"].startswith(f"{room} answers are running or waiting; allowed")
        assert int(answer.headers["retry-after"]) >= 1
        assert served.metric("interposer_sequences_waiting") == 2
        # Nothing is tokenized for an answer that has no room.
        assert served.complete(prompt="x " * 2000).status == 429
        assert served.chat().status == 429
        running[0].close()
        steps.release()
        wait_until(lambda: served.complete(max_tokens=1).status == 200)
        running[1].close()


# A delay that no other timer of an event loop has.
DEADLINE_SECONDS = 12345


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Return functions that each let the deadline of a request pass, which no clock does."""
    calls: list[Callable[[], object]] = []
    call_later = asyncio.BaseEventLoop.call_later

    def record(
        loop: asyncio.BaseEventLoop, delay: float, callback: Any, *arguments: Any, **how: Any
    ) -> asyncio.TimerHandle:
        if DEADLINE_SECONDS - WAIT_SECONDS < delay <= DEADLINE_SECONDS:
            calls.append(lambda: loop.call_soon_threadsafe(callback, *arguments))
        return call_later(loop, delay, callback, *arguments, **how)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", record)
    return calls


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_ends_an_answer(
    lm: LanguageModel, steps: StalledSteps, deadlines: list[Callable[[], object]], stream: bool
) -> None:
    limits = Limits(deadline_seconds=DEADLINE_SECONDS)
    with serving(lm, limits=limits) as served, ThreadPoolExecutor(1) as pool:
        if stream:
            connection = served.connect("/v1/completions", {**LONG, "stream": True})
            content = b""
            while b"data: " not in content:
                content += connection.recv(65536)
            deadlines.pop()()
            body = (content + read_all(connection)).decode()
            _, error_event = re.findall(r"^data: (.*)\r?$", body, re.MULTILINE)
            error = json.loads(error_event)["error"]
        else:
            pending_answer = pool.submit(served.complete, **LONG)
            wait_until(lambda: deadlines)
            deadlines.pop()()
            assert pending_answer.result().status == 504
            error = pending_answer.result().error
        assert error["code"] == "deadline_exceeded"
        assert error["message"] == "The answer took longer than 12345 s"
        steps.release()
        assert served.complete(max_tokens=1).status == 200


def test_bodies_and_prompts_have_a_size(lm: LanguageModel) -> None:
    with serving(lm, limits=Limits(body_bytes=2000, prompt_tokens=100)) as served:
        long = served.complete(prompt="x" * 2000)
        assert (long.status, long.error["code"]) == (413, "body_too_large")
        assert "more than the allowed 2000 bytes" in long.error["message"]
        answer = served.complete(prompt="x " * 200)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["message"].endswith("allowed are 100")
        assert served.complete(prompt="x", max_tokens=1).status == 200


def test_a_body_without_content_length_is_limited(lm: LanguageModel) -> None:
    with serving(lm, limits=Limits(body_bytes=2000)) as served:
        connection = HTTPConnection("127.0.0.1", served.port, timeout=WAIT_SECONDS)
        with closing(connection):
            connection.request(
                "POST",
                "/v1/completions",
                body=iter([b"x" * 1500, b"x" * 1500]),
                headers={"content-type": "application/json"},
                encode_chunked=True,
            )
            with connection.getresponse() as answer:
                assert (answer.status, answer.reason) == (413, "Request Entity Too Large")


def test_limits_are_positive() -> None:
    with pytest.raises(ConfigError, match="deadline_seconds is 0, must be at least 1"):
        Limits(deadline_seconds=0)


def test_a_failed_step_fails_only_its_requests(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step, broken = lm.engine.step, threading.Event()

    def sometimes() -> Any:
        if broken.is_set():
            raise RuntimeError("a kernel failed")
        return step()

    with serving(lm) as served, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(lm.engine, "step", sometimes)
        assert served.ask("/ready").status == 200
        broken.set()
        pending_answer = pool.submit(served.complete)
        streamed = pool.submit(served.complete, stream=True)
        assert (pending_answer.result().status, pending_answer.result().error["code"]) == (
            500,
            "failed",
        )
        assert streamed.result().body.count("data: ") == 1
        assert '"server_error"' in streamed.result().body
        assert served.ask("/ready").status == 503
        assert served.ask("/health").status == 200
        broken.clear()
        assert served.complete(max_tokens=2).status == 200
        assert served.ask("/ready").status == 200
    assert "a kernel failed" in caplog.text


@pytest.mark.landing(1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_logits_are_not_finite_fails_alone(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    bad = lm.tokenizer.encode("import re")
    compute, mixed = lm.engine.runner.compute, threading.Event()

    def broken(chunks: Any) -> Any:
        logits = compute(chunks).clone()
        for row, chunk in enumerate(chunks):
            if list(chunk.sequence.prompt) == bad:
                logits[row] = float("nan")
                if len(chunks) > 1:
                    mixed.set()
        return logits

    with stalled_steps(lm) as steps, serving(lm) as served, ThreadPoolExecutor(1) as pool:
        expected = served.complete(max_tokens=1).body["choices"][0]["text"]
        monkeypatch.setattr(lm.engine.runner, "compute", broken)
        other_answer = pool.submit(served.complete, max_tokens=200, ignore_eos=True)
        wait_until(lambda: len(lm.engine.scheduler.running) == 1)
        failed = served.complete(prompt="import re", stream=stream)
        steps.release()
        text = other_answer.result().body["choices"][0]["text"]
        error = json.loads(failed.body.removeprefix("data: "))["error"] if stream else failed.error
        assert failed.status == (200 if stream else 500)
        assert error["type"] == "server_error"
        assert "are not finite" in error["message"]
        assert (text.startswith(expected), mixed.is_set()) == (True, True)
        assert served.ask("/ready").status == 200


def refuses_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_running_answers_finish_before_the_server_stops(
    lm: LanguageModel, steps: StalledSteps
) -> None:
    pool = ThreadPoolExecutor(4)
    with serving(lm, drain=int(WAIT_SECONDS)) as served:
        pending_answers = [
            pool.submit(served.complete, max_tokens=n, stream=True) for n in (20, 40, 60)
        ]
        wait_until(lambda: len(lm.engine.scheduler.running) == 3)

        def release_when_it_ends() -> None:
            wait_until(lambda: refuses_connections(served.port), "the end of the server")
            assert not any(answer.done() for answer in pending_answers)
            steps.release()

        released = pool.submit(release_when_it_ends)
    released.result()
    for answer, count in zip(pending_answers, (20, 40, 60), strict=True):
        assert len(events(answer.result().body)) <= count
        assert events(answer.result().body)[-1]["choices"][0]["finish_reason"] == "length"
    pool.shutdown()


def test_answers_that_do_not_finish_in_time_are_cancelled(
    lm: LanguageModel, steps: StalledSteps
) -> None:
    with serving(lm, drain=1) as served:
        connection = served.connect("/v1/completions", {**LONG, "stream": True})
        content = b""
        while b"data: " not in content:
            content += connection.recv(65536)
    while part := connection.recv(65536):
        content += part
    connection.close()
    assert b"data: " in content
    assert b"[DONE]" not in content


def test_answers_are_counted(lm: LanguageModel) -> None:
    with serving(lm) as served:
        served.complete(prompt=[1, 2, 3], max_tokens=5, n=2, ignore_eos=True)
        served.complete(temperature=-1)
        assert served.metric("interposer_prompt_tokens_total") == 3
        assert served.metric("interposer_generated_tokens_total") == 10
        assert served.metric("interposer_generation_seconds_count") == 1
        assert served.metric("interposer_time_to_first_token_seconds_count") == 1
        assert served.metric("interposer_cache_pages") == lm.engine.pool.num_pages
        assert served.metric("interposer_cache_pages_held") == 0
        figures = served.ask("/metrics").body
        for name in ("vllm:generation_tokens_total", "vllm:e2e_request_latency_seconds_count"):
            assert f'{name}{{model_name="stdlib-lm"}}' in figures
        name = "gen_ai_server_time_to_first_token_seconds_count"
        assert f'{name}{{gen_ai_request_model="stdlib-lm"}} 1.0' in figures
        for status in (200, 400):
            line = 'interposer_http_responses_total{endpoint="complete",status="%d"} 1.0'
            assert line % status in figures


def test_draft_tokens_are_counted(chat_folder: Path) -> None:
    guessing = Speculation(adaptive=False)
    with serving(load(chat_folder, cache_tokens=512, speculation=guessing)) as served:
        served.complete(prompt=[1, 2, 3] * 5, max_tokens=30, ignore_eos=True)
        drafted = served.metric("interposer_drafted_tokens")
        assert drafted >= served.metric("interposer_accepted_tokens") >= 0
        assert served.metric("interposer_generated_tokens_total") == 30


KEYS = ("first", "sécond")


def test_a_key_is_required(lm: LanguageModel) -> None:
    with serving(lm, keys=KEYS) as served:
        for path in ("/", "/page.js", "/page.css", "/health", "/ready"):
            assert served.ask(path).status == 200
        for path in ("/v1/models", "/metrics", "/explanation", "/nothing"):
            for headers in ({}, {"authorization": "Bearer third"}, {"authorization": "first"}):
                answer = served.ask(path, **headers)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
            assert served.ask(path, authorization="Bearer first").status != 401
            # As programs write it that send UTF-8, and those that send Latin-1.
            for spelled in ("sécond", "sécond".encode().decode("latin-1")):
                assert served.ask(path, authorization=f"Bearer {spelled}").status != 401


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["first", " "], "An API key is empty"),
        ("secret", r"keys is a str, must be a list"),
        (b"secret", r"keys is a bytes, must be a list"),
        ([7], "An API key is a int, must be a text"),
        (["first\n"], "a control character"),
        (["a\0b"], "a control character"),
    ],
)
def test_keys_that_no_client_could_send_are_refused(
    lm: LanguageModel, keys: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        application(lm, NAME, keys=keys)


def test_pages_of_other_origins_are_refused(served: Served) -> None:
    for host in ("localhost", "LocalHost:80", "127.0.0.1:80", "[::1]:8000"):
        assert served.ask("/health", host=host).status == 200
    for host in ("evil.example", "localhost.evil.example:8000", ""):
        answer = served.ask("/health", host=host)
        assert (answer.status, answer.error["code"]) == (403, "wrong_host")
    answer = served.ask("/health", origin="http://evil.example")
    assert not any(name.startswith("access-control") for name in answer.headers)
