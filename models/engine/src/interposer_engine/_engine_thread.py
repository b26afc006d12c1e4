"""The thread that runs the engine's steps, and the generations that receive its tokens.

A generation is one request, with a stream for each answer. Requests join and leave between two
steps. Event loops are woken by deliveries.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from interposer.errors import RequestError
from interposer.tooling import steady_time_ns
from interposer_engine._language_model import (
    Completion,
    Delta,
    LanguageModel,
    Stream,
    TokenPrompt,
    completions,
)
from interposer_engine._sampling_params import SamplingParams
from interposer_engine._sequence import Event, TokenSequence


class QueueFullError(RequestError):
    """The limit of running and waiting answers is reached; the same request can succeed later.

    Attributes:
        num_unfinished: Number of answers that run or wait.
        capacity: Largest number of such answers.
    """

    def __init__(self, num_answers: int, num_unfinished: int, capacity: int) -> None:
        if num_answers > capacity:
            reason = f"The request asks for {num_answers} answers, and {capacity} may run or wait"
            reason, hint = f"{reason} at once", "fewer answers"
        else:
            reason = f"{num_unfinished} answers are running or waiting, and {capacity} may be"
            hint = "again later"
        super().__init__(f"{reason}. Try: {hint}, or a larger max_waiting")
        self.num_unfinished = num_unfinished
        self.capacity = capacity


# A token of a stream may wait this long (times the number of streams) for the tokens of later
# steps. One delivery to a server's stream takes about 30 microseconds, whatever the number of
# tokens: a sixteenth of that time.
_STREAM_PAUSE_SECONDS = 0.0005
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.01, 0.04


class Delivery:
    """Wakes the tasks of one event loop that wait for tokens.

    The step thread requests a delivery for the first and last token of a stream, and for a token
    that follows a pause. During a pause tokens accumulate; a timer of the event loop ends the pause
    a few milliseconds after the last delivery, and delivers the accumulated tokens together.

    Attributes:
        loop: The event loop of the readers.
        streams: Generations whose tokens are delivered one by one.
        is_paused: Whether later tokens wait; read by the step thread.
        num_open: Number of generations that have not ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.streams: set[Generation] = set()
        self.is_paused = False
        self.num_open = 0

    def deliver(self, outcomes: Iterable[tuple[Generation, Exception | None]]) -> None:
        """Wake tasks that wait for tokens, and fail generations with errors, in the event loop."""
        for generation, error in outcomes:
            if error is None:
                generation.wake()
            else:
                generation.fail(error)
        self._pause()

    def _pause(self) -> None:
        if self.streams and not self.is_paused:
            self.is_paused = True
            seconds = max(_MIN_PAUSE_SECONDS, len(self.streams) * _STREAM_PAUSE_SECONDS)
            self.loop.call_later(min(seconds, _MAX_PAUSE_SECONDS), self._end_pause)

    def _end_pause(self) -> None:
        # The step thread adds a token before it reads this flag. So either that thread requests a
        # delivery, or the loop below finds the token.
        self.is_paused = False
        if waiting := [generation for generation in self.streams if generation.unread]:
            for generation in waiting:
                generation.wake()
            self._pause()


# Detokenizing this many tokens takes a millisecond; more would block the event loop too long.
_MOST_AT_ONCE = 256


@dataclass(slots=True)
class Stages:
    """Start times of the stages of a request, in nanoseconds since the epoch; 0 if not started."""

    received: int
    started: int = 0
    first_token: int = 0
    ended: int = 0


