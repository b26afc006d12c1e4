"""The trials of records, plugin modules and wheels, which have no test cases."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from interposer import Candidate, Device, Registry, Request, Verdict
from interposer.records import (
    AttentionEntry,
    CheckpointEntry,
    CommunicatorEntry,
    DeviceEntry,
    Kernel,
    LayerEntry,
    ModelEntry,
    OpEntry,
    Record,
    SchemeEntry,
)
from interposer.tooling import Plugin
from interposer_testing._checks.lightness import check_lightness
from interposer_testing._checks.record import check_record
from interposer_testing._checks.wheel import check_wheel, wheel_metadata
from interposer_testing._trials.trial import Trial


def declaration_trials(registry: Registry, device: Device, distribution: str) -> Iterator[Trial]:
    """Yield one trial per record, per plugin module and per wheel of the distribution.

    The trials of module and wheel use the first record of the plugin as candidate.
    """
    checked_distributions = set[str]()
    for plugin in registry.plugins.loaded:
        if distribution not in ("", plugin.distribution) or not plugin.records:
            continue
        for record in plugin.records:
            candidate = _candidate(plugin, record, record.name)
            check = partial(check_record, record, registry)
            request, label = _request(record, device), type(record).__name__
            accepted = Verdict.accept()
            yield Trial(
                candidate,
                request,
                label,
                accepted,
                check,
                "records",
                _reason_not_loadable(registry, record, device),
            )
        module = plugin.source.value.partition(":")[0].strip()
        not_run = "" if module else "the plugin was added in code, not from an installed module"
        candidate = _candidate(plugin, plugin.records[0], plugin.name)
        request = Request("platform", "", device.platform, device.capability)
        check = partial(check_lightness, module)
        label = f"module {module or plugin.name}"
        yield Trial(candidate, request, label, Verdict.accept(), check, "lightness", not_run)
        installed = plugin.source.installed
        if installed is not None and plugin.distribution not in checked_distributions:
            checked_distributions.add(plugin.distribution)
            # Several plugins may be in one distribution, which has one wheel.
            wheel = wheel_metadata(plugin.distribution, installed.location)
            not_run = "" if wheel and installed.record else "it was not installed from a wheel"
            if installed.editable:
                not_run = "an editable installation has no wheel of its code"
            check = partial(check_wheel, wheel, installed.record)
            yield Trial(candidate, request, label, Verdict.accept(), check, "wheel", not_run)


def _reason_not_loadable(registry: Registry, record: Record, device: Device) -> str:
    """Return why the code of a record may fail to import on this machine, or ""."""
    platform = getattr(record, "platform", "")
    if isinstance(record, DeviceEntry) or platform in registry.runs(device.platform):
        return ""
    return f"it is for the platform {platform!r}, this is {device.platform!r}"


def _candidate(plugin: Plugin, record: Record, name: str) -> Candidate:
    score = float(getattr(record, "score", 0.0))
    # The registry calls the candidate of an op's reference by this name.
    if isinstance(record, OpEntry):
        name = "reference"
    return Candidate(
        name, plugin.distribution, plugin.version, score, record, lambda _: Verdict.accept()
    )


def _request(record: Record, device: Device) -> Request:
    place = device.platform, device.capability
    match record:
        case Kernel():
            return Request("kernel", record.op, *place)
        case OpEntry():
            return Request("kernel", record.name, *place)
        case LayerEntry():
            return Request("layer", record.layer_id, *place)
        case AttentionEntry():
            return Request("attention", "", *place)
        case SchemeEntry():
            return Request("scheme", record.method)
        case ModelEntry():
            return Request("model", record.architectures[0])
        case CheckpointEntry():
            return Request("checkpoint", record.suffix)
        case CommunicatorEntry():
            return Request("communicator", "", *place)
        case _:
            return Request("platform", "", *place)
