"""The asynchronous front: the tokens of ``generate`` for any threads, loops, cancels and errors."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from functools import cache
from itertools import count as counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.engine.tests.test_speculation import idle
from tests.adapter_files import write_adapter
from tests.landing import num_examples
from tests.stalled_steps import stalled_steps
from tests.waiting import WAIT_SECONDS

from interposer.errors import RequestError, UnknownNameError
from interposer_engine import (
    AsyncLanguageModel,
    Completion,
    Constraint,
    Delta,
    Generation,
    LanguageModel,
    QueueFullError,
    SamplingParams,
    load,
)
from interposer_engine._engine_thread import Delivery, Stages, StepThread

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.2, "seed": 5},
    {"stop": ["a", "\x07"], "temperature": 1.0, "seed": 9},
    {"top_logprobs": 2, "frequency_penalty": 0.5},
    {"constraint": Constraint.regex("[a-f]{40}")},
    {"prompt_logprobs": 1},
)
ENDLESS: dict[str, Any] = {"max_new_tokens": 150}
WAYS = ("whole", "streamed", "left", "cancelled", "wrong")


@pytest.fixture(scope="module")
def plain(llama: Path) -> LanguageModel:
    return load(llama, "float32", cache_tokens=2048)


@pytest.fixture(scope="module")
def small(llama: Path) -> LanguageModel:
    """The same in a cache so small that sequences are preempted."""
    return load(llama, "float32", cache_tokens=192, max_sequences=3, max_step_tokens=40)


@pytest.fixture(scope="module")
def expected(plain: LanguageModel) -> Callable[..., tuple[Completion, ...]]:
    @cache
    def of(text: str, count: int, kind: int, n: int) -> tuple[Completion, ...]:
        return tuple(plain.generate(text, n=n, max_new_tokens=count, **KINDS[kind]))

    return of


@contextmanager
def stepping(lm: LanguageModel, step: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Let ``step`` call the engine's own one."""
    own = lm.engine.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm.engine, "step", lambda: step(own))
        yield


async def until(model: AsyncLanguageModel, condition: Callable[[], bool]) -> None:
    """Wait until a condition is true between two steps; the engine's thread evaluates it."""
    while not await model.call(condition):
        pass


async def rounds(model: AsyncLanguageModel, count: int) -> None:
    """Wait until the engine's thread has taken orders ``count`` times."""
    for _ in range(count):
        await model.call(lambda: None)


def alike(found: Completion, wanted: Completion) -> None:
    assert (found.text, found.token_ids) == (wanted.text, wanted.token_ids)
    assert found.finish_reason == wanted.finish_reason
    assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    assert found.prompt_token_ids == wanted.prompt_token_ids
    told = [each.logprob for each in wanted.prompt_logprobs]
    assert [each.logprob for each in found.prompt_logprobs] == pytest.approx(told, abs=1e-4)


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # the thread
        st.sampled_from(WAYS),
        st.integers(1, 50),  # tokens of the prompt
        st.integers(1, 40),  # new ones
        st.integers(0, len(KINDS) - 1),
        st.integers(1, 2),  # answers
        st.integers(0, 5),  # tokens until it leaves, or rounds until it begins
    ),
    min_size=1,
    max_size=8,
)