class Generation(AsyncIterator[list[Delta]]):
    """The answers to one request; ``async for`` yields lists of new tokens.

    All methods must be called in the event loop in which the generation was opened.

    Attributes:
        prompts: Tokens of each prompt, with the sampling parameters of the first answer.
        n: Number of answers to each prompt. Answers to the first prompt come first; see
            ``Delta.index``.
        delivery: Delivery of the event loop.
        streams: Whether tokens are delivered soon after each step, or later and together.
        stages: Start times of the stages.
        answers: Streams of the answers, once the engine has the request.
        unread: Tokens that were not read yet; the step thread appends to this queue.
        num_tokens: Number of tokens so far; written by the step thread.
        num_unfinished: Number of unfinished answers; written by the step thread.
        error: The error that ended the generation early.
        on_end: Functions to call with the generation when it ends.
        kept_alive: Objects to keep referenced until the end.
    """

    def __init__(
        self,
        prompts: Sequence[tuple[TokenPrompt, SamplingParams]],
        n: int,
        delivery: Delivery,
        received: int,
        on_end: Sequence[Callable[[Generation], None]],
        *,
        streams: bool,
        clock: Callable[[], int] = steady_time_ns,
    ) -> None:
        self.prompts = prompts
        self.n = n
        self.delivery = delivery
        self.streams = streams
        self.stages = Stages(received)
        self.answers: list[Stream] = []
        self.unread: deque[tuple[Stream, Event | Delta]] = deque()
        self.num_tokens = 0
        self.num_unfinished = self.num_answers
        self.error: Exception | None = None
        self.on_end = on_end
        self.kept_alive: Sequence[object] = ()
        self._clock = clock
        self._woken = asyncio.Event()
        self._is_read = False

    @property
    def num_answers(self) -> int:
        """Number of answers to all prompts of the request."""
        return self.n * len(self.prompts)

    async def __anext__(self) -> list[Delta]:
        """Wait for new tokens, and return all that are available.

        Raises:
            StopAsyncIteration: every answer has ended.
            Exception: the error that ended the generation early.
        """
        while not self._is_read:
            await self._woken.wait()
            self._woken.clear()
            # Read the flag before the queue: after the end nothing is appended to the queue.
            self._is_read = bool(self.stages.ended)
            tokens = [self.unread.popleft() for _ in range(len(self.unread))]
            if len(tokens) > _MOST_AT_ONCE:
                return await asyncio.to_thread(_deltas, tokens)
            if tokens:
                return _deltas(tokens)
        raise StopAsyncIteration if self.error is None else self.error

    async def completions(self) -> list[Completion]:
        """Wait for all answers, and return the completions; this consumes the tokens.

        Raises: Exception: the error that ended the generation early.
        """
        async for _ in self:
            pass
        return completions(self.answers, self.n)

    def wake(self) -> None:
        """Wake the task that waits for this generation's tokens."""
        self._woken.set()
        if not (self.num_unfinished or self.stages.ended):
            self._end()

    def fail(self, error: Exception) -> None:
        """End the generation with an error, unless the generation has ended."""
        if not self.stages.ended:
            self.error = error
            self._woken.set()
            self._end()

    def close(self) -> None:
        """Cancel unfinished answers; the current step still computes one more token of each."""
        self.fail(RequestError("The request was closed before its answers ended"))

    def _end(self) -> None:
        self.stages.ended = self._clock()
        self.kept_alive = ()
        for callback in self.on_end:
            callback(self)


def _deltas(tokens: list[tuple[Stream, Event | Delta]]) -> list[Delta]:
    return [token if isinstance(token, Delta) else stream.delta(token) for stream, token in tokens]


_log = logging.getLogger("interposer")
# Tokens of an answer that is not streamed to deliver at once. So detokenizing overlaps with steps.
_BATCH_TOKENS = 64
T = TypeVar("T")
Outcomes = Mapping[Generation, Exception | None]
"""Generations to wake, and the errors that end some of them."""


