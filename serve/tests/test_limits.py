"""Clients leave, queues fill up, deadlines pass, steps fail and servers end; nothing is lost."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from serve.tests.conftest import NAME, Served, events, eventually, serving

from interposer.errors import ConfigError
from interposer_models import LanguageModel, Speculation, load
from interposer_serve import Limits, application

pytestmark = pytest.mark.xdist_group("serve")

LONG = {"model": NAME, "prompt": "import os", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def slow(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make steps wait for a moment, and return the number of held pages before each."""
    held: list[int] = []
    step = lm.engine.step

    def slowly() -> Any:
        held.append(lm.engine.pool.num_pages - lm.engine.pool.num_free)
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(lm.engine, "step", slowly)
    return held


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages_within_a_step(
    lm: LanguageModel, slow: list[int], stream: bool
) -> None:
    with serving(lm) as served, ThreadPoolExecutor(1) as pool:
        other = pool.submit(served.complete, max_tokens=200, ignore_eos=True, prompt="x")
        eventually(lambda: len(lm.engine.scheduler.running) == 1)
        connection = served.connect("/v1/completions", {**LONG, "stream": stream})
        eventually(lambda: len(lm.engine.scheduler.running) == 2)
        first, second = lm.engine.scheduler.running
        eventually(lambda: len(second.output) > 40)
        tokens = len(second.output)
        connection.close()
        eventually(lambda: second.finish_reason is not None)
        # What one token needs in time is a step; the rest is what the network takes to tell.
        assert (second.finish_reason, second.pages) == ("cancelled", [[]])
        assert len(second.output) < tokens + 50
        assert lm.engine.scheduler.running == [first]
        assert other.result().body["usage"]["completion_tokens"] == 200
        eventually(lambda: lm.engine.pool.num_free == lm.engine.pool.num_pages)
        eventually(lambda: served.metric("interposer_generations_total") == 2)


def test_a_stream_whose_client_left_before_it_began_is_cancelled(lm: LanguageModel) -> None:
    """As servers tell it that follow a later version of ASGI."""
    app = application(lm, NAME, hosts=None)
    headers = [(b"content-type", b"application/json")]
    scope: Any = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": ""}

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps({**LONG, "stream": True}).encode()}

    async def send(_: Any) -> None:
        raise OSError("the client left")

    async def run() -> int:
        async with app.router.lifespan_context(app):
            with pytest.raises(OSError, match="the client left"):
                await app(scope, receive, send)
            await asyncio.sleep(0.5)
            return len(lm.engine.scheduler.running)

    assert asyncio.run(run()) == 0


def test_an_order_to_leave_is_followed_before_the_next_step(lm: LanguageModel) -> None:
    """Steps that wait to be allowed show what stands between two of them."""
    allowed, at_step = threading.Semaphore(0), threading.Semaphore(0)
    step, held = lm.engine.step, []

    def counted() -> Any:
        held.append(len(lm.engine.scheduler.running) + len(lm.engine.scheduler.waiting))
        at_step.release()
        assert allowed.acquire(timeout=60)
        return step()

    with pytest.MonkeyPatch.context() as patch, serving(lm) as served:
        patch.setattr(lm.engine, "step", counted)
        leaving = served.connect("/v1/completions", {**LONG, "stream": True})
        assert at_step.acquire(timeout=60)
        staying = served.connect("/v1/completions", {**LONG, "max_tokens": 3, "stream": True})

        def next_step() -> int:
            allowed.release()
            assert at_step.acquire(timeout=60)
            return held[-1]

        eventually(lambda: next_step() == 2)
        leaving.close()
        eventually(lambda: served.metric("interposer_generations_total") == 1)
        assert next_step() == 1  # after the step that waited
        for _ in range(8):
            allowed.release()
        assert b"[DONE]" in read_all(staying)


def test_tokens_do_not_wait_for_a_step_that_takes_long(lm: LanguageModel) -> None:
    """The second token comes while the loop rests after the first one, and then no step ends."""
    allowed, step = threading.Semaphore(0), lm.engine.step

    def waiting() -> Any:
        assert allowed.acquire(timeout=60)
        return step()

    with pytest.MonkeyPatch.context() as patch, serving(lm) as served:
        patch.setattr(lm.engine, "step", waiting)
        fields = {"prompt": [1, 2, 3], "max_tokens": 5, "stream": True, "logprobs": 0}
        connection = served.connect("/v1/completions", {**LONG, **fields})
        connection.settimeout(30)
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
    """Return what comes until the end of a chunked response."""
    content = b""
    while not content.endswith(b"0\r\n\r\n"):
        part = connection.recv(65536)
        assert part, content
        content += part
    connection.close()
    return content


