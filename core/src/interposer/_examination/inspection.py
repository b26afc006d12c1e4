"""The tasks of an examination, stage by stage, run in a fork or in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pluggy

from interposer import hookspecs
from interposer._config.config import variables
from interposer._contract.capability import Capability
from interposer._contract.errors import RecordError, foreign_errors, install_command
from interposer._contract.records import Kernel, PlatformEntry, Record, load_target
from interposer._contract.request import Request
from interposer._contract.verdict import Verdict
from interposer._examination.task import Task, TaskName
from interposer._validation.compatibility import check_api, declared_records, register_hooks
from interposer._validation.records import check_classes, check_records
from interposer_sandbox import (
    Finding,
    Function,
    Guarded,
    Host,
    RefusedError,
    Reporter,
    SideEffects,
    is_loaded,
    run_here,
)

if TYPE_CHECKING:
    from interposer._contract.op import CustomOp

# The conformance kit depends on the core, so the core names it and imports it only on use.
COMPARISON = "interposer_testing._canary"

HOST = Host(
    environment=variables,
    guarded=Guarded(
        packages=("interposer", "interposer_sandbox"),
        bases=("importlib_metadata", "packaging", "pluggy"),
        classes=("pydantic.main:BaseModel",),
        members=("CustomOp.reference",),
    ),
    modules=(__name__,),
    # Imports of most platforms and layers. Imported once before forking, so that no fork needs to.
    slow_modules=(
        *("torch", "torch.utils._device", "interposer._contract.attention"),
        *("interposer._contract.layer", "interposer._contract.platform"),
        *("interposer._contract.quantization", "interposer._selection.resolver"),
    ),
)

Arguments = Mapping[str, Any]


def perform(task: Task) -> Finding:
    """Run an examination task in this process and return the finding.

    An exception in the examined code becomes a refusal; a crash or a hang affects this process.
    """
    return run_here(FUNCTIONS[task.name], task.arguments)


def load_value(value: str) -> Any:
    """Import the object of an entry point's value, ``"module"`` or ``"module:attribute"``."""
    module, _, attributes = value.partition("[")[0].partition(":")
    imported = import_module(module.strip())
    return attrgetter(attributes.strip())(imported) if attributes.strip() else imported


def check_plugin(
    plugin: object, name: str, value: str = "", *, reporter: Reporter | None = None
) -> tuple[tuple[Record, ...], list[str]]:
    """Return the records and the faults of an imported plugin.

    Checks the API version, the hooks, the behaviour and result of ``interposer_records``, and the
    records, without importing targets. Records are returned only if there is no fault. Exceptions
    in the plugin's code are passed on.

    Args:
        value: of the entry point; empty for a plugin registered in code.
    """
    reporter = reporter or Reporter()
    reporter.begin("reading INTERPOSER_API")
    verdict = check_api(plugin, in_code=not value)
    if not verdict:
        return (), [verdict.reason]
    manager = pluggy.PluginManager("interposer")
    manager.add_hookspecs(hookspecs)
    reporter.begin("reading its hooks")
    faults = register_hooks(manager, plugin, name)
    if faults:
        return (), [f"its hooks are not valid: {'; '.join(faults)}"]
    reporter.begin("calling interposer_records")
    # The records may come from a generator, so the watch covers reading all of them.
    with _watch(value, reporter) as side_effects:
        records = declared_records(manager, name)
    if side_effects.effects:
        return (), [f"calling interposer_records {effect}" for effect in side_effects.effects]
    reporter.begin("checking its records")
    faults = check_records(records)
    return (() if faults else tuple(records)), faults


def examine_plugin(arguments: Arguments, reporter: Reporter) -> Finding:
    """Import a plugin, and check the plugin's records and targets."""
    value, name = str(arguments["value"]), str(arguments["name"])
    stage = f"importing {value.partition(':')[0].strip()}"
    plugin = reporter.run(stage, _watch(value, reporter), load_value, value)
    records, faults = check_plugin(plugin, name, value, reporter=reporter)
    if faults:
        return Finding.refuse("; ".join(faults))
    platforms = [record for record in records if isinstance(record, PlatformEntry)]
    reporter.note(platforms=[{"name": entry.name, "score": entry.score} for entry in platforms])
    reporter.unmute()
    # Classes may import torch and other libraries, which have side effects of their own.
    watch = _watch(value, reporter, light=False)
    faults = reporter.run(
        "checking its classes", watch, check_classes, records, load_target, reporter.begin
    )
    return Finding.refuse("; ".join(faults)) if faults else Finding.accept()


