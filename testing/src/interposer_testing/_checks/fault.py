"""One fault: a departure of something under test from its contract."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Literal

from interposer.errors import described

Check = Literal[
    "alias",
    "batch",
    "call",
    "compile",
    "determinism",
    "dtype",
    "graph",
    "guard",
    "import",
    "layer",
    "model",
    "mutation",
    "opcheck",
    "ranks",
    "record",
    "scheme",
    "shape",
    "stride",
    "structure",
    "thread",
    "value",
    "wheel",
]
"""The violated rule; ``guard``: memory beside an argument was written."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        check: the kind of check that found it.
        where: the output, argument or call that it was found in.
        reason: what is wrong, with the offending value.
        error: largest absolute error, where values were compared.
        bound: the error allowed at the place of the largest.
        traceback: set where code under test raised.
        cause: what a failed import raised, and the line that raised it; empty for any other fault.
            Faults that share one have one thing to mend.
    """

    check: Check
    where: str
    reason: str
    error: float | None = None
    bound: float | None = None
    traceback: str = field(default="", repr=False)
    cause: str = field(default="", repr=False)

    @classmethod
    def raised(cls, check: Check, where: str, error: BaseException) -> Fault:
        """Return the fault of code that raised; call it while the exception is handled."""
        reason, trace = f"raised {described(error)}", traceback.format_exc()
        return cls(check, where, reason, traceback=trace, cause=_cause(error))

    def __str__(self) -> str:
        return f"{self.where}: {self.reason} ({self.check})"


def _cause(error: BaseException) -> str:
    """Return the error and the line that raised it, if a module could not be imported for it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith("<frozen importlib")]
    if not own or (len(own) == len(frames) and not isinstance(error, ImportError)):
        return ""
    return f"{described(error)} ({own[-1].filename}:{own[-1].lineno})"
