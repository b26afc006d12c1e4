"""The check of a record: every named object can be imported and has the right form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from interposer import CustomOp, Registry, Verdict
from interposer.errors import described, foreign_errors
from interposer.records import (
    AttentionEntry,
    CheckpointEntry,
    DeviceEntry,
    Kernel,
    ModelEntry,
    OpEntry,
    PlatformEntry,
    Record,
    SchemeEntry,
    TuningEntry,
    load_target,
    resource_path,
)
from interposer.tooling import check_classes
from interposer.tuning import read_entries
from interposer_testing._checks.fault import Fault
from interposer_testing.described import DeviceDescription

_TARGETS = ("target", "predicate", "prepare", "restore", "confirm", "cases", "examples")


def check_record(record: Record, registry: Registry) -> list[Fault]:
    """Import the objects that a record names and check their signatures and classes."""
    if isinstance(record, DeviceEntry | TuningEntry):
        return _check_resource(record)
    loaded: dict[str, Any] = {}
    faults: list[Fault] = []
    for label in _TARGETS:
        if target := getattr(record, label, ""):
            try:
                loaded[label] = load_target(target)
            except foreign_errors() as error:
                faults.append(Fault.raised("record", f"{label} {target!r}", error))
    where = f"{type(record).__name__} {record.name!r}"
    faults = faults or [Fault("record", where, reason) for reason in check_classes([record])]
    return faults or [*_check_form(record, loaded, registry)]


def _check_resource(record: DeviceEntry | TuningEntry) -> list[Fault]:
    try:
        path = resource_path(record.resource)
        DeviceDescription.read(path) if isinstance(record, DeviceEntry) else read_entries(path)
    except foreign_errors() as error:
        return [Fault.raised("record", f"resource {record.resource!r}", error)]
    return []


def _check_form(record: Record, loaded: dict[str, Any], registry: Registry) -> Iterator[Fault]:
    match record:
        case Kernel():
            yield from _check_kernel(record, loaded, registry)
        case OpEntry():
            yield from _check_op(record, loaded["target"])
        case PlatformEntry():
            yield from _check_platform(loaded["target"])
        case SchemeEntry():
            yield from _check_constructor(loaded["target"], "parse", "the settings of a checkpoint")
        case ModelEntry():
            yield from _check_constructor(loaded["target"], "parse", "the content of config.json")
        case CheckpointEntry():
            yield from _check_constructor(loaded["target"], "open", "the path of a file")
    if "predicate" in loaded:
        # An attention predicate takes spec and capability, all others take a request.
        num_arguments = 2 if isinstance(record, AttentionEntry) else 1
        yield from _check_call("predicate", loaded["predicate"], *[None] * num_arguments)


def _check_kernel(record: Kernel, loaded: dict[str, Any], registry: Registry) -> Iterator[Fault]:
    if record.op not in registry.ops:
        yield Fault("record", f"op {record.op!r}", "no installed plugin declares it")
        return
    op: CustomOp[..., Any] = load_target(registry.ops[record.op].target)
    yield from _check_call("target", loaded["target"], *op.signature.parameters)
    if "differentiable" in record.properties and not op.differentiable:
        reason = f"the op {record.op!r} declares no gradient, so 'differentiable' promises nothing"
        yield Fault("record", "properties", reason)
    if "prepare" in loaded:
        if not op.constants:
            reason = f"the op {record.op!r} declares no constants, so it is never called"
            yield Fault("record", "prepare", reason)
        constants = dict.fromkeys(op.constants)
        yield from _check_call("prepare", loaded["prepare"], **constants)
        if "restore" in loaded:
            yield from _check_call("restore", loaded["restore"], **constants, into={})
    if "confirm" in loaded:
        yield from _check_call("confirm", loaded["confirm"], None)


def _check_op(record: OpEntry, op: CustomOp[..., Any]) -> Iterator[Fault]:
    if ("differentiable" in record.properties) != bool(op.differentiable):
        reason = "'differentiable' must be promised exactly if the op declares a gradient"
        yield Fault("record", "properties", reason)
    default = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for parameter in op.signature.parameters.values():
        if parameter.kind is not default:
            reason = f"the parameter {parameter.name!r} must be allowed by position and by keyword"
            yield Fault("record", "signature", reason)


def _check_constructor(target: Any, name: str, argument: str) -> Iterator[Fault]:
    if not isinstance(inspect.getattr_static(target, name, None), classmethod | staticmethod):
        yield Fault("record", name, f"it must be a classmethod that takes {argument}")


def _check_platform(platform: Any) -> Iterator[Fault]:
    verdict = platform.probe()
    if not isinstance(verdict, Verdict):
        yield Fault("record", "probe", f"it returned {verdict!r:.100}, not a Verdict")
    elif verdict:
        try:
            platform().devices()
        except foreign_errors() as error:
            yield Fault.raised("record", "devices", error)


def _check_call(label: str, function: Any, *args: Any, **kwargs: Any) -> Iterator[Fault]:
    """Yield a fault if the signature of ``function`` does not accept the arguments."""
    if not callable(function):
        yield Fault("record", label, f"{function!r:.100} is not callable")
        return
    signature = _signature(function)
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        # ``None`` stands for an argument without a name.
        arguments = ", ".join([*map(str, filter(None, args)), *(f"{name}=" for name in kwargs)])
        reason = f"it takes {signature}, but is called with ({arguments}): {described(error)}"
        yield Fault("record", label, reason)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of ``function``; None for compiled code without a signature."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None