def examine_targets(arguments: Arguments, reporter: Reporter) -> Finding:
    """Import the objects that import strings name, to detect failures and side effects."""
    _load(arguments["targets"], reporter)
    return Finding.accept()


def examine_platform(arguments: Arguments, reporter: Reporter) -> Finding:
    """Call a platform's probe, and list the devices if the probe accepts."""
    target = str(arguments["target"])
    (platform,) = _load([target], reporter)
    watch = _watch(target, reporter, light=False)
    if _verdict(reporter, f"probing {target}", watch, lambda: platform.probe()):
        reporter.begin(f"listing the devices of {target}")
        try:
            platform().devices()
        except foreign_errors():  # raised and reported again when the platform is used
            pass
    return Finding.accept()


def examine_predicate(arguments: Arguments, reporter: Reporter) -> Finding:
    """Call a predicate once to detect a hang; the verdict is not stored."""
    target, member = str(arguments["target"]), str(arguments["member"])
    (loaded,) = _load([target], reporter)
    predicate = getattr(loaded, member) if member else loaded
    request = read_request(arguments["request"])
    predicate_arguments = (
        (request,) if request.detail is None else (request.detail, request.capability)
    )
    watch = _watch(target, reporter, light=False, calls=True)
    _verdict(reporter, f"asking {target}", watch, predicate, *predicate_arguments)
    return Finding.accept()


def examine_model(arguments: Arguments, reporter: Reporter) -> Finding:
    """Parse a config.json once by a model family, to detect a parser that hangs."""
    target = str(arguments["target"])
    (family,) = _load([target], reporter)
    reporter.begin(f"parsing a config.json by {target}")
    try:
        family.parse(arguments["config"], "config.json")
    except foreign_errors():  # raised and reported again when the family is used
        pass
    return Finding.accept()


def examine_kernel(arguments: Arguments, reporter: Reporter) -> Finding:
    """Compare a kernel with the reference of its op on the cases that the kernel accepts.

    In a process of its own, the kernel is loaded and called in a fork, which cannot change the
    comparison. The results of a kernel on an accelerator are in memory that no other process can
    read, so this kernel shares the process.
    """
    reporter.unmute()
    reporter.begin(f"loading the op {arguments['op']}")
    op = load_target(arguments["op"]).allowing(arguments.get("extra_roundings", 0))
    try:
        kit: Any = import_module(COMPARISON)
    except ModuleNotFoundError as error:
        return Finding.refuse(
            f"cannot be compared with the reference of {op.name!r}: {error}. "
            f"Try: {install_command('interposer-testing')}, or Config(canary='off')",
            missing=error.name or "",
        )
    if not (reporter.alone and arguments["device"] == "cpu" and sys.platform == "linux"):

        def compare(*kernel: Any) -> Finding:
            return _compared(kit, op, kit.LocalKernel(*kernel), arguments, reporter)

        return _offer(compare, arguments, reporter)

    def offer(use: Callable[..., object], begin: Callable[[str, float], None]) -> dict[str, Any]:
        def accept(*kernel: Any) -> Finding:
            use(*kernel)
            return Finding.accept()

        return run_here(partial(_offer, accept), arguments, _Relay(begin)).to_json()

    forked = kit.ForkedKernel(offer, fork=reporter.fork, join=reporter.join, begin=reporter.begin)
    try:
        with forked as kernel:
            if (refusal := kernel.load()) is not None:
                return Finding.from_json(refusal)
            finding = _compared(kit, op, kernel, arguments, reporter)
            if not finding:
                return finding
            ending = Finding.from_json(kernel.end())
            return finding if ending else ending
    except kit.ProcessEndedError as error:
        return Finding.refuse(f"{error} while {reporter.stage}")


class _Relay(Reporter):
    """Passes the stages of a fork on to the process that can report."""

    alone = True

    def __init__(self, relay: Callable[[str, float], None]) -> None:
        super().__init__()
        self._relay = relay

    def begin(self, stage: str, patience: float = 1.0) -> None:
        super().begin(stage)
        self._relay(stage, patience)


def _offer(use: Callable[..., Finding], arguments: Arguments, reporter: Reporter) -> Finding:
    """Load a kernel with its ``prepare`` and predicate, and return the finding of ``use`` for them.

    Returns: the finding of ``use``, or a refusal if the code changes the process.
    """
    target = str(arguments["target"])
    # Read the record before loading the kernel, whose code might tamper with the record.
    takes = _acceptance(arguments, reporter)
    function, *prepare = _load([target, *filter(None, [arguments.get("prepare")])], reporter)
    with _watch(target, reporter, light=False, calls=True) as side_effects:
        finding = use(function, prepare[0] if prepare else None, takes)
    if finding and side_effects.effects:
        return Finding.refuse(f"running {target} {', '.join(side_effects.effects)}")
    return finding


