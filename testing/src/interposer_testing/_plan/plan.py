"""The check of records on devices that are only described, without running a kernel.

Everything that a record names is imported and looked at. What it needs is judged on every device
that any plugin describes, on the dims of its op's own cases.
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
from interposer_testing._plan.vocabulary import Asked, Vocabulary, watched
from interposer_testing._trials.outcome import Scope
from interposer_testing._trials.verification import known_scope
from interposer_testing.cases._space import planned_cases
from interposer_testing.described import DeviceDescription

Devices = dict[str, DeviceDescription]
Judged = Kernel | LayerEntry | AttentionEntry

# So many cases of each dtype tell which dims are stated, and have values that most kernels take.
_MOST_CASES = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def plan(distribution: str, registry: Registry, op: str = "") -> PlanReport:
    """Return what is to be said of the records of a distribution; no kernel runs.

    Args:
        op: look only at what is declared for this op.
    Raises: see ``verify``.
    """
    scope = known_scope(registry, Scope(distribution, op))
    devices = _devices(registry)
    vocabulary = Vocabulary.of(devices.values())
    plugins = [p for p in registry.plugins.loaded if p.distribution == scope.distribution]
    planner = _Planner(registry, devices, vocabulary)
    records = [
        planner.planned(plugin, record)
        for plugin in plugins
        for record in plugin.records
        if not op or (isinstance(record, Kernel) and record.op == op)
    ]
    return PlanReport(scope.distribution, plugins[0].version, tuple(devices), tuple(records))


def _devices(registry: Registry) -> Devices:
    """Return the readable described devices; an unreadable file is its record's fault."""
    found: Devices = {}
    for _, entry in registry.records(DeviceEntry):
        try:
            found[entry.name] = DeviceDescription.read(resource_path(entry.resource))
        except InterposerError:
            continue
    return found


class _Planner:
    """Looks at records one by one."""

    def __init__(self, registry: Registry, devices: Devices, vocabulary: Vocabulary) -> None:
        self._registry = registry
        self._devices = devices
        self._vocabulary = vocabulary
        self._facts: dict[str, list[Request] | str] = {}

    def planned(self, plugin: Plugin, record: Record) -> PlannedRecord:
        subject = next(
            (
                str(getattr(record, label))
                for label in ("op", "layer_id", "method", "suffix")
                if hasattr(record, label)
            ),
            "",
        )
        platform = getattr(record, "platform", "")
        plain = PlannedRecord(type(record).__name__, subject, record.name, platform)
        missing = _missing_module(plugin, record)
        if missing:
            return replace(plain, unresolved=missing)
        if isinstance(record, PlatformEntry):
            # To look further would probe the machine.
            return plain
        faults = [
            f"{fault.where}: {fault.reason}" for fault in check_record(record, self._registry)
        ]
        if not isinstance(record, Judged):
            return replace(plain, faults=tuple(faults))
        if faults:
            return replace(plain, faults=tuple(faults))
        undescribed = [*self._vocabulary.undescribed(record.requires)]
        found = self._fitted(plain, record)
        if not undescribed or found.faults:
            return found
        # It may be for hardware that nobody describes: what else it needs can still be judged.
        rest = replace(record, requires=self._vocabulary.described_part(record.requires))
        judged = self._fitted(plain, rest)
        note = f"not coherent with any description: needs {', '.join(undescribed)}"
        if judged.fits and judged.fits != found.fits:
            note += f"; by all else that it needs it fits {', '.join(judged.fits)}"
        return replace(found, notes=(note,), faults=judged.faults)

    def _fitted(self, plain: PlannedRecord, record: Judged) -> PlannedRecord:
        requests = self._requests(record)
        if isinstance(requests, str):
            return replace(plain, faults=(requests,))
        faults = [*_unknown_dims(record, requests)]
        fits, refusals = [], []
        asked = Asked()
        for name, device in self._devices.items():
            if record.platform not in self._registry.runs(device.platform):
                continue
            capability = watched(device.device().capability, asked)
            judge = acceptance_of(record, runs=self._registry.runs)
            verdict = _judge(record, judge, requests, device, capability)
            if verdict.traceback:
                last = verdict.traceback.strip().splitlines()[-1]
                faults.append(f"on {name}: {verdict.reason}: {last}")
            elif verdict:
                fits.append(name)
            else:
                refusals.append((name, verdict.reason))
        if refusals and not fits:
            # A name that is one of several alternatives may be of no device that is described.
            faults += self._vocabulary.misspelt(
                asked.features - record.requires.features, asked.formats
            )
        return replace(
            plain, faults=tuple(dict.fromkeys(faults)), fits=tuple(fits), refusals=tuple(refusals)
        )

    def _requests(self, record: Judged) -> list[Request] | str:
        """Return the requests for the record on a device without abilities, or a fault."""
        if isinstance(record, LayerEntry):
            return [_request("layer", record.layer_id, dtype) for dtype in _DTYPES]
        if isinstance(record, AttentionEntry):
            return [
                replace(_request("attention", spec.type, spec.dtype), dims=spec.dims(), detail=spec)
                for _, spec in attention_specs(page_sizes=record.page_sizes)
            ]
        if record.op not in self._facts:
            self._facts[record.op] = self._cases(record.op)
        return self._facts[record.op]

    def _cases(self, name: str) -> list[Request] | str:
        op = load_target(self._registry.ops[name].target)
        found: dict[tuple[object, ...], Request] = {}
        try:
            counts: Counter[torch.dtype] = Counter()
            for planned in planned_cases(op, 0, quick=True):
                counts[planned.dtype] += 1
                if counts[planned.dtype] <= _MOST_CASES:
                    dims = dict(planned.build().dims)
                    request = replace(_request("kernel", name, planned.dtype), dims=dims)
                    found[(planned.dtype, *sorted(map(str, dims.items())))] = request
        except foreign_errors() as error:
            return f"the cases of the op {name!r} raised {described(error)}"
        return [*found.values()] or f"the op {name!r} has no cases"


