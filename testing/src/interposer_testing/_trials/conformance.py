"""Everything that is registered, as trials: one per candidate, case and aspect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch

from interposer import (
    AttentionBackend,
    AttentionSpec,
    Candidate,
    Case,
    Config,
    CustomOp,
    Device,
    Registry,
    Request,
    Resolver,
    Site,
    Verdict,
)
from interposer.errors import foreign_errors
from interposer.records import AttentionEntry, Kernel, load_target
from interposer_testing._checks.attention import check_attention
from interposer_testing._checks.attention_claims import (
    check_attention_batches,
    check_attention_determinism,
)
from interposer_testing._checks.attention_specs import attention_specs
from interposer_testing._checks.call import Given, Subject
from interposer_testing._checks.exemplar import Exemplar, exemplar_of, exemplars
from interposer_testing._checks.expectation import Expectation
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.kernel import check_subject
from interposer_testing._trials.claims import Promises
from interposer_testing._trials.communicators import communicator_trials
from interposer_testing._trials.declaration import declaration_trials
from interposer_testing._trials.families import family_trials
from interposer_testing._trials.layers_and_schemes import layer_trials, scheme_trials
from interposer_testing._trials.trial import Aspect, Trial
from interposer_testing.cases._space import PlannedCase, planned_cases

_BackendCheck = Callable[[type[AttentionBackend], AttentionSpec, Site, int], list[Fault]]

_ATTENTION_PROMISES: tuple[tuple[str, Aspect, _BackendCheck], ...] = (
    ("deterministic", "determinism", check_attention_determinism),
    ("batch_invariant", "batch invariance", check_attention_batches),
)


def conformance(
    registry: Registry,
    device: Device,
    *,
    distribution: str = "",
    op: str = "",
    seed: int = 0,
    quick: bool = False,
) -> Iterator[Trial]:
    """Yield the trials of everything that is registered and can run on ``device``.

    Kernels are tried on every case of their op, and what they promise on few small ones; the
    references are among them, so that an op contradicting its own tolerance is found. Then come
    attention backends, layers, schemes, model families, communicators, the records themselves and
    the plugin modules. What is for another platform is left out, but its records say so; what
    refuses a case is yielded with its reason.

    Args:
        distribution: name of the only distribution to try; empty tries all.
        op: name of the only op to try; everything but its kernels is left out then.
        seed: of the cases.
        quick: try only few cases of each op, among which every value of every axis occurs, the
            dear aspects in one dtype only, and no compiler behind the tracing.
    """
    for name in [op] if op else registry.ops:
        everyone = registry.candidates("kernel", name)
        candidates = eligible(registry, everyone, device, distribution)
        if candidates:
            yield from _kernel_trials(registry, name, candidates, device, seed, quick)
    if op:
        return
    yield from attention_trials(registry, device, distribution, seed, quick=quick)
    yield from layer_trials(registry, device, distribution, seed)
    yield from scheme_trials(registry, device, distribution, seed)
    yield from family_trials(registry, device, distribution, seed)
    yield from communicator_trials(registry, device, distribution)
    yield from declaration_trials(registry, device, distribution)


def _kernel_trials(
    registry: Registry,
    name: str,
    candidates: list[Candidate],
    device: Device,
    seed: int,
    quick: bool,
) -> Iterator[Trial]:
    label = "cases"
    try:
        op: CustomOp[..., Any] = load_target(registry.ops[name].target)
        latest, found = Latest(), list[Exemplar]()
        for plan in planned_cases(op, seed, quick=quick):
            label, case = plan.label, latest.built(plan)
            request = kernel_request(name, plan.dtype, device, case.dims)
            if quick and (exemplar := exemplar_of(op, plan, case, seed)):
                found.append(exemplar)
            for candidate in candidates:
                check = partial(_check_candidate, candidate, op, latest, plan, device.torch_device)
                yield Trial(candidate, request, label, candidate.judge(request), check)
        found = found or list(exemplars(op, seed))
        promises = Promises(registry, op, device, found, quick=quick)
        for candidate in candidates:
            yield from promises.trials(candidate)
    except foreign_errors() as error:
        fault = Fault.raised("import", f"op {name!r}", error)
        request = Request("kernel", name, device.platform, device.capability)
        reference = registry.candidates("kernel", name)[0]
        yield Trial(reference, request, label, Verdict.accept(), lambda: [fault])


def attention_trials(
    registry: Registry, device: Device, distribution: str, seed: int, *, quick: bool = False
) -> Iterator[Trial]:
    """Yield a trial of every attention backend and spec, and of promises once for each dtype."""
    resolver = Resolver(registry, device, Config())
    for candidate in eligible(registry, registry.candidates("attention"), device, distribution):
        tried: set[torch.dtype] = set()
        page_sizes = getattr(candidate.record, "page_sizes", ())
        for label, spec in attention_specs(quick=quick, page_sizes=page_sizes):
            request = _request("attention", spec.type, spec.dtype, device, spec.dims(), spec)
            site = Site(resolver, "conformance", spec.dtype)
            verdict = candidate.judge(request)
            check = partial(_check_backend, candidate, check_attention, spec, site, seed)
            yield Trial(candidate, request, label, verdict, check)
            if not verdict or spec.dtype in tried:
                continue
            tried.add(spec.dtype)
            for promise, aspect, promised in _ATTENTION_PROMISES:
                if promise in candidate.properties:
                    check = partial(_check_backend, candidate, promised, spec, site, seed)
                    yield Trial(candidate, request, label, verdict, check, aspect)


class Latest:
    """Builds cases and keeps the last one, so that a list of trials does not hold them all.

    What the reference says of it is kept too: the candidates of an op follow one another on a case.
    """

    def __init__(self) -> None:
        self._last: tuple[PlannedCase, Case] | None = None
        self._expectation: Expectation | None = None

    def built(self, plan: PlannedCase) -> Case:
        """Return the case of ``plan``, whose arguments are for reading."""
        if self._last is None or self._last[0] is not plan:
            self._expectation = None
            self._last = plan, plan.build()
        return self._last[1]

    def expected(self, op: CustomOp[..., Any], plan: PlannedCase, given: Given) -> Expectation:
        """Return what is expected on the case of ``plan``, given in the form of any candidate."""
        case = self.built(plan)
        if self._expectation is None:
            self._expectation = Expectation.of(op, case, given)
        return self._expectation


def eligible(
    registry: Registry, candidates: list[Candidate], device: Device, distribution: str
) -> list[Candidate]:
    """Return the candidates of the distribution whose platform, if any, the device's one runs."""
    return [
        candidate
        for candidate in candidates
        if getattr(candidate.record, "platform", "") in registry.runs(device.platform)
        and distribution in ("", candidate.provider)
    ]


