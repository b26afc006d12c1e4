"""The trials of kernels inside the layers of a host: another engine that uses selected kernels.

A distribution declares a host by an entry point in ``GROUP`` whose value is a subclass of ``Host``.
Cases and error bounds are those of the ops, as in trials without a host.
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
from interposer_testing._trials.conformance import LatestCase, eligible, kernel_request
from interposer_testing._trials.trial import Trial
from interposer_testing.cases._space import PlannedCase, planned_cases

GROUP = "interposer.hosts"


class Host(ABC):
    """Another inference engine, with layers that call the kernels that interposer selects."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Name and version of the engine, such as ``"acme 2.1"``."""

    @abstractmethod
    def layers(self, op: str) -> tuple[str, ...]:
        """Return the names of the engine's layers that compute ``op`` with a selected kernel."""

    @abstractmethod
    def compute(self, layer: str, op: str, arguments: Mapping[str, Any]) -> Any:
        """Build a layer, run ``op`` in the layer and return the result.

        The layer must select the kernel by the current configuration, which pins one kernel.

        Args:
            layer: one of ``layers(op)``.
            arguments: arguments of the op by name, on the device of the trial.
        Raises: InterposerError: the layer used the engine's kernel; the text states the reason.
        """


def find_host(name: str) -> Host:
    """Load the installed host with this name.

    Raises:
        UnknownNameError: no distribution declares the host.
        ConfigError: the class of the host cannot be loaded or created.
    """
    points = {point.name: point for point in entry_points(GROUP)}
    if name not in points:
        hint = f"A distribution declares a host by an entry point in {GROUP!r}. Is it installed?"
        raise UnknownNameError("host", name, points, hint)
    try:
        host = points[name].load()()
    except foreign_errors() as error:
        raise ConfigError(f"The host {name!r} cannot be used: {described(error)}") from error
    if not isinstance(host, Host):
        raise ConfigError(
            f"The host {name!r} is {points[name].value}, which is no subclass of "
            "interposer_testing.Host"
        )
    return host


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
    """Yield the trials of each kernel in every layer of ``host`` that computes the op.

    Args: as for ``conformance``.
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
        custom_op: CustomOp[..., Any] = load_target(registry.ops[name].target)
        latest = LatestCase()
        for plan in planned_cases(custom_op, seed, quick=quick):
            case = latest.build(plan)
            request = kernel_request(name, plan.dtype, device, case.dims)
            for candidate in candidates:
                verdict = candidate.judge(request)
                for layer in layers:
                    check = partial(_check, host, layer, candidate, custom_op, latest, plan, device)
                    yield Trial(candidate, request, f"{layer}: {plan.label}", verdict, check)


def _check(
    host: Host,
    layer: str,
    candidate: Candidate,
    op: CustomOp[..., Any],
    latest: LatestCase,
    plan: PlannedCase,
    device: Device,
) -> list[Fault]:
    def compute(*arguments: Any) -> Any:
        # Neither canary nor measurements may select another kernel.
        pin = {op.name: candidate.qualified_name}
        with use(kernels=pin, canary="off", tables=False):
            return host.compute(layer, op.name, op.signature.bind(*arguments).arguments)

    record = candidate.record
    extra = record.extra_roundings if isinstance(record, Kernel) else 0
    subject = Subject(op.allowing(extra), compute, device=device.torch_device)
    return check_subject(subject, latest.build(plan), partial(latest.expectation, op, plan))
