"""The answers to one request, filled by the step thread and read in an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from interposer.errors import RequestError
from interposer.tooling import steady_time_ns
from interposer_models._asynchronous.delivery import Delivery
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._requests import completions
from interposer_models._stream import Completion, Delta, Stream, Token

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
    """Answers to one request; ``async for`` yields lists of new tokens.

    All methods must be called in the event loop in which the generation was opened.

    Attributes:
        prompts: Token ids of each prompt, with the sampling parameters of the first answer.
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
        prompts: Sequence[tuple[Sequence[int], SamplingParams]],
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
        self.unread: deque[tuple[Stream, Token | Delta]] = deque()
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
        """Number of answers to all prompts."""
        return self.n * len(self.prompts)

    async def __anext__(self) -> list[Delta]:
        """Wait for tokens, and return all that are available.

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
        """Wait for all answers and return the completions; no other reader can take the tokens.

        Raises: Exception: the error that ended the generation early.
        """
        async for _ in self:
            pass
        return completions(self.answers, self.n)

    def wake(self) -> None:
        """Let the reader take the new tokens."""
        self._woken.set()
        if not (self.num_unfinished or self.stages.ended):
            self._end()

    def fail(self, error: Exception) -> None:
        """End with an error, unless the generation has ended."""
        if not self.stages.ended:
            self.error = error
            self._woken.set()
            self._end()

    def close(self) -> None:
        """Cancel unfinished answers; the present step still computes one more token each."""
        self.fail(RequestError("The request was closed before its answers ended"))

    def _end(self) -> None:
        self.stages.ended = self._clock()
        self.kept_alive = ()
        for callback in self.on_end:
            callback(self)


def _deltas(tokens: list[tuple[Stream, Token | Delta]]) -> list[Delta]:
    return [token if isinstance(token, Delta) else stream.delta(token) for stream, token in tokens]
