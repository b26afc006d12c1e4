"""Tuning: every candidate for a model is timed on the shapes of the model."""

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
from interposer_tools._tuner.clock import Clock, Spread
from interposer_tools._tuner.table import NotMeasured, Table, write_entry
from interposer_tools._tuner.timed_request import TimedAttention, TimedKernels, TimedRequest

_FEWEST_REPEATS = 3


class Progress(Protocol):
    """Is told how far tuning has come."""

    def __call__(self, done: int, total: int, subject: str) -> None:
        """Take note that ``done`` of ``total`` requests are measured and ``subject`` is next."""


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
    """Time what could be chosen for ``model`` on this machine, and keep it for the selection.

    A candidate's figure is the geometric mean over ``tokens`` of its medians, each from
    ``repeats`` runs with cold caches. Whatever is chosen from then on, the fastest goes first
    unless the configuration says otherwise.

    Args:
        model: a model directory, or what was loaded or planned from one.
        tokens: numbers of tokens of a step. Up to 32 are decoded by as many sequences, each
            behind a context of 512; more are one prompt.
        dtype: to compute in, for a model directory.
        config: policy for the plan, above every other source.
        timer: returns the seconds since any fixed moment.
    Returns: what was measured, with what was not and why; it is in the cache directory as well.
    Raises:
        ConfigError: ``tokens`` or ``repeats`` cannot be used, or the device is only described.
        StorageError: a measurement cannot be kept.
    """
    if not isinstance(model, str | os.PathLike | Planned):
        raise ConfigError(
            f"model is of the type {type(model).__name__}, must be a model directory or what was "
            "loaded or planned from one. Try: tune(path)"
        )
    listed = isinstance(tokens, Sequence) and not isinstance(tokens, str)
    if not (listed and tokens) or any(type(count) is not int or count < 1 for count in tokens):
        raise ConfigError(f"tokens are {tokens!r}, must be positive integers, as (1, 16, 256)")
    if not isinstance(repeats, int) or repeats < _FEWEST_REPEATS:
        raise ConfigError(f"repeats is {repeats!r}, must be an integer of at least 3")
    # Figures that don't fit any more must not keep a strict policy from measuring anew.
    policy = effective_config(config).model_copy(update={"tables": False})
    plan = planned(model, policy, dtype)
    if plan.resolver.described:
        raise ConfigError(
            f"{plan.resolver.device.name} is only described and cannot be measured. "
            "Try: tune on a machine that has one, and ship the table with a plugin"
        )
    return _Session(plan, sorted(set(tokens)), repeats, timer).run(progress)


class _Session:
    """The measurement of one plan."""

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
        self.measurements = Measurements(
            self.resolver.registry, self.resolver.device, self.resolver.config
        )

    def run(self, progress: Progress | None) -> Table:
        entries, left_out = [], []
        requests = self.requests()
        for done, request in enumerate(requests):
            if progress is not None:
                progress(done, len(requests), str(request))
            start = time.time_ns()
            timed = self.timed(request)
            if isinstance(timed, str):
                left_out.append(NotMeasured(request=str(request), reason=timed))
                continue
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
        return Table(entries=tuple(entries), not_measured=tuple(left_out))

    def requests(self) -> list[Request]:
        """Return every distinct request of the plan; attention is last, as it binds kernels.

        The kernels of all backends are among them, not only those of the chosen one.
        """
        found = {choice.request.key: choice.request for choice, _ in self.resolver.choices.values()}
        for request in [r for r in found.values() if r.kind == "attention"]:
            timed = TimedAttention(self.plan, request, self.tokens)
            for candidate in self.resolver.accepted(request):
                bound = timed.bound_to(candidate)
                try:
                    timed.backend(candidate, bound)
                except NoCandidateError:
                    continue  # its reason is found again when it is to be timed
                for choice, _ in bound.choices.values():
                    found.setdefault(choice.request.key, choice.request)
        order = {"kernel": 0, "attention": 1}
        return sorted(found.values(), key=lambda request: order.get(request.kind, 2))

    def timed(self, request: Request) -> TimedRequest | str:
        """Return what is to be timed for a request, or why nothing is."""
        if request.kind == "attention":
            return TimedAttention(self.plan, request, self.tokens)
        if request.kind != "kernel":
            return f"as a {request.kind} is chosen by policy and score"
        op: CustomOp[..., Any] = load_target(self.resolver.registry.ops[request.name].target)
        if op.sample is None:
            return f"as the op {request.name!r} has no sample to run its kernels on"
        try:
            return TimedKernels(self.plan, request, self.tokens, op)
        except foreign_errors() as error:
            return f"as the sample of the op {request.name!r} raised {described(error)}"

    def measured(self, timed: TimedRequest) -> Entry:
        """Return the figures of all candidates; those that fail are kept with the reason."""
        accepted = self.resolver.accepted(timed.request)
        versions = {candidate.qualified_name: candidate.version for candidate in accepted}
        failed: dict[str, tuple[str, str]] = {}
        calls: dict[str, list[Callable[[], object]]] = {}
        for candidate in accepted:
            name = candidate.qualified_name
            try:
                calls[name] = [partial(_named, name, call) for call in timed.calls(candidate)]
            except foreign_errors() as error:
                failed[name] = candidate.version, _reason(candidate, error)
        spreads = None
        while spreads is None:
            try:
                spreads = self.spreads(calls)
            except _CallError as error:
                failed[error.name] = versions[error.name], _raised(error.__cause__ or error)
                del calls[error.name]
        value = Measurement(
            driver=self.measurements.driver(),
            torch=str(torch.__version__),
            interposer=importlib_metadata.version("interposer"),
            measured=datetime.now(UTC),
            candidates={
                name: self.figures(versions[name], found) for name, found in spreads.items()
            },
            failed=failed,
        )
        return Entry(key=self.measurements.key(timed.request), value=value)

    def spreads(
        self, calls: Mapping[str, Sequence[Callable[[], object]]]
    ) -> dict[str, list[Spread]]:
        """Return the spreads of each candidate's calls, one per number of tokens."""
        columns = [
            self.clock.time(column, self.repeats) for column in zip(*calls.values(), strict=True)
        ]
        return {name: [column[place] for column in columns] for place, name in enumerate(calls)}

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
    """A candidate failed while the tuner timed it."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(name)


def _named(name: str, call: Callable[[], object]) -> object:
    try:
        return call()
    except foreign_errors() as error:
        raise _CallError(name) from error


def _reason(candidate: Candidate, error: BaseException) -> str:
    """Return why a candidate was not timed; of a refusal, its own reason alone."""
    if isinstance(error, NoCandidateError):
        own = [r.reason for r in error.refusals if r.candidate == candidate.name]
        return own[0] if own else str(error)
    return _raised(error)


def _raised(error: BaseException) -> str:
    """Say what was raised; of an allocator's report, its first line."""
    first, more, _ = described(error).partition("\\n")
    return f"raised {first} ..." if more else f"raised {first}"