@settings(
    max_examples=num_examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(REQUESTS)
def test_requests_of_any_threads_get_the_answers_of_generate(
    small: LanguageModel, expected: Callable[..., tuple[Completion, ...]], requests: Any
) -> None:
    async def asked(model: AsyncLanguageModel, request: Any) -> None:
        _, way, length, count, kind, n, early = request
        text = ("import os, sys\n" * 4)[:length]
        params = SamplingParams(max_new_tokens=count, **KINDS[kind])
        await rounds(model, early)
        if way == "wrong":
            with pytest.raises(UnknownNameError, match="Unknown adapter 'none'"):
                await model.generate(text, adapter="none")
        elif way == "cancelled":
            task = asyncio.create_task(model.generate(text, params, n=n))
            await rounds(model, early)
            task.cancel()
            await asyncio.wait([task])
        elif way == "whole":
            actual = await model.generate(text, params, n=n)
            for one, wanted in zip(actual, expected(text, count, kind, n), strict=True):
                alike(one, wanted)
        else:
            answers: list[list[Delta]] = [[] for _ in range(n)]
            num_read = 0
            async with aclosing(model.stream(text, params, n=n)) as deltas:
                async for delta in deltas:
                    answers[delta.index].append(delta)
                    num_read += 1
                    if way == "left" and num_read > early:
                        return
            for own, wanted in zip(answers, expected(text, count, kind, n), strict=True):
                ids = tuple(delta.token_id for delta in own)
                assert ("".join(delta.text for delta in own), ids) == (
                    wanted.text,
                    wanted.token_ids,
                )
                assert own[-1].finish_reason == wanted.finish_reason
                assert len(own[0].prompt_logprobs) == len(wanted.prompt_logprobs)

    async def run(model: AsyncLanguageModel, thread: int) -> None:
        own = [request for request in requests if request[0] == thread]
        await asyncio.gather(*(asked(model, request) for request in own))

    for _, way, length, count, kind, n, _ in requests:
        if way in ("whole", "streamed"):  # before threads ask for it
            expected(("import os, sys\n" * 4)[:length], count, kind, n)
    model = AsyncLanguageModel(small)
    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(asyncio.run, run(model, thread)) for thread in range(3)]:
            done.result(WAIT_SECONDS)
    assert model.num_unfinished == 0
    model.close()
    assert idle(small)
    assert not any(each.name.startswith("interposer-engine") for each in threading.enumerate())


def test_leaving_a_stream_or_cancelling_a_task_frees_pages_at_once(small: LanguageModel) -> None:
    async def run() -> None:
        async with AsyncLanguageModel(small) as model:
            async for delta in model.stream([1, 2, 3], **ENDLESS):
                assert delta.index == 0
                break
            await until(model, lambda: idle(small))
            task = asyncio.create_task(model.generate([[1, 2, 3]], **ENDLESS))
            await until(model, lambda: small.engine.busy)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(model, lambda: idle(small))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(model.generate([[1, 2, 3]], **ENDLESS), 0.05)
            await until(model, lambda: idle(small))
            assert model.num_unfinished == 0

    with stalled_steps(small):
        asyncio.run(run())


def test_a_failing_step_fails_all_that_ran_and_no_later_request(
    small: LanguageModel, expected: Callable[..., tuple[Completion, ...]]
) -> None:
    broken = threading.Event()

    def sometimes(step: Callable[[], Any]) -> Any:
        if broken.is_set():
            broken.clear()
            raise ValueError("a kernel failed")
        return step()

    async def run() -> None:
        async with AsyncLanguageModel(small) as model:
            running = [
                asyncio.create_task(model.generate([[token]], **ENDLESS)) for token in (1, 2, 3)
            ]
            await until(model, lambda: len(small.engine.scheduler.running) == 3)
            broken.set()
            for error in await asyncio.gather(*running, return_exceptions=True):
                assert isinstance(error, ValueError)
                assert str(error) == "a kernel failed"
            assert model.trouble == "the last step of the engine failed"
            steps.release()
            (actual,) = await model.generate("import", max_new_tokens=5)
            alike(actual, expected("import", 5, 0, 1)[0])
            assert model.trouble == ""

    with stalled_steps(small) as steps, stepping(small, sometimes):
        asyncio.run(run())
    assert idle(small)


def test_a_step_that_ends_the_thread_fails_all_waiting_requests(small: LanguageModel) -> None:
    def leaves(step: Callable[[], Any]) -> Any:
        raise SystemExit(3)

    async def run() -> None:
        model = AsyncLanguageModel(small)
        asked = [model.generate([[1, 2]], **ENDLESS), model.generate([[3]], **ENDLESS)]
        for error in await asyncio.gather(*asked, return_exceptions=True):
            assert "The model was closed" in str(error)
        assert model.trouble == "the engine does not run"
        with pytest.raises(RequestError, match="was closed"):
            await model.call(lambda: None)

    with stepping(small, leaves):
        asyncio.run(run())
    assert idle(small)


