"""Tuning: time every candidate for a model on the shapes of the model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from statistics import geometric_mean
from typing import Any, Protocol

import importlib_metadata
import torch

from interposer import Candidate, Config, CustomOp, Planned, Request, effective_config, planned
from interposer.errors import ConfigError, NoCandidateError, described, foreign_errors
from interposer.records import load_target
from interposer.tooling import Measurements
from interposer.tuning import Entry, Figures, Measurement
from interposer_testing.timing import (
    KernelProcesses,
    RefusedTimesError,
    Roofline,
    TimedKernel,
    batch_times,
)
from interposer_tools._tuner.clock import Clock, Spread
from interposer_tools._tuner.table import InProcess, NotMeasured, Table, write_entry
from interposer_tools._tuner.timed_request import Call, TimedAttention, TimedKernels, TimedRequest

_MIN_REPEATS = 3


class Progress(Protocol):
    """A callback that shows the progress of tuning."""

    def __call__(self, num_done: int, total: int, subject: str, /) -> None:
        """Show that ``num_done`` of ``total`` requests are measured, and ``subject`` is next."""


def tune(
    model: str | os.PathLike[str] | Planned,
    *,
    tokens: Sequence[int] = (1, 16, 256),
    repeats: int = 15,
    dtype: str = "auto",
    config: Config | None = None,
    progress: Progress | None = None,
    timer: Callable[[], float] = time.perf_counter,
) -> Table:
    """Measure all candidates for ``model`` on this machine, and store the results.

    The result of a candidate is the geometric mean of the median times for all ``tokens``, each
    from ``repeats`` runs with cold caches. From then on, the fastest candidate is selected unless
    the configuration says otherwise.

    Kernels of installed plugins run in processes of their own if possible, so that they can change
    neither the clock nor the comparison with the reference. ``Table.in_process`` lists the others.

    Args:
        model: a model directory, a loaded model or a plan.
        tokens: numbers of tokens per step. Up to 32 tokens are one decode step of as many
            sequences, each with a context of 512 tokens; more tokens are one prompt.
        dtype: the dtype of activations, for a model directory.
        config: configuration that overrides all other sources.
        timer: a clock that returns seconds.
    Returns: the measurements, which are also stored in the cache directory, and the requests that
        were not measured, with the reasons.
    Raises:
        ConfigError: ``tokens`` or ``repeats`` is invalid, or the device is only described.
        StorageError: a measurement cannot be stored.
    """
    if not isinstance(model, str | os.PathLike | Planned):
        raise ConfigError(
            f"model is of the type {type(model).__name__}, must be a model directory, a loaded "
            "model or a plan. Try: tune(path)"
        )
    is_list = isinstance(tokens, Sequence) and not isinstance(tokens, str)
    if not (is_list and tokens) or any(type(count) is not int or count < 1 for count in tokens):
        raise ConfigError(f"tokens are {tokens!r}, must be positive integers, such as (1, 16, 256)")
    if not isinstance(repeats, int) or repeats < _MIN_REPEATS:
        raise ConfigError(f"repeats is {repeats!r}, must be an integer of at least 3")
    # Ignore stored measurements: outdated ones would make a strict configuration fail here.
    policy = effective_config(config).model_copy(update={"tables": False})
    plan = planned(model, policy, dtype)
    if plan.resolver.described:
        raise ConfigError(
            f"{plan.resolver.device.name} is only described and cannot be measured. "
            "Try: tune on a machine that has one, and ship the table with a plugin"
        )
    return _Session(plan, sorted(set(tokens)), repeats, timer).run(progress)


class _Session:
    """One tuning run: measures all requests of a planned model."""

    def __init__(
        self,
        plan: Planned,
        tokens: Sequence[int],
        repeats: int,
        timer: Callable[[], float],
    ) -> None:
        self.plan = plan
        self.resolver = plan.resolver
        self.tokens = tokens
        self.repeats = repeats
        self.clock = Clock(plan.placement.platform, self.resolver.device, timer)
        self.timer = timer
        self.roofline = Roofline(timer)
        self.in_process: list[InProcess] = []
        self.measurements = Measurements(
            self.resolver.registry, self.resolver.device, self.resolver.config
        )

    def run(self, progress: Progress | None) -> Table:
        with KernelProcesses(type(self.plan.placement.platform)) as self.processes:
            return self.table(progress)

    def table(self, progress: Progress | None) -> Table:
        entries, skipped = [], []
        requests = self.requests()
        for num_done, request in enumerate(requests):
            if progress is not None:
                progress(num_done, len(requests), str(request))
            start = time.time_ns()
            timed = self.timed(request)
            if isinstance(timed, str):
                skipped.append(NotMeasured(request=str(request), reason=timed))
                continue
            # Store each result at once, so that an interrupted run loses only one.
            with torch.inference_mode():
                entry = self.measured(timed)
            write_entry(self.measurements.store, entry)
            entries.append(entry)
            self.resolver.registry.plugins.observe(
                "interposer_finished",
                activity="tune",
                subject=str(request),
                start_ns=start,
                end_ns=time.time_ns(),
                facts={"fastest": entry.fastest, "candidates": len(entry.value.candidates)},
            )
        if progress is not None:
            progress(len(requests), len(requests), "")
        return Table(
            entries=tuple(entries),
            not_measured=tuple(skipped),
            in_process=tuple(self.in_process),
        )

    def requests(self) -> list[Request]:
        """Return the distinct requests of the plan and of the kernels in all attention backends.

        Attention requests come last, so that backends are timed with the fastest kernels.
        """
        requests = {
            choice.request.key: choice.request for choice, _ in self.resolver.choices.values()
        }
        for request in [r for r in requests.values() if r.kind == "attention"]:
            timed = TimedAttention(self.plan, request, self.tokens)
            for candidate in self.resolver.accepted(request):
                # Building the backend makes its resolver select the kernels of the backend.
                resolver = timed.bound_to(candidate)
                try:
                    timed.backend(candidate, resolver)
                except NoCandidateError:
                    continue  # ``measured`` reports the reason later
                for choice, _ in resolver.choices.values():
                    requests.setdefault(choice.request.key, choice.request)
        order = {"kernel": 0, "attention": 1}
        return sorted(requests.values(), key=lambda request: order.get(request.kind, 2))

    def timed(self, request: Request) -> TimedRequest | str:
        """Return the calls to time for ``request``, or the reason why no kernel can be timed."""
        if request.kind == "attention":
            return TimedAttention(self.plan, request, self.tokens)
        if request.kind != "kernel":
            return f"because a {request.kind} is selected by configuration and score"
        op: CustomOp[..., Any] = load_target(self.resolver.registry.ops[request.name].target)
        if op.sample is None:
            return f"because the op {request.name!r} has no sample to run its kernels on"
        try:
            return TimedKernels(self.plan, request, self.tokens, op)
        except foreign_errors() as error:
            return f"because the sample of the op {request.name!r} raised {described(error)}"

    def measured(self, timed: TimedRequest) -> Entry:
        """Time all candidates for a request; the entry also lists failed ones with reasons."""
        accepted = self.resolver.accepted(timed.request)
        versions = {candidate.qualified_name: candidate.version for candidate in accepted}
        failed: dict[str, tuple[str, str]] = {}
        in_process, separate = list[Candidate](), list[Candidate]()
        for candidate in accepted:
            reason = timed.in_process_reason(candidate)
            (in_process if reason else separate).append(candidate)
            if reason:
                name, request = candidate.qualified_name, str(timed.request)
                note = InProcess(request=request, candidate=name, reason=reason)
                self.in_process.append(note)
        spreads = self.spreads_here(timed, in_process, failed)
        if isinstance(timed, TimedKernels):
            spreads |= self.separate_spreads(timed, separate, failed)
        value = Measurement(
            driver=self.measurements.driver(),
            torch=str(torch.__version__),
            interposer=importlib_metadata.version("interposer"),
            measured=datetime.now(UTC),
            candidates={
                name: self.figures(versions[name], by_tokens) for name, by_tokens in spreads.items()
            },
            failed=failed,
        )
        return Entry(key=self.measurements.key(timed.request), value=value)

    def spreads_here(
        self,
        timed: TimedRequest,
        candidates: Sequence[Candidate],
        failed: dict[str, tuple[str, str]],
    ) -> dict[str, list[Spread]]:
        """Time candidates in this process; add version and reason of failures to ``failed``."""
        versions = {candidate.qualified_name: candidate.version for candidate in candidates}
        calls: dict[str, list[Call]] = {}
        for candidate in candidates:
            name = candidate.qualified_name
            try:
                calls[name] = [partial(_call, name, call) for call in timed.calls(candidate)]
            except foreign_errors() as error:
                failed[name] = candidate.version, _reason(candidate, error)
        while calls:  # a failed candidate is removed, and all others are timed again
            try:
                times = self.spreads(timed, calls)
                self.compare(timed, candidates, calls)
                return times
            except _CallError as error:
                failed[error.name] = versions[error.name], error.reason
                del calls[error.name]
        return {}

    def separate_spreads(
        self,
        timed: TimedKernels,
        candidates: Sequence[Candidate],
        failed: dict[str, tuple[str, str]],
    ) -> dict[str, list[Spread]]:
        """Time candidates in other processes; add version and reason of failures to ``failed``."""
        remaining = {candidate.qualified_name: candidate for candidate in candidates}
        while remaining:  # a failed candidate is removed, and all others are timed again
            try:
                with self.processes.scope():
                    kernels = [self.separate(timed, c) for c in remaining.values()]
                    columns = [
                        batch_times(
                            kernels, partial(timed.draw, index), self.repeats, self.roofline
                        )
                        for index in range(len(timed.tokens))
                    ]
                return {name: [Spread(*column[name]) for column in columns] for name in remaining}
            except RefusedTimesError as error:
                failed[error.name] = remaining.pop(error.name).version, error.reason
        return {}

    def separate(self, timed: TimedKernels, candidate: Candidate) -> TimedKernel:
        try:
            return timed.separate(candidate, self.processes, self.timer)
        except RefusedTimesError:
            raise
        except foreign_errors() as error:
            reason = _reason(candidate, error)
            raise RefusedTimesError(candidate.qualified_name, reason) from error

    def compare(
        self,
        timed: TimedRequest,
        candidates: Sequence[Candidate],
        calls: Mapping[str, Sequence[Call]],
    ) -> None:
        """Compare a call of every timed candidate, with the fewest tokens, with the reference.

        Raises: _CallError: a result is wrong, as of a kernel that remembers results.
        """
        for candidate in candidates:
            name = candidate.qualified_name
            if name not in calls:
                continue
            if faults := timed.faults(0, candidate, calls[name][0]):
                raise _CallError(name, f"returned a wrong result: {faults[0]}")

    def spreads(
        self, timed: TimedRequest, calls: Mapping[str, Sequence[Call]]
    ) -> dict[str, list[Spread]]:
        """Time the calls; return, per candidate, one ``Spread`` per number of tokens."""
        # All candidates alternate for one number of tokens, then for the next one.
        columns = [
            self.clock.time(column, self.repeats, partial(timed.refresh, index))
            for index, column in enumerate(zip(*calls.values(), strict=True))
        ]
        return {name: [column[index] for column in columns] for index, name in enumerate(calls)}

    def figures(self, version: str, spreads: Sequence[Spread]) -> Figures:
        return Figures(
            version=version,
            seconds=geometric_mean(spread.median for spread in spreads),
            low=geometric_mean(spread.low for spread in spreads),
            high=geometric_mean(spread.high for spread in spreads),
            per_tokens={
                str(count): spread.median
                for count, spread in zip(self.tokens, spreads, strict=True)
            },
        )


class _CallError(Exception):
    """A call of candidate ``name`` raised during the measurement, or gave a wrong result."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        super().__init__(f"{name} {reason}")


def _call(name: str, call: Callable[[], object]) -> object:
    try:
        return call()
    except foreign_errors() as error:
        raise _CallError(name, _raised(error)) from error


def _reason(candidate: Candidate, error: BaseException) -> str:
    """Describe the failure of a candidate; for a refusal, only the reason of this candidate."""
    if isinstance(error, NoCandidateError):
        reasons = [r.reason for r in error.refusals if r.candidate == candidate.name]
        return reasons[0] if reasons else str(error)
    return _raised(error)


def _raised(error: BaseException) -> str:
    """Describe an exception by its first line, because allocators report many lines."""
    # ``described`` returns a repr, in which a newline is a backslash and an n.
    first, newline, _ = described(error).partition("\\n")
    return f"raised {first} ..." if newline else f"raised {first}"
