"""Kernels inside the layers of a host: an engine of others that computes by what is chosen here.

A host is announced by an entry point in ``GROUP``, whose value is a subclass of ``Host``. The cases
and the bounds are those of the ops, so that nothing is expected of a host that is not of a kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from interposer import Candidate, CustomOp, Device, Registry, Request, Verdict, use
from interposer.errors import ConfigError, UnknownNameError, described, foreign_errors
from interposer.records import Kernel, load_target
from interposer.tooling import entry_points
from interposer_testing._checks.call import Subject
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.kernel import check_subject
from interposer_testing._trials.conformance import Latest, eligible, kernel_request
from interposer_testing._trials.trial import Trial
from interposer_testing.cases._space import PlannedCase, planned_cases

GROUP = "interposer.hosts"


class Host(ABC):
    """An engine of others whose layers hold kernels that are chosen here."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Name and version of the engine, such as ``"acme 2.1"``."""

    @abstractmethod
    def layers(self, op: str) -> tuple[str, ...]:
        """Return the names of its layers that compute ``op``; none where kernels have no place."""

    @abstractmethod
    def compute(self, layer: str, op: str, arguments: Mapping[str, Any]) -> Any:
        """Return the result of ``op`` by a layer that is built for it.

        The layer has to bind its kernel by the configuration in force, which pins one.

        Args:
            layer: one of ``layers(op)``.
            arguments: those of the op by name, on the device of the trial.
        Raises: InterposerError: the layer kept its own kernel; the text says why.
        """


def find_host(name: str) -> Host:
    """Return the installed host of this name.

    Raises:
        UnknownNameError: no distribution announces it.
        ConfigError: its class cannot be loaded, or fails.
    """
    points = {point.name: point for point in entry_points(GROUP)}
    if name not in points:
        hint = f"A distribution announces one by an entry point in {GROUP!r}; is it installed?"
        raise UnknownNameError("host", name, points, hint)
    try:
        found = points[name].load()()
    except foreign_errors() as error:
        raise ConfigError(f"The host {name!r} cannot be used: {described(error)}") from error
    if not isinstance(found, Host):
        raise ConfigError(
            f"The host {name!r} is {points[name].value}, which is no subclass of "
            "interposer_testing.Host"
        )
    return found


def host_trials(
    registry: Registry,
    device: Device,
    host: Host,
    *,
    distribution: str = "",
    op: str = "",
    seed: int = 0,
    quick: bool = False,
) -> Iterator[Trial]:
    """Yield the trials of kernels in every layer of ``host`` that computes their op.

    Args: those of ``conformance``.
    """
    for name in [op] if op else registry.ops:
        candidates = eligible(registry, registry.candidates("kernel", name), device, distribution)
        if not candidates:
            continue
        layers = host.layers(name)
        if not layers:
            request = Request("kernel", name, device.platform, device.capability)
            reason = f"no layer of {host.version} computes {name} by a kernel that is chosen here"
            for candidate in candidates:
                yield Trial(candidate, request, "cases", Verdict.accept(), list, not_run=reason)
            continue
        found: CustomOp[..., Any] = load_target(registry.ops[name].target)
        latest = Latest()
        for plan in planned_cases(found, seed, quick=quick):
            case = latest.built(plan)
            request = kernel_request(name, plan.dtype, device, case.dims)
            for candidate in candidates:
                verdict = candidate.judge(request)
                for layer in layers:
                    check = partial(_check, host, layer, candidate, found, latest, plan, device)
                    yield Trial(candidate, request, f"{layer}: {plan.label}", verdict, check)


def _check(
    host: Host,
    layer: str,
    candidate: Candidate,
    op: CustomOp[..., Any],
    latest: Latest,
    plan: PlannedCase,
    device: Device,
) -> list[Fault]:
    def compute(*arguments: Any) -> Any:
        # What was measured or compared on this host must not choose another kernel.
        pinned = {op.name: candidate.qualified_name}
        with use(kernels=pinned, canary="off", tables=False):
            given = op.signature.bind(*arguments).arguments
            return host.compute(layer, op.name, given)

    record = candidate.record
    extra = record.extra_roundings if isinstance(record, Kernel) else 0
    subject = Subject(op.allowing(extra), compute, device=device.torch_device)
    return check_subject(subject, latest.built(plan), partial(latest.expected, op, plan))