@pytest.mark.parametrize("texts", [True, False])
def test_closing_ends_the_thread_and_unfinished_requests(small: LanguageModel, texts: bool) -> None:
    prompt: Any = "import" if texts else [1, 2, 3]

    async def run() -> None:
        async with AsyncLanguageModel(small) as model:
            waiting = [asyncio.create_task(model.generate([prompt], **ENDLESS)) for _ in range(5)]
            await until(model, lambda: len(small.engine.scheduler.running) == 3)
        for task in waiting:
            with pytest.raises(RequestError, match="The model was closed"):
                await task
        with pytest.raises(RequestError, match="The model was closed"):
            await model.generate([prompt])
        model.close()  # again does nothing

    with stalled_steps(small):
        asyncio.run(run())
    assert idle(small)


def test_an_unreferenced_model_and_a_closed_loop_leave_no_thread_or_request(
    small: LanguageModel,
) -> None:
    async def finished(model: AsyncLanguageModel) -> None:
        while model.num_unfinished:
            await rounds(model, 1)
        assert await model.call(lambda: idle(small))

    def abandoned() -> list[threading.Thread]:
        model = AsyncLanguageModel(small)
        loop = asyncio.new_event_loop()
        with stalled_steps(small) as steps:
            generation = loop.run_until_complete(opened(model))
            loop.close()
            steps.release()  # its next tokens have nowhere to go, whenever the first one came
            asyncio.run(finished(model))
        assert generation.stages.ended
        return [each for each in threading.enumerate() if each not in others]

    others = threading.enumerate()
    threads = abandoned()
    assert threads
    gc.collect()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


async def last_index(generation: Generation) -> int:
    """Read a generation to the end, and return the index of the last token's answer."""
    index = -1
    async for deltas in generation:
        index = deltas[-1].index
    return index


async def opened(model: AsyncLanguageModel) -> Any:
    return model.open([([1, 2, 3], SamplingParams(**ENDLESS))], streams=True)


def test_answers_beyond_the_capacity_are_refused(small: LanguageModel) -> None:
    async def run() -> None:
        async with AsyncLanguageModel(small, max_waiting=2) as model:
            assert model.capacity == 5
            with pytest.raises(QueueFullError, match="asks for 6 answers, and 5 may run or wait"):
                await model.generate("import", n=6)
            running = [
                asyncio.create_task(model.generate([[token]], **ENDLESS)) for token in (1, 2)
            ]
            running.append(asyncio.create_task(model.generate([[3], [4]], **ENDLESS)))
            await until(model, lambda: model.num_unfinished == 4)
            with pytest.raises(QueueFullError, match="4 answers are running or waiting, and 5 may"):
                await model.generate([[5], [6]])
            running[0].cancel()
            await until(model, lambda: model.num_unfinished == 3)
            steps.release()
            for completion in await model.generate([[5], [6]], max_new_tokens=2):
                assert len(completion.token_ids) == 2

    with stalled_steps(small) as steps:
        asyncio.run(run())
    with pytest.raises(RequestError, match="max_waiting is -1, must be None or at least 0"):
        AsyncLanguageModel(small, max_waiting=-1)


