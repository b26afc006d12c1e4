"""The outcome of one trial, as plain facts that another process can send."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, Literal

from interposer import Device, Registry
from interposer.errors import UnknownNameError, nearest_first
from interposer.records import DeviceEntry, TuningEntry
from interposer_testing._checks.fault import Fault
from interposer_testing._trials.conformance import conformance
from interposer_testing._trials.host import find_host, host_trials
from interposer_testing._trials.trial import Trial

_MOST_LABELS = 12

Progress = Callable[[int, str], None]
"""Takes how many trials are done and a name of the next, before it runs."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The limits of a verification; empty texts do not limit it.

    Attributes:
        host: name of the engine in whose layers kernels are tried; empty tries them by themselves.
    """

    distribution: str
    op: str = ""
    case: str = ""
    seed: int = 0
    quick: bool = False
    host: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished trial.

    Attributes:
        kind, subject: what the candidate is, and what for: ``"kernel"`` and an op.
        name, provider, version, platform: of the candidate.
        dtype, aspect, case: of the trial.
        reason: of a refusal, or why it was not run.
        seconds: that it took.
    """

    kind: str
    subject: str
    name: str
    provider: str
    version: str
    platform: str
    dtype: str
    aspect: str
    case: str
    state: Literal["passed", "failed", "refused", "not run"] = "passed"
    reason: str = ""
    faults: tuple[Fault, ...] = ()
    seconds: float = 0.0

    @property
    def candidate(self) -> tuple[str, str, str, str]:
        """The key of the candidate: kind, subject, provider and name."""
        return self.kind, self.subject, self.provider, self.name

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Outcome:
        """Return what ``to_dict`` was asked of."""
        return cls(**{**facts, "faults": tuple(Fault(**fault) for fault in facts["faults"])})


def outcomes(
    registry: Registry, device: Device, scope: Scope, progress: Progress | None = None
) -> Iterator[Outcome]:
    """Run the trials in ``scope`` one by one, and yield what came of each."""
    for done, trial in enumerate(trials(registry, device, scope)):
        if progress is not None:
            progress(done, str(trial))
        yield outcome_of(trial)


def trials(registry: Registry, device: Device, scope: Scope) -> Iterator[Trial]:
    """Yield the trials in ``scope``.

    Raises:
        UnknownNameError: there is no such host, or no case has the label of the scope.
        ConfigError: the host cannot be used.
    """
    labels = dict[str, None]()
    generate = partial(host_trials, host=find_host(scope.host)) if scope.host else conformance
    for trial in generate(
        registry,
        device,
        distribution=scope.distribution,
        op=scope.op,
        seed=scope.seed,
        quick=scope.quick,
    ):
        labels[trial.label] = None
        if scope.case in ("", trial.label):
            yield trial
    if scope.case and scope.case not in labels:
        nearest, where = nearest_first(scope.case, labels), f"of {scope.op or scope.distribution}"
        more = len(nearest) - _MOST_LABELS
        hint = f"There are {more} more; the report names those that fail." if more > 0 else ""
        raise UnknownNameError("case", scope.case, nearest[:_MOST_LABELS], hint, where)


def outcome_of(trial: Trial) -> Outcome:
    """Run a trial and return what came of it."""
    told = untried(trial)
    if trial.not_run:
        return replace(told, state="not run", reason=trial.not_run)
    start = time.perf_counter()
    faults = _named_after(trial)()
    seconds = time.perf_counter() - start
    if faults:
        return replace(told, state="failed", faults=tuple(faults), seconds=seconds)
    if not trial.verdict:
        return replace(told, state="refused", reason=trial.verdict.reason)
    return replace(told, seconds=seconds)


def untried(trial: Trial) -> Outcome:
    """Return what is known of a trial before it runs."""
    candidate, request, kind = trial.candidate, trial.request, _kind(trial)
    return Outcome(
        kind=kind,
        # A backend is one candidate, whatever type of attention it is asked for, and so is a
        # communicator for all its collectives.
        subject="" if request.kind in ("attention", "communicator") else request.name,
        name=trial.label.removeprefix("module ") if kind == "module" else candidate.name,
        provider=candidate.provider,
        version=candidate.version,
        platform=getattr(candidate.record, "platform", ""),
        dtype=request.dtype,
        aspect=trial.aspect,
        case=trial.label,
    )


def _kind(trial: Trial) -> str:
    """Return what the candidate is; the request of a mere declaration does not say it."""
    if trial.aspect in ("lightness", "wheel"):
        return "module"
    match trial.candidate.record:
        case DeviceEntry():
            return "device description"
        case TuningEntry():
            return "tuning table"
    return trial.request.kind


def _named_after(trial: Trial) -> Callable[[], list[Fault]]:
    """Return a function that runs a trial in a frame with the trial as its file name.

    When native code ends the process, faulthandler prints the frames and nothing else: so it says
    what was running, and nothing has to be written before each trial.
    """

    def run() -> list[Fault]:
        return trial.run()

    code = run.__code__.replace(co_filename=f"<trial {trial}>")
    named: Callable[[], list[Fault]] = FunctionType(
        code, globals(), run.__name__, closure=run.__closure__
    )
    return named
