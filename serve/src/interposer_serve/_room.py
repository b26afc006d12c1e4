"""Room for answers: who gets some, and how long the others wait."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from interposer_models import AsyncLanguageModel, Generation
from interposer_serve._errors import ApiError
from interposer_serve._limits import Limits


class Room:
    """Refuses requests before anything is prepared for them in vain."""

    def __init__(self, model: AsyncLanguageModel, limits: Limits) -> None:
        self._model = model
        self._limits = limits
        self._capacity = model.capacity or 0
        self._num_prepared = 0
        self._mean_seconds = 1.0

    def check(self, num_answers: int, num_prepared: int = 0) -> None:
        """Raise ApiError where so many answers have no room, ever or now.

        Args:
            num_prepared: answers that others prepare to ask for.
        """
        taken = self._model.num_unfinished + num_prepared
        if num_answers > self._capacity:
            raise ApiError(
                400,
                f"The request asks for {num_answers} answers; allowed are {self._capacity}, which "
                "run or wait at once. Try: smaller n, or fewer prompts",
                param="n",
            )
        if taken + num_answers > self._capacity:
            raise ApiError(
                429,
                f"{taken} answers are running or waiting, and {self._capacity} may be. "
                "Try again later",
                code="queue_full",
                headers={"retry-after": str(self._seconds_to_room())},
            )

    @contextmanager
    def prepared(self, num_answers: int) -> Iterator[None]:
        """Count answers whose prompts are prepared.

        Raises: ApiError: there is no room for them.
        """
        self.check(num_answers, self._num_prepared)
        self._num_prepared += num_answers
        try:
            yield
        finally:
            self._num_prepared -= num_answers

    def ended(self, generation: Generation) -> None:
        """Learn how long an answer takes."""
        if generation.error is None:
            stages = generation.stages
            seconds = (stages.ended - stages.received) / 1e9
            self._mean_seconds += (seconds - self._mean_seconds) / 8

    def _seconds_to_room(self) -> int:
        """Return about how long it takes until a request that runs has ended."""
        running = max(1, self._capacity - self._limits.queue)
        rounds = max(1.0, (self._model.num_unfinished - running) / running)
        return max(1, math.ceil(min(self._mean_seconds * rounds, self._limits.deadline_seconds)))