def test_adapters_and_weights_change_between_steps(llama: Path, tmp_path: Path) -> None:
    lm = load(llama, "float32", cache_tokens=512)
    own = write_adapter(tmp_path / "own", {"model.layers.0.self_attn.o_proj": (64, 64)})
    threads: set[str] = set()

    def noted(step: Callable[[], Any]) -> Any:
        threads.add(threading.current_thread().name)
        running, waiting = lm.engine.scheduler.running, lm.engine.scheduler.waiting
        if not waiting and [sequence.params.max_new_tokens for sequence in running] == [150]:
            time.sleep(0)  # the long request gets no tokens while it is alone
            return []
        return step()

    async def run() -> None:
        async with AsyncLanguageModel(lm) as model:
            before = await model.generate([[1, 2, 3]], max_new_tokens=6)
            running = asyncio.create_task(model.generate([[1, 2, 3]], **ENDLESS))
            await until(model, lambda: lm.engine.busy)
            await model.load_adapter("own", own)
            assert lm.adapters == ("own",)
            with_own = await model.generate([[1, 2, 3]], max_new_tokens=6, adapter="own")
            assert with_own[0].logprobs != before[0].logprobs
            with pytest.raises(RequestError, match="while requests are unfinished"):
                await model.update_weights({})
            running.cancel()
            await until(model, lambda: not lm.engine.busy)
            await model.remove_adapter("own")
            with pytest.raises(UnknownNameError):
                await model.generate([[1, 2, 3]], adapter="own")
            weight = {"model.norm.weight": torch.full((64,), 0.5)}
            assert await model.update_weights(weight) == ()
            after = await model.generate([[1, 2, 3]], max_new_tokens=6)
            assert after[0].logprobs != before[0].logprobs
            logits = await model.call(lm.logits, [1, 2, 3])
            assert logits.shape == (3, 256)
            assert await model.call(lambda: threading.current_thread().name) == "interposer-engine"
            with pytest.raises(ZeroDivisionError):
                await model.call(lambda: 1 // 0)

    with stepping(lm, noted):
        asyncio.run(run())
    assert threads == {"interposer-engine"}


def test_tokens_of_steps_in_another_thread_reach_the_answer(
    small: LanguageModel, expected: Callable[..., tuple[Completion, ...]]
) -> None:
    def elsewhere(step: Callable[[], Any]) -> Any:
        if threading.current_thread().name != "interposer-engine":
            return step()
        time.sleep(0)  # lets the other thread run
        return []

    async def run() -> None:
        async with AsyncLanguageModel(small) as model:
            answer = asyncio.create_task(model.generate("import", max_new_tokens=20))
            await until(model, lambda: small.engine.busy)
            (other,) = await asyncio.to_thread(small.generate, "import os", max_new_tokens=40)
            alike(other, expected("import os", 40, 0, 1)[0])
            alike((await answer)[0], expected("import", 20, 0, 1)[0])

    with stepping(small, elsewhere):
        asyncio.run(run())
    assert idle(small)


def test_an_answer_that_fails_as_another_one_ends_fails_the_request(small: LanguageModel) -> None:
    own = small.engine.sample

    def failing(*arguments: Any) -> tuple[list[int], list[float]]:
        tokens, logprobs = own(*arguments)
        return tokens, [*logprobs[:-1], math.nan]

    async def run() -> None:
        async with AsyncLanguageModel(small) as model:
            generation = model.open([([1, 2], SamplingParams(max_new_tokens=1))], 2, streams=True)
            with pytest.raises(ArithmeticError, match="are not finite"):
                await last_index(generation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small.engine, "sample", failing)
        asyncio.run(run())
    assert idle(small)


def test_an_answer_that_is_cancelled_in_the_engine_leaves_the_others(small: LanguageModel) -> None:
    async def run() -> None:
        async with AsyncLanguageModel(small) as model:
            params = SamplingParams(max_new_tokens=6, ignore_eos=True)
            generation = model.open([([1, 2], params)], 2, streams=True)
            await until(model, lambda: len(small.engine.scheduler.running) == 2)
            await model.call(small.engine.cancel, generation.answers[0].sequence)
            steps.release()
            first, second = await generation.completions()
            assert (first.finish_reason, second.finish_reason) == ("cancelled", "length")
            assert len(second.token_ids) == 6

    with stalled_steps(small) as steps:
        asyncio.run(run())
    assert idle(small)


def test_an_error_of_a_joining_request_is_raised_in_that_request(small: LanguageModel) -> None:
    """Between its check and its first step, what it needs may have gone."""

    async def run() -> None:
        async with AsyncLanguageModel(small) as model:
            held = threading.Event()
            blocking = asyncio.create_task(model.call(held.wait, WAIT_SECONDS))
            good = asyncio.create_task(model.generate([[1, 2, 3]], max_new_tokens=4))
            bad = asyncio.create_task(model.generate([[4, 5]], max_new_tokens=4))
            while model.num_unfinished < 2:
                await asyncio.sleep(0)
            with pytest.MonkeyPatch.context() as patch:
                own = small.engine.add

                def refusing(prompt: Any, *rest: Any, **how: Any) -> Any:
                    if list(prompt) == [4, 5]:
                        raise RequestError("it cannot be taken now")
                    return own(prompt, *rest, **how)

                patch.setattr(small.engine, "add", refusing)
                held.set()
                assert await blocking
                with pytest.raises(RequestError, match="it cannot be taken now"):
                    await bad
                assert len((await good)[0].token_ids) == 4

    asyncio.run(run())
    assert idle(small)


def test_chats_equal_the_synchronous_model(chat_model: LanguageModel) -> None:
    messages = [{"role": "user", "content": "import os\n"}]
    wanted = chat_model.chat(messages, max_new_tokens=6)

    async def run() -> None:
        async with AsyncLanguageModel(chat_model) as model:
            assert await model.chat(messages, max_new_tokens=6) == wanted
            prompt = await model.chat_prompt(messages)
            streamed = [d.text async for d in model.stream(prompt, max_new_tokens=6)]
            assert "".join(streamed) == wanted.text
            with pytest.raises(RequestError, match="must have a 'role'"):
                await model.chat([{"content": "a"}])
            with pytest.raises(UnknownNameError, match="n of generate"):
                await model.chat(messages, n=2)

    asyncio.run(run())


@pytest.fixture(scope="module")
def chat_model() -> LanguageModel:
    folder = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"
    return load(folder, "float32", cache_tokens=1024)


def test_stages_are_read_from_the_clock_once_each(small: LanguageModel) -> None:
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)

    async def run() -> Stages:
        steps = StepThread(small, None, clock=counter(1).__next__)
        try:
            generation = steps.open([([1, 2, 3], params)], 1, streams=False)
            await generation.completions()
        finally:
            steps.stop()
        return generation.stages

    # The clock was also read at the beginning of the second and third step, for 4 and 5.
    assert asyncio.run(run()) == Stages(received=1, started=2, first_token=3, ended=6)


