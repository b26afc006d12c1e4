"""Delivery of tokens from the step thread to the readers of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sized
from typing import Protocol

# A token of a stream may wait this long (times the number of streams) for the tokens of later
# steps. One delivery to a server's stream takes about 30 microseconds, whatever the number of
# tokens: a sixteenth of that time.
_STREAM_PAUSE_SECONDS = 0.0005
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.01, 0.04


class Reader(Protocol):
    """The part of a generation that a delivery uses."""

    @property
    def unread(self) -> Sized:
        """Tokens that the reader has not taken yet."""
        ...

    def wake(self) -> None:
        """Let the reader take the new tokens."""
        ...

    def fail(self, error: Exception) -> None:
        """End the generation early with an error."""
        ...


class Delivery:
    """Wakes the readers of one event loop.

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
        self.streams: set[Reader] = set()
        self.is_paused = False
        self.num_open = 0

    def deliver(self, outcomes: Iterable[tuple[Reader, Exception | None]]) -> None:
        """Wake readers, and fail the generations that have an error. Runs in the event loop."""
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
