"""The check of records for devices that are only described; runs no kernel.

Every object that a record names is imported and checked. The requirements of the record are then
judged for every described device, with the dims of the op's own test cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from interposer import Capability, Registry, Request, Verdict
from interposer.errors import InterposerError, described, foreign_errors, nearest_first
from interposer.records import (
    AttentionEntry,
    DeviceEntry,
    Kernel,
    LayerEntry,
    PlatformEntry,
    Record,
    load_target,
    resource_path,
)
from interposer.tooling import Plugin, acceptance_of
from interposer_testing._checks.attention_specs import attention_specs
from interposer_testing._checks.record import check_record
from interposer_testing._plan.plan_report import PlannedRecord, PlanReport
from interposer_testing._plan.vocabulary import Lookups, Vocabulary, watched
from interposer_testing._trials.outcome import Scope
from interposer_testing._trials.verification import known_scope
from interposer_testing.cases._space import planned_cases
from interposer_testing.described import DeviceDescription

Devices = dict[str, DeviceDescription]
Judged = Kernel | LayerEntry | AttentionEntry

# Enough cases per dtype to contain every dim, with values that most kernels accept.
_MAX_CASES = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def plan(distribution: str, registry: Registry, op: str = "") -> PlanReport:
    """Check the records of a distribution without running a kernel.

    Args:
        op: check only records for this op.
    Raises: the exceptions of ``verify``.
    """
    scope = known_scope(registry, Scope(distribution, op))
    devices = _devices(registry)
    vocabulary = Vocabulary.of(devices.values())
    plugins = [p for p in registry.plugins.loaded if p.distribution == scope.distribution]
    planner = _Planner(registry, devices, vocabulary)
    records = [
        planner.plan(plugin, record)
        for plugin in plugins
        for record in plugin.records
        if not op or (isinstance(record, Kernel) and record.op == op)
    ]
    return PlanReport(scope.distribution, plugins[0].version, tuple(devices), tuple(records))


def _devices(registry: Registry) -> Devices:
    """Read all device descriptions that are readable."""
    devices: Devices = {}
    for _, entry in registry.records(DeviceEntry):
        try:
            devices[entry.name] = DeviceDescription.read(resource_path(entry.resource))
        except InterposerError:
            continue  # reported as a fault of the record
    return devices


class _Planner:
    """Checks records for described devices, without running a kernel."""

    def __init__(self, registry: Registry, devices: Devices, vocabulary: Vocabulary) -> None:
        self._registry = registry
        self._devices = devices
        self._vocabulary = vocabulary
        self._requests_by_op: dict[str, list[Request] | str] = {}

    def plan(self, plugin: Plugin, record: Record) -> PlannedRecord:
        subject = next(
            (
                str(getattr(record, label))
                for label in ("op", "layer_id", "method", "suffix")
                if hasattr(record, label)
            ),
            "",
        )
        platform = getattr(record, "platform", "")
        result = PlannedRecord(type(record).__name__, subject, record.name, platform)
        missing = _missing_module(plugin, record)
        if missing:
            return replace(result, unresolved=missing)
        if isinstance(record, PlatformEntry):
            return result  # further checks would probe this machine
        faults = [
            f"{fault.where}: {fault.reason}" for fault in check_record(record, self._registry)
        ]
        if not isinstance(record, Judged):
            return replace(result, faults=tuple(faults))
        if faults:
            return replace(result, faults=tuple(faults))
        undescribed = [*self._vocabulary.undescribed(record.requires)]
        planned = self._judge(result, record)
        if not undescribed or planned.faults:
            return planned
        # The record may be for hardware without a description: judge its other requirements.
        described = replace(record, requires=self._vocabulary.described_part(record.requires))
        judged = self._judge(result, described)
        note = f"not coherent with any description: needs {', '.join(undescribed)}"
        if judged.fits and judged.fits != planned.fits:
            note += f"; its other requirements fit {', '.join(judged.fits)}"
        return replace(planned, notes=(note,), faults=judged.faults)

    def _judge(self, result: PlannedRecord, record: Judged) -> PlannedRecord:
        """Judge the requirements of a record for every described device."""
        requests = self._requests(record)
        if isinstance(requests, str):
            return replace(result, faults=(requests,))
        faults = [*_unknown_dims(record, requests)]
        fits, refusals = [], []
        lookups = Lookups()
        for name, device in self._devices.items():
            if record.platform not in self._registry.runs(device.platform):
                continue
            capability = watched(device.device().capability, lookups)
            judge = acceptance_of(record, runs=self._registry.runs)
            verdict = _judge(record, judge, requests, device, capability)
            if verdict.traceback:
                error = verdict.traceback.strip().splitlines()[-1]
                faults.append(f"on {name}: {verdict.reason}: {error}")
            elif verdict:
                fits.append(name)
            else:
                refusals.append((name, verdict.reason))
        if refusals and not fits:
            # If some device fits, an unknown name may be one of several alternatives.
            faults += self._vocabulary.misspelt(
                lookups.features - record.requires.features, lookups.formats
            )
        return replace(
            result, faults=tuple(dict.fromkeys(faults)), fits=tuple(fits), refusals=tuple(refusals)
        )

    def _requests(self, record: Judged) -> list[Request] | str:
        """Return requests for the record, still without a device, or the text of a fault."""
        if isinstance(record, LayerEntry):
            return [_request("layer", record.layer_id, dtype) for dtype in _DTYPES]
        if isinstance(record, AttentionEntry):
            return [
                replace(_request("attention", spec.type, spec.dtype), dims=spec.dims(), detail=spec)
                for _, spec in attention_specs(page_sizes=record.page_sizes)
            ]
        if record.op not in self._requests_by_op:
            self._requests_by_op[record.op] = self._requests_of_op(record.op)
        return self._requests_by_op[record.op]

    def _requests_of_op(self, name: str) -> list[Request] | str:
        """Return the distinct requests of the op's test cases."""
        op = load_target(self._registry.ops[name].target)
        requests: dict[tuple[object, ...], Request] = {}
        try:
            counts: Counter[torch.dtype] = Counter()
            for planned in planned_cases(op, 0, quick=True):
                counts[planned.dtype] += 1
                if counts[planned.dtype] <= _MAX_CASES:
                    dims = dict(planned.build().dims)
                    request = replace(_request("kernel", name, planned.dtype), dims=dims)
                    requests[(planned.dtype, *sorted(map(str, dims.items())))] = request
        except foreign_errors() as error:
            return f"the cases of the op {name!r} raised {described(error)}"
        return [*requests.values()] or f"the op {name!r} has no cases"