def test_a_full_queue_is_told_with_the_time_to_wait(lm: LanguageModel, slow: list[int]) -> None:
    room = lm.engine.scheduler.max_sequences + 2
    with serving(lm, limits=Limits(queue=2)) as served:
        running = [
            served.connect("/v1/completions", {**LONG, "n": room // 2, "stream": True})
            for _ in range(2)
        ]
        eventually(lambda: len(lm.engine.scheduler.running) == room - 2)
        eventually(lambda: len(lm.engine.scheduler.waiting) == 2)
        answer = served.complete()
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        assert answer.error["message"].startswith(f"{room} answers are running or waiting, and")
        assert int(answer.headers["retry-after"]) >= 1
        assert served.metric("interposer_sequences_waiting") == 2
        # Nothing is tokenized for an answer that has no room.
        assert served.complete(prompt="\ud800").status == 429
        assert served.chat().status == 429
        running[0].close()
        eventually(lambda: served.complete(max_tokens=1).status == 200)
        running[1].close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_ends_an_answer(lm: LanguageModel, slow: list[int], stream: bool) -> None:
    with serving(lm, limits=Limits(deadline_seconds=1)) as served:
        answer = served.complete(**LONG, stream=stream)
        if stream:
            *parts, last = answer.body.removesuffix("\n\n").split("\n\n")
            assert len(parts) > 3
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert answer.status == 504
            error = answer.error
        assert error["code"] == "deadline_exceeded"
        assert error["message"] == "The answer took longer than 1 s"
        assert served.complete(max_tokens=1).status == 200


def test_bodies_and_prompts_have_a_size(lm: LanguageModel) -> None:
    with serving(lm, limits=Limits(body_bytes=2000, prompt_tokens=100)) as served:
        long = served.complete(prompt="x" * 2000)
        assert (long.status, long.error["code"]) == (413, "body_too_large")
        assert "more than the 2000 bytes" in long.error["message"]
        answer = served.complete(prompt="x " * 200)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["message"].endswith("allowed are 100")
        assert served.complete(prompt="x", max_tokens=1).status == 200


def test_a_body_that_tells_no_length_is_cut_off(lm: LanguageModel) -> None:
    with serving(lm, limits=Limits(body_bytes=2000)) as served:
        connection = HTTPConnection("127.0.0.1", served.port, timeout=60)
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


def test_a_step_that_fails_fails_its_requests_alone(
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
        whole = pool.submit(served.complete)
        streamed = pool.submit(served.complete, stream=True)
        assert (whole.result().status, whole.result().error["code"]) == (500, "failed")
        assert streamed.result().body.count("data: ") == 1
        assert '"server_error"' in streamed.result().body
        assert served.ask("/ready").status == 503
        assert served.ask("/health").status == 200
        broken.clear()
        assert served.complete(max_tokens=2).status == 200
        assert served.ask("/ready").status == 200
    assert "a kernel failed" in caplog.text


def test_answers_end_before_the_server_does(lm: LanguageModel, slow: list[int]) -> None:
    with serving(lm, drain=60) as served:
        pool = ThreadPoolExecutor(4)
        asked = [pool.submit(served.complete, max_tokens=n, stream=True) for n in (20, 40, 60)]
        eventually(lambda: len(lm.engine.scheduler.running) == 3)
    for answer, count in zip(asked, (20, 40, 60), strict=True):
        assert len(events(answer.result().body)) <= count
        assert events(answer.result().body)[-1]["choices"][0]["finish_reason"] == "length"
    pool.shutdown()


def test_what_does_not_end_in_time_is_cancelled(lm: LanguageModel, slow: list[int]) -> None:
    with serving(lm, drain=1) as served:
        connection = served.connect("/v1/completions", {**LONG, "stream": True})
        eventually(lambda: len(lm.engine.scheduler.running) == 1)
    content = b""
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
        for status in (200, 400):
            line = 'interposer_http_responses_total{endpoint="complete",status="%d"} 1.0'
            assert line % status in figures


def test_guesses_are_counted(chat_folder: Path) -> None:
    guessing = Speculation(adaptive=False)
    with serving(load(chat_folder, cache_tokens=512, speculation=guessing)) as served:
        served.complete(prompt=[1, 2, 3] * 5, max_tokens=30, ignore_eos=True)
        drafted = served.metric("interposer_drafted_tokens")
        assert drafted >= served.metric("interposer_accepted_tokens") >= 0
        assert served.metric("interposer_generated_tokens_total") == 30


KEYS = ("first", "sécond")


def test_a_key_is_asked_for(lm: LanguageModel) -> None:
    with serving(lm, keys=KEYS) as served:
        for path in ("/", "/page.js", "/page.css", "/health", "/ready"):
            assert served.ask(path).status == 200
        for path in ("/v1/models", "/metrics", "/explanation", "/nothing"):
            for given in ({}, {"authorization": "Bearer third"}, {"authorization": "first"}):
                answer = served.ask(path, **given)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
            assert served.ask(path, authorization="Bearer first").status != 401
    with pytest.raises(ConfigError, match="An API key is empty"):
        application(lm, NAME, keys=["first", " "])


def test_pages_of_other_origins_are_kept_out(served: Served) -> None:
    for host in ("localhost", "LocalHost:80", "127.0.0.1:80", "[::1]:8000"):
        assert served.ask("/health", host=host).status == 200
    for host in ("evil.example", "localhost.evil.example:8000", ""):
        answer = served.ask("/health", host=host)
        assert (answer.status, answer.error["code"]) == (403, "wrong_host")
    answer = served.ask("/health", origin="http://evil.example")
    assert not any(name.startswith("access-control") for name in answer.headers)
