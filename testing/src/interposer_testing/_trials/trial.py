"""One candidate on one case, in one respect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from interposer import Candidate, Request, Verdict
from interposer.errors import foreign_errors
from interposer_testing._checks.fault import Fault

Aspect = Literal[
    "numerics",
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
"""In what respect something is tried. Only claimed properties are."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate on one case, in one respect.

    It is in one of three states: ``not_run`` says why it cannot be tried here; or else a falsy
    ``verdict`` why the candidate refuses the case; or else ``run`` runs it.

    Attributes:
        candidate: what is tried: a kernel, backend, layer or other record, or the reference itself.
        request: what it would be chosen for.
        label: of the case.
        verdict: whether the candidate takes the request; a refused one has not run, and says why.
        aspect: what about it is tried.
        not_run: why this cannot be tried here; empty where it can.
    """

    candidate: Candidate
    request: Request
    label: str
    verdict: Verdict
    check: Callable[[], list[Fault]]
    aspect: Aspect = "numerics"
    not_run: str = ""

    def run(self) -> list[Fault]:
        """Run the checks and return what is wrong.

        Nothing is wrong with a reasoned refusal, nor with what cannot be tried here.
        """
        if self.not_run:
            return []
        if not self.verdict:
            trace, reason = self.verdict.traceback, self.verdict.reason
            return [Fault("call", "verdict", reason, traceback=trace)] if trace else []
        try:
            return self.check()
        except foreign_errors() as error:
            return [Fault.raised("call", "call", error)]

    def __str__(self) -> str:
        aspect = "" if self.aspect == "numerics" else self.aspect
        name, dtype = self.candidate.qualified_name, self.request.dtype
        parts = (self.request.name, name, dtype, self.label, aspect)
        return "-".join(part for part in parts if part)
