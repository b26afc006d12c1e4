"""One trial: one candidate on one case in one aspect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from interposer import Candidate, Request, Verdict
from interposer.errors import foreign_errors
from interposer_testing._checks.fault import Fault
from interposer_testing._judge.process import ProcessEndedError

Aspect = Literal[
    "numerics",
    "gradients",
    "opcheck",
    "compile static",
    "compile dynamic",
    "graph capture",
    "threads",
    "determinism",
    "batch invariance",
    "records",
    "lightness",
    "wheel",
    "layer",
    "scheme",
    "model",
    "communicator",
]
"""The aspect that a trial tests. Properties are tested only if the record declares them."""


SEPARABLE_ASPECTS: frozenset[Aspect] = frozenset(
    {"numerics", "gradients", "threads", "determinism"}
)
"""Aspects of kernels that can be tested while the kernel is in another process."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One test of one candidate on one case, in one aspect.

    Attributes:
        candidate: a kernel, backend, layer or other record, or the reference of an op.
        request: the request that the case stands for.
        label: label of the case.
        verdict: answer of the candidate to the request; a refused trial does not run.
        check: runs the test and returns the faults.
        aspect: the tested aspect.
        not_run: reason why the trial cannot run on this machine; empty if it can.
    """

    candidate: Candidate
    request: Request
    label: str
    verdict: Verdict
    check: Callable[[], list[Fault]]
    aspect: Aspect = "numerics"
    not_run: str = ""

    def run(self) -> list[Fault]:
        """Run the test and return the faults.

        A trial that is refused or cannot run here has no faults, unless the verdict itself raised.
        """
        if self.not_run:
            return []
        if not self.verdict:
            trace, reason = self.verdict.traceback, self.verdict.reason
            return [Fault("call", "verdict", reason, traceback=trace)] if trace else []
        try:
            return self.check()
        except ProcessEndedError as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            return [Fault("call", "process", str(error), traceback=notes)]
        except foreign_errors() as error:
            return [Fault.raised("call", "call", error)]

    @property
    def is_separable(self) -> bool:
        """Whether the trial calls a kernel, and can do so in another process."""
        return self.request.kind == "kernel" and self.aspect in SEPARABLE_ASPECTS

    def __str__(self) -> str:
        aspect = "" if self.aspect == "numerics" else self.aspect
        name, dtype = self.candidate.qualified_name, self.request.dtype
        parts = (self.request.name, name, dtype, self.label, aspect)
        return "-".join(part for part in parts if part)
