"""The answers to one request, as the thread of the engine computes them."""

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

# The texts of so many tokens take a millisecond, for which an event loop may wait.
_MOST_AT_ONCE = 256


@dataclass(slots=True)
class Stages:
    """Nanoseconds since the epoch at which stages began; 0 for one that did not."""

    received: int
    started: int = 0
    first_token: int = 0
    ended: int = 0


class Generation(AsyncIterator[list[Delta]]):
    """Answers to one request; ``async for`` yields lists of their next tokens until all have ended.

    All methods are called in the event loop in which it was opened.

    Attributes:
        prompts: token ids with the parameters of the first answer to each.
        n: answers to each prompt; those to the first prompt come first, see ``Delta.index``.
        delivery: of the event loop.
        streams: whether tokens come when they are there, or later and together.
        stages: the time at which each began.
        answers: readers, once the engine has the request.
        found: tokens that nobody has read; the engine's thread adds to them.
        num_tokens: tokens so far, by the engine's thread.
        num_unfinished: answers that go on, by the engine's thread.
        error: what ended it early.
        on_end: each is called with the generation when it has ended.
        held: what is to stay in memory until then.
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
        self.found: deque[tuple[Stream, Token | Delta]] = deque()
        self.num_tokens = 0
        self.num_unfinished = self.num_answers
        self.error: Exception | None = None
        self.on_end = on_end
        self.held: Sequence[object] = ()
        self._clock = clock
        self._woken = asyncio.Event()
        self._is_read = False

    @property
    def num_answers(self) -> int:
        """The answers to all prompts."""
        return self.n * len(self.prompts)

    async def __anext__(self) -> list[Delta]:
        """Return the next tokens, all that there are.

        Raises: StopAsyncIteration: every answer has ended. And what ended the generation early.
        """
        while not self._is_read:
            await self._woken.wait()
            self._woken.clear()
            # What is read first was complete by then, so that nothing is left when it ended.
            self._is_read = bool(self.stages.ended)
            found = [self.found.popleft() for _ in range(len(self.found))]
            if len(found) > _MOST_AT_ONCE:
                return await asyncio.to_thread(_told, found)
            if found:
                return _told(found)
        raise StopAsyncIteration if self.error is None else self.error

    async def completions(self) -> list[Completion]:
        """Wait for all answers and return them; no other reader takes the tokens.

        Raises: what ended the generation early.
        """
        async for _ in self:
            pass
        return completions(self.answers, self.n)

    def wake(self) -> None:
        """Pass on the tokens that are there."""
        self._woken.set()
        if not (self.num_unfinished or self.stages.ended):
            self._end()

    def fail(self, error: Exception) -> None:
        """End early with an error, if it has not ended."""
        if not self.stages.ended:
            self.error = error
            self._woken.set()
            self._end()

    def close(self) -> None:
        """Give up what has not ended; its pages are free after the step that runs."""
        self.fail(RequestError("The request was closed before its answers ended"))

    def _end(self) -> None:
        self.stages.ended = self._clock()
        self.held = ()
        for told in self.on_end:
            told(self)


def _told(found: list[tuple[Stream, Token | Delta]]) -> list[Delta]:
    return [each if isinstance(each, Delta) else stream.delta(each) for stream, each in found]
