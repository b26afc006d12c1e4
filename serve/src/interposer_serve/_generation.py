"""The tokens that a client asked for, as they come; methods are called in the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from interposer_models import Delta, SamplingParams, Stream


@dataclass(slots=True)
class Piece:
    """The next token of one answer.

    Attributes:
        index: of the answer.
        token: its own text, where log probabilities are told; a part of a character shows as
            U+FFFD.
        likely: the texts of the likeliest tokens in its place, as far as they are asked for.
    """

    index: int
    delta: Delta
    token: str | None
    likely: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Row:
    """One answer on its way: what the engine's thread keeps of it."""

    index: int
    prompt: list[int]
    params: SamplingParams
    generation: Generation
    stream: Stream | None = None


@dataclass(slots=True)
class Stages:
    """Nanoseconds since the epoch at which stages began; 0 for one that did not."""

    received: int
    started: int = 0
    first_token: int = 0
    ended: int = 0


class Gone(Exception):
    """The client left."""


class Generation:
    """Answers to one request of a client, token by token, one after the other or side by side.

    Attributes:
        rows: the answers.
        upto: the time of ``time.monotonic()`` by which they have to be there.
        streams: whether pieces come when they are there, or with the last one of their answer.
        tells_tokens: whether the text of each token is told.
        pieces: tokens that nobody has taken; the engine's thread adds to them.
        num_tokens: tokens so far, by the engine's thread.
        num_unfinished: answers that go on, by the engine's thread.
        error: what ended it early.
        on_end: each is called with the generation when it has ended.
    """

    def __init__(
        self,
        prompts: list[tuple[list[int], SamplingParams]],
        stages: Stages,
        upto: float,
        on_end: Callable[[Generation], None],
        *,
        streams: bool,
        tells_tokens: bool,
    ) -> None:
        self.rows = [
            Row(index, prompt, params, self) for index, (prompt, params) in enumerate(prompts)
        ]
        self.upto = upto
        self.on_end: tuple[Callable[[Generation], None], ...] = (on_end,)
        self.streams = streams
        self.tells_tokens = tells_tokens
        self.stages = stages
        self.pieces: deque[Piece] = deque()
        self.num_tokens = 0
        self.num_unfinished = len(self.rows)
        self.error: Exception | None = None
        self._woken = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[list[Piece]]:
        """Yield pieces, all that there are at once, until every answer has ended.

        Raises: what ended the generation early.
        """
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[list[Piece]]:
        ended = False
        while not ended:
            await self._woken.wait()
            self._woken.clear()
            # What is read first was complete by then, so that nothing is left when it ended.
            ended = bool(self.stages.ended)
            if found := [self.pieces.popleft() for _ in range(len(self.pieces))]:
                yield found
        if self.error is not None:
            raise self.error

    def wake(self) -> None:
        """Pass on the pieces that are there."""
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
        self.fail(Gone())

    def _end(self) -> None:
        self.stages.ended = time.time_ns()
        for told in self.on_end:
            told(self)
