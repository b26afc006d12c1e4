"""The trials of all registered candidates: one per candidate, case and aspect."""

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
from interposer.records import AttentionEntry, load_target
from interposer_testing._checks.attention import check_attention
from interposer_testing._checks.attention_properties import (
    check_attention_batches,
    check_attention_determinism,
)
from interposer_testing._checks.attention_specs import attention_specs
from interposer_testing._checks.call import CallArguments
from interposer_testing._checks.exemplar import Exemplar, exemplar_of, exemplars
from interposer_testing._checks.expectation import Expectation
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.kernel import check_gradients, check_subject
from interposer_testing._trials.communicators import communicator_trials
from interposer_testing._trials.declaration import declaration_trials
from interposer_testing._trials.families import family_trials
from interposer_testing._trials.kernels import Kernels, LocalKernels
from interposer_testing._trials.layers_and_schemes import layer_trials, scheme_trials
from interposer_testing._trials.property_trials import PropertyTrials
from interposer_testing._trials.trial import Aspect, Trial
from interposer_testing.cases._space import PlannedCase, planned_cases

_BackendCheck = Callable[[type[AttentionBackend], AttentionSpec, Site, int], list[Fault]]

_ATTENTION_PROPERTIES: tuple[tuple[str, Aspect, _BackendCheck], ...] = (
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
    kernels: Kernels | None = None,
) -> Iterator[Trial]:
    """Yield the trials of all registered candidates that can run on ``device``.

    A kernel runs every case of the op, a differentiable one with its backward pass too, and a few
    small cases for each other declared property.
    References are tested too, to find ops whose tolerance is too tight. Then follow attention
    backends, layers, schemes, model families, communicators, records and plugin modules. A
    candidate for another platform has only a trial of the record, with the reason. A candidate that
    refuses a case has a trial with the reason of the refusal.

    Args:
        distribution: name of the distribution to test; empty for all.
        op: name of the op whose kernels are tested; empty for all ops and all other records.
        seed: random seed of the cases.
        quick: run fewer cases per op, in which each tested size, layout and special value occurs;
            test expensive aspects in one dtype only, trace without compiling, and use two ranks.
        kernels: calls the kernels in the trials of numerics, determinism and threads; by default
            in this process.
    """
    kernels = kernels or LocalKernels()
    for name in [op] if op else registry.ops:
        candidates = eligible(registry, registry.candidates("kernel", name), device, distribution)
        if candidates:
            yield from _kernel_trials(registry, name, candidates, device, seed, quick, kernels)
    if op:
        return
    yield from attention_trials(registry, device, distribution, seed, quick=quick)
    yield from layer_trials(registry, device, distribution, seed)
    yield from scheme_trials(registry, device, distribution, seed)
    yield from family_trials(registry, device, distribution, seed)
    yield from communicator_trials(registry, device, distribution, quick=quick)
    yield from declaration_trials(registry, device, distribution)


def _kernel_trials(
    registry: Registry,
    name: str,
    candidates: list[Candidate],
    device: Device,
    seed: int,
    quick: bool,
    kernels: Kernels,
) -> Iterator[Trial]:
    label = "cases"
    try:
        op: CustomOp[..., Any] = load_target(registry.ops[name].target)
        latest, suitable = LatestCase(), list[Exemplar]()
        for plan in planned_cases(op, seed, quick=quick):
            label, case = plan.label, latest.build(plan)
            request = kernel_request(name, plan.dtype, device, case.dims)
            if quick and (exemplar := exemplar_of(op, plan, case, seed)):
                suitable.append(exemplar)
            for candidate in candidates:
                check = partial(
                    _check_candidate, candidate, op, latest, plan, device.torch_device, kernels
                )
                verdict = candidate.judge(request)
                yield Trial(candidate, request, label, verdict, check)
                if op.differentiable and "differentiable" in candidate.properties:
                    check = partial(
                        _check_gradients, candidate, op, latest, plan, device.torch_device, kernels
                    )
                    yield Trial(candidate, request, label, verdict, check, "gradients")
        # A quick run has built all covering cases already; otherwise build them now.
        suitable = suitable or list(exemplars(op, seed))
        property_trials = PropertyTrials(
            registry, op, device, suitable, quick=quick, kernels=kernels
        )
        for candidate in candidates:
            yield from property_trials.trials(candidate)
    except foreign_errors() as error:
        # The op or its cases failed: report this once, as a fault of the reference.
        fault = Fault.raised("import", f"op {name!r}", error)
        request = Request("kernel", name, device.platform, device.capability)
        reference = registry.candidates("kernel", name)[0]
        yield Trial(reference, request, label, Verdict.accept(), lambda: [fault])