class StepThread:
    """Thread that runs the steps of a model's engine while requests are unfinished.

    Other threads send requests through a queue. The step thread holds the engine's lock while it
    uses the engine, because methods of the model may be called at the same time.

    Attributes:
        failed: Whether the last step raised an error.
        capacity: Number of answers that may run or wait; None for no limit.
    """

    def __init__(
        self,
        model: LanguageModel,
        max_waiting: int | None,
        *,
        clock: Callable[[], int] = steady_time_ns,
    ) -> None:
        """Start the step thread.

        Args:
            clock: Returns nanoseconds since the epoch, for the stages of each request.
        """
        self.failed = False
        self.capacity: int | None = None
        if max_waiting is not None:
            self.capacity = model.engine.scheduler.max_sequences + max_waiting
        self._model = model
        self._clock = clock
        self._num_unfinished = 0
        self._closed = False
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[TokenSequence, tuple[Generation, Stream]] = {}
        self._deliveries: dict[asyncio.AbstractEventLoop, Delivery] = {}
        # Reentrant, because the garbage collector may close a model while this thread holds it.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="interposer-engine", daemon=True)
        self._thread.start()

    # The methods below may be called in any thread; ``open`` needs a running event loop.

    @property
    def alive(self) -> bool:
        """Whether the thread accepts requests."""
        return not self._closed and self._thread.is_alive()

    @property
    def num_unfinished(self) -> int:
        """Number of answers that run or wait."""
        return self._num_unfinished

    def check_capacity(self, num_answers: int) -> None:
        """Raise QueueFullError beyond the capacity, or RequestError once the thread has ended."""
        if self._closed:
            raise stopped_error()
        if self.capacity is not None and self._num_unfinished + num_answers > self.capacity:
            raise QueueFullError(num_answers, self._num_unfinished, self.capacity)

    def open(
        self,
        prompts: Sequence[tuple[TokenPrompt, SamplingParams]],
        n: int,
        *,
        streams: bool,
        received: int | None = None,
        on_end: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """Queue a request; see ``AsyncLanguageModel.open``."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self.check_capacity(n * len(prompts))
            delivery = self._deliveries.setdefault(loop, Delivery(loop))
            generation = Generation(
                prompts,
                n,
                delivery,
                self._clock() if received is None else received,
                [self._on_end] if on_end is None else [self._on_end, on_end],
                streams=streams,
                clock=self._clock,
            )
            delivery.num_open += 1
            self._num_unfinished += generation.num_answers
            if streams:
                delivery.streams.add(generation)
            self._orders.put(partial(self._join, generation))
        return generation

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queue a function to run in the step thread between two steps, and return its future.

        Raises: RequestError: the thread has ended.
        """
        future: Future[T] = Future()

        def order() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise stopped_error()
            self._orders.put(order)
        return future

    def stop(self, seconds: float | None = None) -> None:
        """Cancel unfinished requests, and end the thread after the current step.

        Args:
            seconds: Longest time to wait for the end.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._orders.put(None)
        # A function of ``call`` may close the model from the step thread itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _on_end(self, generation: Generation) -> None:
        delivery = generation.delivery
        with self._lock:
            self._num_unfinished -= generation.num_answers
            delivery.streams.discard(generation)
            delivery.num_open -= 1
            if not delivery.num_open:
                self._deliveries.pop(delivery.loop, None)
            if generation.error is not None and not self._closed:
                # Only the step thread may touch the engine, so an early end is an order, too.
                self._orders.put(partial(self._leave, generation))

    # The methods below run in the step thread.

    def _run(self) -> None:
        fault: BaseException | None = None
        try:
            while self._take_orders():
                self._step()
        except BaseException as error:  # noqa: BLE001 - such as SystemExit of a kernel
            _log.exception("the engine's thread has failed; all running requests end")
            fault = error
        self._finish(fault)

    def _finish(self, fault: BaseException | None) -> None:
        """Fail all unfinished requests, and refuse later ones."""
        with self._lock:
            self._closed = True
            while not self._orders.empty():
                # Orders that are queued already must run, so that callers of ``call`` get a result.
                if order := self._orders.get():
                    order()
        error = stopped_error()
        error.__cause__ = fault
        self._deliver(self._fail_all(error))

    def _take_orders(self) -> bool:
        """Run queued calls and requests; if idle, wait for one. Return False at the end."""
        idle = not self._running
        while True:
            try:
                order = self._orders.get(block=idle)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()
            idle = not self._running

    def _step(self) -> None:
        start_time = self._clock()
        outcomes: Outcomes
        try:
            with self._model.engine.lock:
                self._model.engine.step()
                self.failed = False
                outcomes = self._read_tokens(start_time)
        except Exception as error:  # noqa: BLE001 - kernels raise any error; later requests can run
            _log.exception("a step of the engine has failed; all running requests end")
            self.failed = True
            outcomes = self._fail_all(error)
        self._deliver(outcomes)

    def _join(self, generation: Generation) -> None:
        if generation.stages.ended:
            return  # it was cancelled while this order was queued
        n, answers = generation.n, generation.answers
        try:
            # All answers join the same step, whichever thread steps.
            with self._model.engine.lock:
                for index, (prompt, params) in enumerate(generation.prompts):
                    # Each answer of a stream reports the prompt's log probabilities itself.
                    answers += self._model.start_several(
                        prompt, params, n, index * n, shares=not generation.streams
                    )
                for stream in answers:
                    self._running[stream.sequence] = generation, stream
        except Exception as error:  # noqa: BLE001 - raised in the reader of this request only
            self._leave(generation)
            self._deliver({generation: error})

    def _leave(self, generation: Generation) -> None:
        with self._model.engine.lock:
            for stream in generation.answers:
                self._running.pop(stream.sequence, None)
                self._model.engine.cancel(stream.sequence)

    def _fail_all(self, error: Exception) -> Outcomes:
        """Cancel all running answers, and return their generations, each with the error."""
        outcomes = {generation: error for generation, _ in self._running.values()}
        for generation in outcomes:
            self._leave(generation)
        return outcomes

    def _read_tokens(self, start_time: int) -> Outcomes:
        """Pass new tokens to their generations, and return the generations with waiting tasks.

        Args:
            start_time: Start of the step, in nanoseconds since the epoch.
        """
        outcomes: dict[Generation, Exception | None] = {}
        for sequence, (generation, stream) in [*self._running.items()]:
            if sequence.num_computed and not generation.stages.started:
                generation.stages.started = start_time
            if self._read(generation, stream):
                outcomes[generation] = outcomes.get(generation) or sequence.error
        return outcomes

    def _read(self, generation: Generation, stream: Stream) -> bool:
        """Pass new tokens of an answer to its generation; drop the answer if it has ended.

        Returns: whether the reader must be woken now.
        """
        num_old = generation.num_tokens
        # Only answers with stop texts are detokenized here, others by the reader.
        has_stops = bool(stream.sequence.params.stop)
        # A step can compute tokens after a stop text.
        while stream.num_unread and not stream.stopped:
            event = stream.take()
            generation.unread.append((stream, stream.delta(event) if has_stops else event))
            generation.num_tokens += 1
        num_new = generation.num_tokens - num_old
        if num_new and not num_old:
            generation.stages.first_token = self._clock()
        if stream.ended:
            self._drop(stream.sequence)
            return True
        if generation.streams:
            return bool(num_new) and not (num_old and generation.delivery.is_paused)
        return len(generation.unread) >= _BATCH_TOKENS

    def _drop(self, sequence: TokenSequence) -> None:
        """Count an answer as ended; cancel the sequence if the answer ended with a stop text."""
        generation, _ = self._running.pop(sequence)
        generation.num_unfinished -= 1
        self._model.engine.cancel(sequence)

    def _deliver(self, outcomes: Outcomes) -> None:
        by_delivery: dict[Delivery, list[tuple[Generation, Exception | None]]] = {}
        for generation, error in outcomes.items():
            by_delivery.setdefault(generation.delivery, []).append((generation, error))
        for delivery, loop_outcomes in by_delivery.items():
            try:
                delivery.loop.call_soon_threadsafe(delivery.deliver, loop_outcomes)
            except RuntimeError:  # the event loop was closed, so there is no reader
                for generation, _ in loop_outcomes:
                    self._abandon(generation)

    def _abandon(self, generation: Generation) -> None:
        if not generation.stages.ended:
            generation.stages.ended = self._clock()
            self._on_end(generation)
            self._leave(generation)


def stopped_error() -> RequestError:
    """Create the error for requests to an ``AsyncLanguageModel`` after ``close``."""
    return RequestError("The model was closed. Try: another AsyncLanguageModel")
