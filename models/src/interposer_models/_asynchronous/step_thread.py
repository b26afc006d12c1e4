"""The thread that steps the engine: requests join and leave between its steps."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from interposer.errors import RequestError
from interposer.tooling import steady_time_ns
from interposer_models._asynchronous.delivery import Delivery
from interposer_models._asynchronous.errors import QueueFullError
from interposer_models._asynchronous.generation import Generation
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._language_model import LanguageModel
from interposer_models._stream import Stream

_log = logging.getLogger("interposer")
# So many of an answer that is wanted whole are made to text while others are computed.
_MANY_TOKENS = 64
T = TypeVar("T")
Told = tuple[Generation, Exception | None]


class StepThread:
    """Steps the engine of a model for as long as a request is unfinished.

    Requests come to it through a queue, from any other thread. It holds the lock of the engine
    while it uses that, as methods of the model may be called meanwhile.

    Attributes:
        failed: whether the last step raised an error.
        capacity: answers that may run or wait; None bounds them not.
    """

    def __init__(
        self,
        model: LanguageModel,
        max_waiting: int | None,
        *,
        clock: Callable[[], int] = steady_time_ns,
    ) -> None:
        """Start the thread.

        Args:
            clock: returns nanoseconds since the epoch, for the stages of each request.
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
        self._running: list[tuple[Generation, Stream]] = []
        self._deliveries: dict[asyncio.AbstractEventLoop, Delivery] = {}
        # Reentrant, as a collection of garbage may close a model in the midst of a block.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="interposer-engine", daemon=True)
        self._thread.start()

    # Called in any thread, and in an event loop where a generation is opened.

    @property
    def alive(self) -> bool:
        """Say whether the thread takes requests."""
        return not self._closed and self._thread.is_alive()

    @property
    def num_unfinished(self) -> int:
        """The answers that run or wait."""
        return self._num_unfinished

    def check_room(self, num_answers: int) -> None:
        """Raise QueueFullError where so many answers have no room, RequestError after the end."""
        if self._closed:
            raise _closed_error()
        if self.capacity is not None and self._num_unfinished + num_answers > self.capacity:
            raise QueueFullError(num_answers, self._num_unfinished, self.capacity)

    def open(
        self,
        prompts: Sequence[tuple[Sequence[int], SamplingParams]],
        n: int,
        *,
        streams: bool,
        received: int | None = None,
        on_end: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """Queue a request; see ``AsyncLanguageModel.open``."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self.check_room(n * len(prompts))
            delivery = self._deliveries.setdefault(loop, Delivery(loop))
            generation = Generation(
                prompts,
                n,
                delivery,
                self._clock() if received is None else received,
                [self._ended] if on_end is None else [self._ended, on_end],
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
        """Call a function between two steps, in their thread.

        Raises: RequestError: the thread has ended.
        """
        future: Future[T] = Future()

        def order() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - of whoever called, who is told
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise _closed_error()
            self._orders.put(order)
        return future

    def stop(self, seconds: float | None = None) -> None:
        """Cancel what is unfinished and end the thread after the step that runs.

        Args:
            seconds: to wait for the end at most.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._orders.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _ended(self, generation: Generation) -> None:
        delivery = generation.delivery
        with self._lock:
            self._num_unfinished -= generation.num_answers
            delivery.streams.discard(generation)
            delivery.num_open -= 1
            if not delivery.num_open:
                self._deliveries.pop(delivery.loop, None)
            if generation.error is not None and not self._closed:
                self._orders.put(partial(self._leave, generation))

    # Called in the thread.

    def _run(self) -> None:
        fault: BaseException | None = None
        try:
            while self._take_orders():
                self._step()
        except BaseException as error:  # noqa: BLE001 - such as SystemExit of a kernel
            _log.exception("the engine's thread ends, and with it all that was running")
            fault = error
        self._finish(fault)

    def _finish(self, fault: BaseException | None) -> None:
        """Tell everybody that nothing follows."""
        with self._lock:
            self._closed = True
            while not self._orders.empty():
                if order := self._orders.get():
                    order()
        error = _closed_error()
        error.__cause__ = fault
        generations = {generation: error for generation, _ in self._running}
        for generation in generations:
            self._leave(generation)
        self._tell([*generations.items()])

    def _take_orders(self) -> bool:
        """Let requests join and leave; wait for one where there is nothing to do."""
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
        began = self._clock()
        events: list[Told] = []
        try:
            with self._model.engine.lock:
                self._model.engine.step()
                self.failed = False
                events = [
                    (generation, stream.sequence.error)
                    for generation, stream in [*self._running]
                    if self._read(generation, stream, began)
                ]
        except Exception as error:  # noqa: BLE001 - a kernel raises what it likes; the rest goes on
            _log.exception("a step of the engine failed, and with it all that was running")
            self.failed = True
            events = [(generation, error) for generation, _ in self._running]
            for generation, _ in events:
                self._leave(generation)
        if events:
            self._tell(events)

    def _join(self, generation: Generation) -> None:
        if generation.stages.ended:
            return  # it left before it came here
        n, answers = generation.n, generation.answers
        try:
            for index, (prompt, params) in enumerate(generation.prompts):
                # A stream is told of its prompt with its own first token.
                answers += self._model.start_several(
                    prompt, params, n, index * n, shares=not generation.streams
                )
        except Exception as error:  # noqa: BLE001 - told to the reader, who alone is concerned
            self._leave(generation)
            self._tell([(generation, error)])
        else:
            self._running += [(generation, stream) for stream in answers]

    def _leave(self, generation: Generation) -> None:
        self._running = [each for each in self._running if each[0] is not generation]
        with self._model.engine.lock:
            for stream in generation.answers:
                self._model.engine.cancel(stream.sequence)

    def _read(self, generation: Generation, stream: Stream, began: int) -> bool:
        """Take new tokens of an answer, and forget it where it has ended.

        Returns: whether the reader has to be told now.

        Args:
            began: when the step did, in nanoseconds since the epoch.
        """
        stages, found = generation.stages, generation.found
        if not stages.started and (stream.sequence.num_computed or stream.ended):
            stages.started = began
        is_first = not generation.num_tokens
        stops = bool(stream.sequence.params.stop)
        while stream.num_unread and not stream.ended:
            # A text that stops the answer is looked for here; others are the reader's to make.
            found.append((stream, stream.read() if stops else stream.take()))
            generation.num_tokens += 1
        if is_first and generation.num_tokens:
            stages.first_token = self._clock()
        if stream.ended:
            generation.num_unfinished -= 1
            self._running.remove((generation, stream))
            self._model.engine.cancel(stream.sequence)
            return True
        if generation.streams:
            return bool(found and (is_first or not generation.delivery.rests))
        return len(found) >= _MANY_TOKENS

    def _tell(self, told: list[Told]) -> None:
        by_loop: dict[Delivery, list[Told]] = {}
        for each in told:
            by_loop.setdefault(each[0].delivery, []).append(each)
        for delivery, own in by_loop.items():
            try:
                delivery.loop.call_soon_threadsafe(delivery.deliver, own)
            except RuntimeError:  # the event loop was closed, and nobody reads
                for generation in {generation for generation, _ in own}:
                    self._abandon(generation)

    def _abandon(self, generation: Generation) -> None:
        if not generation.stages.ended:
            generation.stages.ended = self._clock()
            self._ended(generation)
            self._leave(generation)


def _closed_error() -> RequestError:
    return RequestError("The model was closed, so that it answers nothing. Try: another one")
