"""What one event loop is told by the thread that steps the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interposer_models._asynchronous.generation import Generation

# A token of a stream may wait so long for those of the next steps, to be told with them. Telling
# costs a stream of a server about 30 microseconds, however many tokens it sends: a sixteenth of the
# time.
_STREAM_REST_SECONDS = 0.0005
_LEAST_REST_SECONDS, _MOST_REST_SECONDS = 0.01, 0.04


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
        self.streams: set[Generation] = set()
        self.rests = False
        self.num_open = 0

    def deliver(self, told: Iterable[tuple[Generation, Exception | None]]) -> None:
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