def attention_trials(
    registry: Registry, device: Device, distribution: str, seed: int, *, quick: bool = False
) -> Iterator[Trial]:
    """Yield one trial per attention backend and spec, and one per property and dtype."""
    resolver = Resolver(registry, device, Config())
    for candidate in eligible(registry, registry.candidates("attention"), device, distribution):
        tested_dtypes: set[torch.dtype] = set()
        page_sizes = getattr(candidate.record, "page_sizes", ())
        for label, spec in attention_specs(quick=quick, page_sizes=page_sizes):
            request = _request("attention", spec.type, spec.dtype, device, spec.dims(), spec)
            site = Site(resolver, "conformance", spec.dtype)
            verdict = candidate.judge(request)
            check = partial(_check_backend, candidate, check_attention, spec, site, seed)
            yield Trial(candidate, request, label, verdict, check)
            if not verdict or spec.dtype in tested_dtypes:
                continue
            # Properties are checked on the first accepted spec of each dtype, to save time.
            tested_dtypes.add(spec.dtype)
            for name, aspect, check_property in _ATTENTION_PROPERTIES:
                if name in candidate.properties:
                    check = partial(_check_backend, candidate, check_property, spec, site, seed)
                    yield Trial(candidate, request, label, verdict, check, aspect)


class LatestCase:
    """Builds cases and caches the latest case with the expected result.

    The trials of all candidates on one case are consecutive, so this avoids repeated work without
    keeping every case in memory.
    """

    def __init__(self) -> None:
        self._latest: tuple[PlannedCase, Case] | None = None
        self._expectation: Expectation | None = None

    def build(self, plan: PlannedCase) -> Case:
        """Return the case of ``plan``; all trials share the arguments, so do not change them."""
        if self._latest is None or self._latest[0] is not plan:
            self._expectation = None
            self._latest = plan, plan.build()
        return self._latest[1]

    def expectation(
        self, op: CustomOp[..., Any], plan: PlannedCase, call_arguments: CallArguments
    ) -> Expectation:
        """Return the expected result of the case of ``plan``.

        Args:
            call_arguments: arguments of the case on the device, from any candidate's call.
        """
        case = self.build(plan)
        if self._expectation is None:
            self._expectation = Expectation.of(op, case, call_arguments)
        return self._expectation


def eligible(
    registry: Registry, candidates: list[Candidate], device: Device, distribution: str
) -> list[Candidate]:
    """Return the candidates of the distribution that can run on the platform of ``device``."""
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
    """Create the request of a case for a kernel of the op ``name``."""
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
    candidate: Candidate,
    op: CustomOp[..., Any],
    latest: LatestCase,
    plan: PlannedCase,
    device: str,
    kernels: Kernels,
) -> list[Fault]:
    # References are tested too: they must agree with their own result in float64.
    with kernels.subject(op, candidate, device) as subject:
        return check_subject(subject, latest.build(plan), partial(latest.expectation, op, plan))


def _check_gradients(
    candidate: Candidate,
    op: CustomOp[..., Any],
    latest: LatestCase,
    plan: PlannedCase,
    device: str,
    kernels: Kernels,
) -> list[Fault]:
    with kernels.subject(op, candidate, device) as subject:
        return check_gradients(subject, latest.build(plan))


def _check_backend(
    candidate: Candidate, check: _BackendCheck, spec: AttentionSpec, site: Site, seed: int
) -> list[Fault]:
    assert isinstance(candidate.record, AttentionEntry)
    return check(load_target(candidate.record.target), spec, site, seed)
