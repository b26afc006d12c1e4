"""The outcome of one trial as plain data, which a child process can send."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, Literal

from interposer import Device, Registry
from interposer.errors import UnknownNameError
from interposer.records import DeviceEntry, TuningEntry
from interposer_testing._checks.fault import Fault
from interposer_testing._trials.conformance import conformance
from interposer_testing._trials.host import find_host, host_trials
from interposer_testing._trials.kernels import Kernels
from interposer_testing._trials.trial import Trial

Progress = Callable[[int, str], None]
"""Called before each trial with the number of finished trials and the name of the next one."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The scope of a verification: distribution, op and case; empty strings mean all.

    Attributes:
        host: name of the engine whose layers run the kernels; empty runs kernels directly.
    """

    distribution: str
    op: str = ""
    case: str = ""
    seed: int = 0
    quick: bool = False
    host: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one trial: state, faults and duration.

    Attributes:
        kind, subject: kind and purpose of the candidate, such as ``"kernel"`` and an op.
        name, provider, version, platform: name, distribution, version of the distribution, and
            platform of the candidate.
        dtype, aspect, case: dtype, aspect and case label of the trial.
        reason: reason why the trial was refused or not run.
        seconds: duration of the trial.
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
        """Key of the candidate: kind, subject, provider and name."""
        return self.kind, self.subject, self.provider, self.name

    def to_dict(self) -> dict[str, Any]:
        """Convert the outcome to plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Outcome:
        """Create an outcome from the values that ``to_dict`` returned."""
        return cls(**{**facts, "faults": tuple(Fault(**fault) for fault in facts["faults"])})


def outcomes(
    registry: Registry, device: Device, scope: Scope, progress: Progress | None = None
) -> Iterator[Outcome]:
    """Run the trials in ``scope`` in this process and yield the outcomes."""
    for num_done, trial in enumerate(trials(registry, device, scope)):
        if progress is not None:
            progress(num_done, str(trial))
        yield outcome_of(trial)


def trials(
    registry: Registry, device: Device, scope: Scope, kernels: Kernels | None = None
) -> Iterator[Trial]:
    """Yield the trials in ``scope``.

    Args:
        kernels: calls the kernels of separable trials; by default in this process.

    Raises:
        UnknownNameError: the host is unknown, or no case has the label in ``scope``.
        ConfigError: the host cannot be loaded.
    """
    # Collect labels even of unrun trials, to suggest names for a misspelt ``case``.
    labels = dict[str, None]()
    generate = partial(conformance, kernels=kernels)
    if scope.host:
        generate = partial(host_trials, host=find_host(scope.host))
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
        where = f"of {scope.op or scope.distribution}"
        hint = "A report shows the labels of the cases that failed."
        raise UnknownNameError("case", scope.case, labels, hint, where)


def outcome_of(trial: Trial) -> Outcome:
    """Run a trial; return the outcome with state, faults and duration."""
    outcome = untried(trial)
    if trial.not_run:
        return replace(outcome, state="not run", reason=trial.not_run)
    start = time.perf_counter()
    faults = _named_runner(trial)()
    seconds = time.perf_counter() - start
    if faults:
        return replace(outcome, state="failed", faults=tuple(faults), seconds=seconds)
    if not trial.verdict:
        return replace(outcome, state="refused", reason=trial.verdict.reason)
    return replace(outcome, seconds=seconds)


def untried(trial: Trial) -> Outcome:
    """Create the outcome of a trial that has not run: identity only, no state or faults."""
    candidate, request, kind = trial.candidate, trial.request, _kind(trial)
    return Outcome(
        kind=kind,
        # A backend is one candidate for all attention types, a communicator for all collectives.
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
    """Return the kind of the candidate; declarations have requests of another kind."""
    if trial.aspect in ("lightness", "wheel"):
        return "module"
    match trial.candidate.record:
        case DeviceEntry():
            return "device description"
        case TuningEntry():
            return "tuning table"
    return trial.request.kind


def _named_runner(trial: Trial) -> Callable[[], list[Fault]]:
    """Return a function that runs the trial, with the trial as the file name of its code.

    When native code crashes the process, faulthandler prints only the stack frames. The file name
    then identifies the trial, without writing anything before each trial.
    """

    def run() -> list[Fault]:
        return trial.run()

    # ``globals()`` and the closure are those of ``run``, so the copy behaves the same.
    code = run.__code__.replace(co_filename=f"<trial {trial}>")
    runner: Callable[[], list[Fault]] = FunctionType(
        code, globals(), run.__name__, closure=run.__closure__
    )
    return runner