def _compared(
    kit: Any, op: CustomOp[..., Any], kernel: Any, arguments: Arguments, reporter: Reporter
) -> Finding:
    """Compare a kernel with the reference, and describe the result."""
    comparison = kit.compare(
        op,
        kernel,
        name=str(arguments["target"]),
        dtype=arguments["dtype"],
        dims=arguments["dims"],
        device=arguments["device"],
        begin=reporter.begin,
        fenced=reporter.alone,  # in a fork, a fenced memory access may end the process
    )
    if comparison.faults:
        reason = f"departs from the reference of {op.name!r}: {'; '.join(comparison.faults)}"
        return Finding.refuse(reason, comparison.traceback)
    if not comparison.num_cases:
        return Finding.accept(f"accepts no test case of {op.name!r}; not compared")
    num_cases = comparison.num_cases
    return Finding.accept(f"agrees with the reference of {op.name!r} on {num_cases} case(s)")


def _acceptance(arguments: Arguments, reporter: Reporter) -> Callable[[Arguments], bool]:
    """Return a function that judges a case's dims by the kernel's requirements and predicate.

    Without a record, only cases that contain the request's dims are accepted.
    """
    if not arguments.get("plugin"):
        request_dims = dict(arguments["dims"])
        return lambda dims: request_dims.items() <= dims.items()
    record = _record(arguments, reporter)
    predicate = load_target(record.predicate) if record.predicate else None
    capability = Capability.from_json(arguments["capability"])
    request = Request(
        "kernel", record.op, arguments["platform"], capability, dtype=arguments["dtype"]
    )

    def takes(dims: Arguments) -> bool:
        case_request = replace(request, dims=dims)
        verdict = record.requires.judge(case_request)
        if verdict and predicate is not None:
            reporter.begin(f"asking {record.predicate}")
            verdict = predicate(case_request)
        return bool(verdict)

    return takes


def _record(arguments: Arguments, reporter: Reporter) -> Kernel:
    value, name, target = str(arguments["plugin"]), arguments["kernel"], arguments["target"]
    reporter.begin(f"importing {value}")
    plugin = load_value(value)
    records, faults = check_plugin(plugin, value, value, reporter=reporter)
    for record in records:
        if isinstance(record, Kernel) and (record.name, record.target) == (name, target):
            return record
    raise RecordError("; ".join(faults) or f"{value!r} declares no kernel {name!r} at {target!r}")


def read_request(value: Mapping[str, Any]) -> Request:
    """Restore a request from the values of ``Request.to_json``."""
    capability, detail = Capability.from_json(value["capability"]), value["detail"]
    if detail is not None:
        # Imported here because the module imports torch, which few requests need.
        from interposer._contract.attention import AttentionSpec

        detail = AttentionSpec.from_json(detail)
    return Request(**{**value, "capability": capability, "detail": detail})


def _load(targets: Iterable[str], reporter: Reporter) -> list[Any]:
    """Load the objects of import strings, one stage per object."""
    reporter.unmute()  # printing is forbidden only while the plugin's own module is imported
    loaded = []
    for target in targets:
        if is_loaded(target):  # nothing is executed, so a watch would only cost time
            loaded.append(load_target(target))
            continue
        watch = _watch(target, reporter, light=False)
        loaded.append(reporter.run(f"loading {target}", watch, load_target, target))
    return loaded


def _watch(
    value: str, reporter: Reporter, *, light: bool = True, calls: bool = False
) -> SideEffects:
    """Create the detector of side effects for the code of an import string or entry point."""
    package = value.partition(":")[0].partition(".")[0].strip()
    return SideEffects(HOST, light=light, alone=reporter.alone, package=package, calls=calls)


def _verdict(
    reporter: Reporter, stage: str, watch: SideEffects, action: Callable[..., Any], *arguments: Any
) -> Verdict:
    """Run one stage of plugin code; convert the result or the exception to a verdict.

    Raises: RefusedError: the stage had side effects, or returned something else than a verdict.
    """
    returned = reporter.run(stage, watch, action, *arguments)
    if isinstance(returned, Verdict):
        return returned
    raise RefusedError(f"{stage} returned {returned!r:.100}, not a Verdict")


FUNCTIONS: Mapping[TaskName, Function] = {
    "plugin": examine_plugin,
    "target": examine_targets,
    "platform": examine_platform,
    "predicate": examine_predicate,
    "model": examine_model,
    "kernel": examine_kernel,
}
