"""The thread that runs the engine: requests join and leave between its steps."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable

from interposer_models import LanguageModel, SamplingParams
from interposer_serve._errors import ApiError
from interposer_serve._generation import Generation, Piece, Row, Stages
from interposer_serve._limits import Limits

_log = logging.getLogger("interposer")
# A token of a stream may wait so long for those of the next steps, to be sent with them. Sending
# costs a stream about 30 microseconds, however many tokens it sends: a sixteenth of the time.
_STREAM_REST_SECONDS = 0.0005
_LEAST_REST_SECONDS, _MOST_REST_SECONDS = 0.01, 0.04


class EngineThread:
    """Steps the engine of a model for as long as a request is unfinished.

    Only this thread touches the engine. Requests come to it through a queue. It wakes the event
    loop for the first token of a stream, for the last one, and for one that follows a rest; the
    loop takes those between together, a few milliseconds after it took some.

    Attributes:
        failed: whether the last step raised an error.
    """

    def __init__(self, lm: LanguageModel, limits: Limits) -> None:
        self.lm = lm
        self.limits = limits
        self.failed = False
        self._capacity = lm.engine.scheduler.max_sequences + limits.queue
        self._admitted = 0
        self._mean_seconds = 1.0
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._rows: list[Row] = []
        self._streams: set[Generation] = set()
        self._rests = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="interposer-engine", daemon=True)

    # Called in the event loop.

    def start(self) -> None:
        """Run from now on for the event loop that calls."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Cancel what is unfinished and end the thread."""
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        """Say whether the thread runs."""
        return self._thread.is_alive()

    def open(
        self,
        prompts: list[tuple[list[int], SamplingParams]],
        received: int,
        on_end: Callable[[Generation], None],
        *,
        streams: bool,
        tells_tokens: bool,
    ) -> Generation:
        """Queue a request, one sequence for each prompt.

        Args:
            received: when the request was, in nanoseconds since the epoch.
            on_end: called with the generation when it has ended, for whatever reason.
            streams: whether pieces are to come when they are there.
            tells_tokens: whether each piece holds the text of its token.
        Raises:
            ApiError: the queue is full, or never has room for so many.
            RequestError: the model cannot take a prompt.
        """
        checked = [(self.lm.check(tokens, params), params) for tokens, params in prompts]
        self.check_room(len(checked))
        upto = time.monotonic() + self.limits.deadline_seconds
        generation = Generation(
            checked,
            Stages(received),
            upto,
            self._ended,
            streams=streams,
            tells_tokens=tells_tokens,
        )
        generation.on_end += (on_end,)
        self._admitted += len(checked)
        if streams:
            self._streams.add(generation)
        self._orders.put(lambda: self._join(generation))
        return generation

    def check_room(self, num_answers: int, num_prepared: int = 0) -> None:
        """Raise ApiError where so many answers have no room, ever or now.

        Args:
            num_prepared: answers that others prepare to ask for.
        """
        if num_answers > self._capacity:
            raise ApiError(
                400,
                f"The request asks for {num_answers} answers; allowed are {self._capacity}, which "
                "run or wait at once. Try: smaller n, or fewer prompts",
                param="n",
            )
        if self._admitted + num_prepared + num_answers > self._capacity:
            raise ApiError(
                429,
                f"{self._admitted + num_prepared} answers are running or waiting, and "
                f"{self._capacity} may be. Try again later",
                code="queue_full",
                headers={"retry-after": str(self._seconds_to_room())},
            )

    def _ended(self, generation: Generation) -> None:
        self._admitted -= len(generation.rows)
        self._streams.discard(generation)
        if generation.error is None:
            seconds = (generation.stages.ended - generation.stages.received) / 1e9
            self._mean_seconds += (seconds - self._mean_seconds) / 8
        else:
            self._orders.put(lambda: self._leave(generation))

    def _seconds_to_room(self) -> int:
        """Return about how long it takes until a request that runs has ended."""
        running = max(1, self.lm.engine.scheduler.max_sequences)
        rounds = max(1.0, (self._admitted - running) / running)
        return max(1, math.ceil(min(self._mean_seconds * rounds, self.limits.deadline_seconds)))

    def _deliver(self, told: list[tuple[Generation, Exception | None]]) -> None:
        for generation, error in told:
            if error is None:
                generation.wake()
            else:
                generation.fail(error)
        self._rest()

    def _rest(self) -> None:
        if self._streams and not self._rests:
            self._rests = True
            rest = max(_LEAST_REST_SECONDS, len(self._streams) * _STREAM_REST_SECONDS)
            loop = asyncio.get_running_loop()
            loop.call_later(min(rest, _MOST_REST_SECONDS), self._end_rest)

    def _end_rest(self) -> None:
        # The engine's thread adds a token before it reads this, so that one of both sees the other.
        self._rests = False
        if waiting := [generation for generation in self._streams if generation.pieces]:
            for generation in waiting:
                generation.wake()
            self._rest()

    # Called in the engine's thread.

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._step()
        finally:
            for row in self._rows:
                self._cancel(row)

    def _take_orders(self) -> bool:
        """Let requests join and leave; wait for one where there is nothing to do."""
        idle = not self._rows
        while True:
            try:
                order = self._orders.get(block=idle)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()
            idle = not self._rows

    def _step(self) -> None:
        began = time.time_ns()
        told: list[tuple[Generation, Exception | None]] = []
        try:
            self.lm.engine.step()
            self.failed = False
            told = [(row.generation, None) for row in [*self._rows] if self._read(row, began)]
        except Exception as error:  # noqa: BLE001 - a kernel raises what it likes; the server goes on
            _log.exception("a step of the engine failed, and with it all that was running")
            self.failed = True
            told = [(row.generation, error) for row in self._rows]
        now, seconds = time.monotonic(), self.limits.deadline_seconds
        for row in self._rows:
            if row.generation.upto < now:
                late = f"The answer took longer than {seconds:g} s"
                told.append((row.generation, ApiError(504, late, code="deadline_exceeded")))
        for generation, failure in told:
            if failure is not None:
                self._leave(generation)
        if told:
            self._tell(told)

    def _join(self, generation: Generation) -> None:
        if generation.stages.ended:
            return  # it left before it came here
        try:
            for row in generation.rows:
                row.stream = self.lm.start(row.prompt, row.params)
                self._rows.append(row)
        except Exception as error:  # noqa: BLE001 - told to the client, who alone is concerned
            self._leave(generation)
            self._tell([(generation, error)])

    def _leave(self, generation: Generation) -> None:
        for row in generation.rows:
            if row in self._rows:
                self._rows.remove(row)
            self._cancel(row)

    def _cancel(self, row: Row) -> None:
        if row.stream is not None:
            self.lm.engine.cancel(row.stream.sequence)

    def _read(self, row: Row, began: int) -> bool:
        """Take new tokens of an answer, and forget it where it has ended.

        Returns: whether the event loop has to be told now.

        Args:
            began: when the step did, in nanoseconds since the epoch.
        """
        stream, generation = row.stream, row.generation
        assert stream is not None
        stages = generation.stages
        if not stages.started and (stream.sequence.num_computed or stream.ended):
            stages.started = began
        is_first = not generation.num_tokens
        while stream.num_unread and not stream.ended:
            delta = stream.read()
            stages.first_token = stages.first_token or time.time_ns()
            generation.num_tokens += 1
            told, decode = generation.tells_tokens, self.lm.tokenizer.decode
            token = decode([delta.token_id]) if told else None
            likely = tuple(decode([token_id]) for token_id, _ in delta.top_logprobs)
            generation.pieces.append(Piece(row.index, delta, token, likely))
        if stream.ended:
            generation.num_unfinished -= 1
            self._rows.remove(row)
            self._cancel(row)
            return True
        return bool(generation.streams and generation.pieces and (is_first or not self._rests))

    def _tell(self, told: list[tuple[Generation, Exception | None]]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, told)