class Timers:
    """An event loop that keeps its timers, so that the test calls them."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self.timers.append((seconds, callback))


class CountingReader:
    """A reader that counts how often it was woken."""

    def __init__(self) -> None:
        self.unread: list[int] = []
        self.num_wakes = 0

    def wake(self) -> None:
        self.num_wakes += 1
        self.unread.clear()

    def fail(self, error: Exception) -> None:
        raise error


def test_tokens_of_a_stream_are_delivered_together_after_a_pause() -> None:
    loop, reader = Timers(), CountingReader()
    generation = cast(Generation, reader)
    delivery = Delivery(cast(asyncio.AbstractEventLoop, loop))
    delivery.streams.add(generation)
    delivery.deliver([(generation, None)])
    assert (reader.num_wakes, delivery.is_paused) == (1, True)
    reader.unread += [1, 2]
    delivery.deliver([])  # starts no second timer
    ((seconds, end_pause),) = loop.timers
    assert seconds == 0.01
    end_pause()
    assert (reader.num_wakes, delivery.is_paused, len(loop.timers)) == (2, True, 2)
    loop.timers[1][1]()
    assert (reader.num_wakes, delivery.is_paused, len(loop.timers)) == (2, False, 2)


@pytest.mark.parametrize(("num_streams", "seconds"), [(1, 0.01), (40, 0.02), (1000, 0.04)])
def test_the_pause_grows_with_the_number_of_streams(num_streams: int, seconds: float) -> None:
    loop = Timers()
    delivery = Delivery(cast(asyncio.AbstractEventLoop, loop))
    delivery.streams |= {cast(Generation, CountingReader()) for _ in range(num_streams)}
    delivery.deliver([])
    assert [timer[0] for timer in loop.timers] == [seconds]
