"""The way of tokens from the thread that steps the engine into one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sized
from typing import Protocol

# A token of a stream may wait so long for those of the next steps, to be told with them. Telling
# costs a stream of a server about 30 microseconds, however many tokens it sends: a sixteenth of the
# time.
_STREAM_REST_SECONDS = 0.0005
_LEAST_REST_SECONDS, _MOST_REST_SECONDS = 0.01, 0.04


class Reader(Protocol):
    """A generation, as a delivery knows it."""

    @property
    def found(self) -> Sized:
        """Tokens that nobody has read."""
        ...

    def wake(self) -> None:
        """Pass on the tokens that are there."""
        ...

    def fail(self, error: Exception) -> None:
        """End early with an error."""
        ...


class Delivery:
    """Wakes the readers of one event loop.

    The engine's thread asks for it for the first token of a stream, for the last one, and for one
    that follows a rest. The loop takes those between together, a few milliseconds after it took
    some.

    Attributes:
        loop: in which readers wait.
        streams: generations whose tokens are to come while others follow.
        rests: whether a later token waits; the engine's thread reads it.
        num_open: generations that have not ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.streams: set[Reader] = set()
        self.rests = False
        self.num_open = 0

    def deliver(self, told: Iterable[tuple[Reader, Exception | None]]) -> None:
        """Wake readers, and those whose generation failed with the error; in the event loop."""
        for generation, error in told:
            if error is None:
                generation.wake()
            else:
                generation.fail(error)
        self._rest()

    def _rest(self) -> None:
        if self.streams and not self.rests:
            self.rests = True
            rest = max(_LEAST_REST_SECONDS, len(self.streams) * _STREAM_REST_SECONDS)
            self.loop.call_later(min(rest, _MOST_REST_SECONDS), self._end_rest)

    def _end_rest(self) -> None:
        # The engine's thread adds a token before it reads this, so that one of both sees the other.
        self.rests = False
        if waiting := [generation for generation in self.streams if generation.found]:
            for generation in waiting:
                generation.wake()
            self._rest()
