"""Replacement of a bound kernel that raises, if ``Config(fallback=True)``.

Without ``Config(fallback=True)`` no such object exists: the bound attribute is the kernel's own
function, and the kernel's exceptions reach the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, Protocol

import torch

from interposer._contract.choice import Candidate
from interposer._contract.errors import described, foreign_errors, traced


class Replace(Protocol):
    """Function that quarantines a failed kernel and chooses the next one."""

    def __call__(
        self, failed: Candidate, reason: str, trace: str
    ) -> tuple[Callable[..., Any], Candidate]:
        """Return the next kernel's function and candidate.

        Raises: NoCandidateError: every other candidate is refused.
        """


class Fallback:
    """Calls a functional kernel; after an exception, the next candidate replaces it for good.

    If the reference refuses the arguments too, the caller made the mistake: the error is passed on
    and nothing is quarantined. Wrong numbers are not detected here, but by the canary. Under
    ``torch.compile(fullgraph=True)`` a failing kernel cannot be replaced.

    Attributes:
        function: the kernel that is called at present.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        candidate: Candidate,
        reference: Callable[..., Any],
        replace: Replace,
    ) -> None:
        self.function = function
        self._candidate = candidate
        self._reference = reference
        self._replace = replace
        self._lock = Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel; after a failure, call the replacement."""
        function = self.function
        try:
            return function(*args, **kwargs)
        except foreign_errors() as error:
            if function is self._reference:
                raise
            try:
                self._reference(*args, **kwargs)
            except foreign_errors():
                raise error from None
            self._take_over(function, error)
        # The replacement may fail too. The recursion ends, because every failure excludes a
        # candidate and the reference is never replaced.
        return self(*args, **kwargs)

    # Traced code cannot replace a kernel, so the compiler must not look inside.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _take_over(self, failed: Callable[..., Any], error: BaseException) -> None:
        with self._lock:
            if self.function is not failed:
                return  # another thread already replaced it
            reason = f"failed at run time: {described(error)}"
            trace = traced(error)
            self.function, self._candidate = self._replace(self._candidate, reason, trace)
