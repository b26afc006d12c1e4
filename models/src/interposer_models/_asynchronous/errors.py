"""The error of a request that exceeds the capacity of the queue."""

from __future__ import annotations

from interposer.errors import RequestError


class QueueFullError(RequestError):
    """The largest number of answers is running or waiting. The same request can succeed later.

    Attributes:
        num_unfinished: Number of answers that run or wait.
        capacity: Largest number of such answers.
    """

    def __init__(self, num_answers: int, num_unfinished: int, capacity: int) -> None:
        if num_answers > capacity:
            reason = f"The request asks for {num_answers} answers, and {capacity} may run or wait"
            reason, hint = f"{reason} at once", "fewer answers"
        else:
            reason = f"{num_unfinished} answers are running or waiting, and {capacity} may be"
            hint = "again later"
        super().__init__(f"{reason}. Try: {hint}, or a larger max_waiting")
        self.num_unfinished = num_unfinished
        self.capacity = capacity
