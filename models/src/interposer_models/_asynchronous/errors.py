"""The refusal of a request for which there is no room."""

from __future__ import annotations

from interposer.errors import RequestError


class QueueFullError(RequestError):
    """As many answers as are allowed run or wait. The same request can be taken later.

    Attributes:
        num_unfinished: answers that run or wait.
        capacity: of these at most.
    """

    def __init__(self, num_answers: int, num_unfinished: int, capacity: int) -> None:
        if num_answers > capacity:
            said = f"The request asks for {num_answers} answers, and {capacity} may run or wait"
            said, hint = f"{said} at once", "fewer answers"
        else:
            said = f"{num_unfinished} answers are running or waiting, and {capacity} may be"
            hint = "again later"
        super().__init__(f"{said}. Try: {hint}, or a larger max_waiting")
        self.num_unfinished = num_unfinished
        self.capacity = capacity
