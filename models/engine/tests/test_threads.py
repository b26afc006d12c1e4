"""Calls of several threads: each gets the result that it gets alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from models.adapt.tests.test_encoder import BERT, write
from models.engine.tests.test_speculation import idle
from tests.waiting import wait_until

from interposer.errors import RequestError
from interposer_adapt import load_encoder
from interposer_engine import AsyncLanguageModel, LanguageModel, load
from interposer_engine._locks import FairLock, OneThreadLock

TURNS = "{%- for message in messages %}{{ message.content }}{%- endfor %}"
SETTINGS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def lm(llama: Path) -> LanguageModel:
    return load(llama, "float32", cache_tokens=2048, max_sequences=8)


def test_each_thread_gets_the_tokens_that_it_gets_alone(lm: LanguageModel) -> None:
    messages = [{"role": "user", "content": "import"}]
    front = AsyncLanguageModel(lm)
    calls: list[Callable[[], Any]] = [
        lambda: lm.generate(["import", [7, 8, 9]], **SETTINGS)[1].token_ids,
        lambda: lm.generate([[5]], n=2, **SETTINGS)[1].token_ids,
        lambda: [delta.token_id for delta in lm.stream("def", **SETTINGS)],
        lambda: lm.chat(messages, template=TURNS, **SETTINGS).token_ids,
        lambda: lm.score([1, 2], [[3, 4], [5]]),
        lambda: asyncio.run(front.generate([[9]], **SETTINGS))[0].token_ids,
        lambda: lm.logits([4, 5, 6]).argmax(-1).tolist(),
    ]
    alone = [call() for call in calls]
    alone[4] = [pytest.approx(scores, rel=1e-5) for scores in alone[4]]
    left = lm.stream([6], **SETTINGS)
    first = next(left)
    with ThreadPoolExecutor(len(calls)) as threads:
        assert list(threads.map(lambda call: call(), calls)) == alone
    rest = [first, *left]  # whose tokens the steps of other threads computed
    assert [delta.token_id for delta in rest] == list(lm.generate([[6]], **SETTINGS)[0].token_ids)
    front.close()
    assert idle(lm)


def test_a_stream_that_ends_in_the_middle_of_a_step_is_cancelled_after_it(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = lm.generate([[1, 2]], **SETTINGS)[0].token_ids
    left: list[Any] = [lm.stream([5], **SETTINGS)]
    next(left[0])
    compute, busy = lm.engine.runner.compute, []

    def collected(chunks: Any) -> torch.Tensor:
        if left:
            left.pop().close()  # as the garbage collector may, at any allocation
            busy.append(len(chunks))
        return compute(chunks)

    monkeypatch.setattr(lm.engine.runner, "compute", collected)
    assert lm.generate([[1, 2]], **SETTINGS)[0].token_ids == expected
    assert busy == [2]
    assert idle(lm)


@pytest.mark.process  # it polls
def test_a_waiting_thread_comes_before_the_one_that_releases_the_lock() -> None:
    lock, order = FairLock(), list[str]()

    def other() -> None:
        with lock:
            order.append("other")

    thread = Thread(target=other)
    with lock, lock:
        thread.start()
        wait_until(lambda: lock.is_awaited)
    with lock:
        order.append("own")
    thread.join()
    assert order == ["other", "own"]
    with lock:
        lock.call_soon(lambda: order.append("later"))
        assert order[-1] == "own"
    assert order[-1] == "later"


def test_ranks_of_one_program_refuse_a_second_thread_while_requests_run() -> None:
    busy = True
    lock = OneThreadLock(lambda: busy)

    def enter() -> None:
        with lock:
            pass

    with ThreadPoolExecutor(1) as threads:
        with lock, pytest.raises(RequestError, match="Another thread uses this model"):
            threads.submit(enter).result()
        with pytest.raises(RequestError, match="make all calls in one thread"):
            threads.submit(enter).result()
        busy = False
        threads.submit(enter).result()


def test_an_encoder_gives_each_thread_its_own_vectors(tmp_path: Path) -> None:
    write(tmp_path, BERT)
    encoder = load_encoder(tmp_path)
    texts = [["a", "a much longer text than that"], ["what a cat does all day"], ["", "b" * 90]]
    alone = [encoder.embed(each) for each in texts]
    with ThreadPoolExecutor(3) as threads:
        for vectors, expected in zip(threads.map(encoder.embed, texts), alone, strict=True):
            torch.testing.assert_close(vectors, expected)
