"""Limit on queued answers, which refuses requests before tokenization."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from interposer_engine import AsyncLanguageModel, Generation
from interposer_serve._errors import ApiError
from interposer_serve._limits import Limits


class Admission:
    """Limit on queued answers, which refuses requests before tokenization."""

    def __init__(self, model: AsyncLanguageModel, limits: Limits) -> None:
        self._model = model
        self._limits = limits
        self._capacity = model.capacity or 0
        self._num_preparing = 0
        self._mean_seconds = 1.0

    def check(self, num_answers: int, num_prepared: int = 0) -> None:
        """Raise ApiError unless the queue has places for ``num_answers`` more answers.

        Args:
            num_prepared: answers of other requests that are still being tokenized.
        Raises: ApiError: the queue is full now (429), or too small for this request (400).
        """
        num_taken = self._model.num_unfinished + num_prepared
        if num_answers > self._capacity:
            raise ApiError(
                400,
                f"The request asks for {num_answers} answers; allowed are {self._capacity}, which "
                "run or wait at once. Try: smaller n, or fewer prompts",
                param="n",
            )
        if num_taken + num_answers > self._capacity:
            raise ApiError(
                429,
                f"{num_taken} answers are running or waiting; allowed are {self._capacity}. "
                "Try again later",
                code="queue_full",
                headers={"retry-after": str(self._estimated_wait_seconds())},
            )

    @contextmanager
    def prepared(self, num_answers: int) -> Iterator[None]:
        """Reserve queue places for answers while prompts are prepared, within a ``with`` block.

        Raises: ApiError: see ``check``.
        """
        self.check(num_answers, self._num_preparing)
        self._num_preparing += num_answers
        try:
            yield
        finally:
            self._num_preparing -= num_answers

    def ended(self, generation: Generation) -> None:
        """Update the mean duration of answers, from which Retry-After is estimated."""
        if generation.error is None:
            stages = generation.stages
            seconds = (stages.ended - stages.received) / 1e9
            # Exponential moving average.
            self._mean_seconds += (seconds - self._mean_seconds) / 8

    def _estimated_wait_seconds(self) -> int:
        """Estimate the seconds until a running request ends."""
        # The capacity is the number of answers that run at once plus the queue.
        running = max(1, self._capacity - self._limits.queue)
        rounds = max(1.0, (self._model.num_unfinished - running) / running)
        return max(1, math.ceil(min(self._mean_seconds * rounds, self._limits.deadline_seconds)))