def kernel_request(
    name: str,
    dtype: torch.dtype,
    device: Device,
    dims: Mapping[str, int | float | str | bool],
) -> Request:
    """Return the request of a case for a kernel of the op ``name``."""
    return _request("kernel", name, dtype, device, dims)


def _request(
    kind: Literal["kernel", "attention"],
    name: str,
    dtype: torch.dtype,
    device: Device,
    dims: Mapping[str, int | float | str | bool],
    spec: AttentionSpec | None = None,
) -> Request:
    dtype_name = str(dtype).removeprefix("torch.")
    return Request(kind, name, device.platform, device.capability, dtype_name, dims, spec)


def _check_candidate(
    candidate: Candidate, op: CustomOp[..., Any], latest: Latest, plan: PlannedCase, device: str
) -> list[Fault]:
    record, case = candidate.record, latest.built(plan)
    expect = partial(latest.expected, op, plan)
    if not isinstance(record, Kernel):
        return check_subject(Subject(op, op.reference, device=device), case, expect)
    function = load_target(record.target)
    prepare = load_target(record.prepare) if record.prepare else None
    allowing = op.allowing(record.extra_roundings)
    return check_subject(Subject(allowing, function, prepare, device=device), case, expect)


def _check_backend(
    candidate: Candidate, check: _BackendCheck, spec: AttentionSpec, site: Site, seed: int
) -> list[Fault]:
    assert isinstance(candidate.record, AttentionEntry)
    return check(load_target(candidate.record.target), spec, site, seed)