def _request(kind: str, name: str, dtype: torch.dtype) -> Request:
    # ``_judge`` replaces the empty capability by that of a device.
    no_capability = Capability("")
    return Request(kind, name, "", no_capability, str(dtype).removeprefix("torch."))  # type: ignore[arg-type]


def _judge(
    record: Judged,
    judge: Callable[[Request], Verdict],
    requests: list[Request],
    device: DeviceDescription,
    capability: Capability,
) -> Verdict:
    """Accept if the record accepts any request; otherwise return the most helpful refusal."""
    refusals = []
    for request in requests:
        verdict = judge(replace(request, platform=device.platform, capability=capability))
        if verdict or verdict.traceback:
            return verdict
        refusals.append(verdict)
    if record.requires.dtypes and not set(record.requires.dtypes) & set(device.dtypes):
        needed, offered = " or ".join(record.requires.dtypes), " or ".join(device.dtypes)
        return Verdict.refuse(f"needs dtype {needed}, the device runs models in {offered}")
    # Reasons about dtypes come last, because another dtype may be accepted; then prefer short ones.
    return min(refusals, key=lambda verdict: ("dtype" in verdict.reason, len(verdict.reason)))


def _unknown_dims(record: Judged, requests: list[Request]) -> Iterator[str]:
    """Yield a fault for every required dim that no request has: the record refuses everything."""
    if isinstance(record, LayerEntry):
        return
    dims = {name for request in requests for name in request.dims}
    subject = f"the op {record.op!r}" if isinstance(record, Kernel) else "an attention spec"
    for name in record.requires.dims:
        if name not in dims:
            nearest = ", ".join(map(repr, nearest_first(name, dims)[:3])) or "it has no dims"
            yield f"requires the dim {name!r}, which {subject} does not have; nearest: {nearest}"


def _missing_module(plugin: Plugin, record: Record) -> str:
    """Describe the third-party package that a record needs but that is not installed, or ""."""
    plugin_package = plugin.source.value.partition(":")[0].partition(".")[0]
    for label in ("target", "predicate", "prepare", "restore", "cases", "examples"):
        target = getattr(record, label, "")
        if not target:
            continue
        try:
            load_target(target)
        except ModuleNotFoundError as error:
            name = (error.name or "").partition(".")[0]
            if name and name not in (plugin_package, target.partition(".")[0]):
                return f"{label} {target!r} needs the package {name!r}, which is not installed"
        except foreign_errors():
            continue  # ``check_record`` reports this fault
    return ""
