"""Everything that is registered, as trials: one per candidate and case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from interposer.attention import AttentionSpec
from interposer.capability import Device
from interposer.cases.space import planned_cases
from interposer.choice import Candidate
from interposer.config import Config
from interposer.errors import FOREIGN_ERRORS
from interposer.layer import Site
from interposer.op import Case, CustomOp
from interposer.records import AttentionEntry, Kernel, load_target
from interposer.registry import Registry
from interposer.request import Request
from interposer.resolver import Resolver
from interposer.testing.attention import attention_specs, check_attention
from interposer.testing.fault import Fault
from interposer.testing.kernel import check_kernel
from interposer.verdict import Verdict

__all__ = ["Trial", "conformance"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate on one case.

    Attributes:
        candidate: the kernel or backend, or the reference itself.
        request: what it would be chosen for.
        label: of the case.
        verdict: whether the candidate takes the request; a refused one has not run, and says why.
    """

    candidate: Candidate
    request: Request
    label: str
    verdict: Verdict
    check: Callable[[], list[Fault]]

    def run(self) -> list[Fault]:
        """Run the checks and return what is wrong; nothing is wrong with a reasoned refusal."""
        if not self.verdict:
            trace, reason = self.verdict.traceback, self.verdict.reason
            return [Fault("call", "verdict", reason, traceback=trace)] if trace else []
        try:
            return self.check()
        except FOREIGN_ERRORS as error:
            return [Fault.raised("call", "call", error)]

    def __str__(self) -> str:
        parts = (self.request.name, self.candidate.qualified_name, self.request.dtype, self.label)
        return "-".join(part for part in parts if part)


def conformance(
    registry: Registry,
    device: Device,
    *,
    distribution: str = "",
    op: str = "",
    seed: int = 0,
    quick: bool = False,
) -> Iterator[Trial]:
    """Yield a trial of every kernel and attention backend that can run on ``device``.

    The references are among them, so that an op contradicting its own tolerance is found. What is
    for another platform is left out; what refuses a case is yielded with its reason.

    Args:
        distribution: name of the only distribution to try; empty tries all.
        op: name of the only op to try; attention backends are left out then.
        seed: of the cases.
        quick: try only few cases of each op, among which every value of every axis occurs.
    """
    for name in [op] if op else registry.ops:
        candidates = _eligible(registry.candidates("kernel", name), device, distribution)
        if candidates:
            yield from _kernel_trials(registry, name, candidates, device, seed, quick)
    if op:
        return
    resolver = Resolver(registry, device, Config())
    for candidate in _eligible(registry.candidates("attention"), device, distribution):
        for label, spec in attention_specs():
            request = _request("attention", spec.type, spec.dtype, device, spec.dims(), spec)
            site = Site(resolver, "conformance", spec.dtype)
            check = partial(_check_backend, candidate, spec, site, seed)
            yield Trial(candidate, request, label, candidate.judge(request), check)


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
        for plan in planned_cases(op, seed, quick=quick):
            label = plan.label
            case = plan.build()
            request = _request("kernel", name, plan.dtype, device, case.dims)
            for candidate in candidates:
                check = partial(_check_candidate, candidate, op, case, device.torch_device)
                yield Trial(candidate, request, label, candidate.judge(request), check)
    except FOREIGN_ERRORS as error:
        fault = Fault.raised("import", f"op {name!r}", error)
        request = Request("kernel", name, device.platform, device.capability)
        reference = registry.candidates("kernel", name)[0]
        yield Trial(reference, request, label, Verdict.accept(), lambda: [fault])


def _eligible(candidates: list[Candidate], device: Device, distribution: str) -> list[Candidate]:
    """Return the candidates of the distribution that are for the device's platform or for any."""
    return [
        candidate
        for candidate in candidates
        if getattr(candidate.record, "platform", "") in ("", device.platform)
        and distribution in ("", candidate.provider)
    ]


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
    candidate: Candidate, op: CustomOp[..., Any], case: Case, device: str
) -> list[Fault]:
    record = candidate.record
    if not isinstance(record, Kernel):
        return check_kernel(op, op.reference, case, device=device)
    function = load_target(record.target)
    prepare = load_target(record.prepare) if record.prepare else None
    return check_kernel(op, function, case, prepare=prepare, device=device)


def _check_backend(candidate: Candidate, spec: AttentionSpec, site: Site, seed: int) -> list[Fault]:
    assert isinstance(candidate.record, AttentionEntry)
    return check_attention(load_target(candidate.record.target), spec, site, seed)