def _request(kind: str, name: str, dtype: torch.dtype) -> Request:
    # What stands for the device is replaced before anybody is asked.
    nothing = Capability("")
    return Request(kind, name, "", nothing, str(dtype).removeprefix("torch."))  # type: ignore[arg-type]


def _judge(
    record: Judged,
    judge: Callable[[Request], Verdict],
    requests: list[Request],
    device: DeviceDescription,
    capability: Capability,
) -> Verdict:
    """Accept if any request is; else return a refusal, one by the device before one by dims."""
    refusals = []
    for request in requests:
        asked = replace(request, platform=device.platform, capability=capability)
        verdict = judge(asked)
        if verdict or verdict.traceback:
            return verdict
        refusals.append(verdict)
    own = [name for name in record.requires.dtypes if name in device.dtypes]
    if record.requires.dtypes and not own:
        needed, offered = " or ".join(record.requires.dtypes), " or ".join(device.dtypes)
        return Verdict.refuse(f"needs dtype {needed}, the device runs models in {offered}")
    return min(refusals, key=lambda verdict: ("dtype" in verdict.reason, len(verdict.reason)))


def _unknown_dims(record: Judged, requests: list[Request]) -> Iterator[str]:
    """Yield the faults of dims that no request states, so that everything is refused."""
    if isinstance(record, LayerEntry):
        return
    known = {name for request in requests for name in request.dims}
    what = f"the op {record.op!r}" if isinstance(record, Kernel) else "an attention spec"
    for name in record.requires.dims:
        if name not in known:
            nearest = ", ".join(map(repr, nearest_first(name, known)[:3])) or "none is stated"
            yield f"requires the dim {name!r}, which {what} never states; nearest: {nearest}"


def _missing_module(plugin: Plugin, record: Record) -> str:
    """Return the missing foreign package without which a record cannot be imported."""
    own = plugin.source.value.partition(":")[0].partition(".")[0]
    for label in ("target", "predicate", "prepare", "restore", "cases", "examples"):
        target = getattr(record, label, "")
        if not target:
            continue
        try:
            load_target(target)
        except ModuleNotFoundError as error:
            name = (error.name or "").partition(".")[0]
            if name and name not in (own, target.partition(".")[0]):
                return f"{label} {target!r} needs the package {name!r}, which is not installed"
        except foreign_errors():
            continue  # a fault, and found as such
    return ""
