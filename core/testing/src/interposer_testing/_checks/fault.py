"""A fault: a violation of the contract by the code under test."""

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
"""The violated rule, such as ``guard``: memory outside an argument was written."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One violation of the contract that a check found.

    Attributes:
        check: the violated rule.
        where: the output, argument or call with the fault.
        reason: description of the fault with the wrong value.
        error: largest absolute error, if values were compared.
        bound: error bound of the element with the largest error.
        traceback: traceback, if the code under test raised.
        cause: exception and source line of a failed import; empty for all other faults. Faults with
            the same cause need only one fix.
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
        """Create the fault of code that raised; call only while the exception is handled."""
        reason, trace = f"raised {described(error)}", traceback.format_exc()
        return cls(check, where, reason, traceback=trace, cause=_cause(error))

    def __str__(self) -> str:
        return f"{self.where}: {self.reason} ({self.check})"


def _cause(error: BaseException) -> str:
    """Return exception and source line of a failed import; "" for any other error."""
    frames = traceback.extract_tb(error.__traceback__)
    code = [frame for frame in frames if not frame.filename.startswith("<frozen importlib")]
    # Without frames of importlib, the error came from a call and not from an import.
    if not code or (len(code) == len(frames) and not isinstance(error, ImportError)):
        return ""
    return f"{described(error)} ({code[-1].filename}:{code[-1].lineno})"
