"""The tasks of the sandbox, step by step; the same in the examining process and in this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from operator import attrgetter
from typing import Any

import pluggy

from interposer import hookspecs
from interposer._contract.capability import Capability
from interposer._contract.errors import RecordError, foreign_errors
from interposer._contract.records import Kernel, PlatformEntry, Record, load_target
from interposer._contract.request import Request
from interposer._contract.verdict import Verdict
from interposer_sandbox._side_effects import SideEffects
from interposer_sandbox._task import Finding, Reporter, Task, TaskName, read_request
from interposer._validation.compatibility import check_api, declared_records, register_hooks
from interposer._validation.records import check_classes, check_records

# The conformance kit stands above the core, so it is named here and imported when it is needed.
COMPARISON = "interposer_testing._canary"

Arguments = Mapping[str, Any]


class _RefusedError(Exception):
    """A stage of a task is refused; the text says why."""


def perform(task: Task, reporter: Reporter | None = None) -> Finding:
    """Do a task in this process and return what was found.

    What the code under examination raises becomes a refusal; a crash or a hang does not.
    """
    reporter = reporter or Reporter()
    if task.name != "plugin":  # which has no reason to print while it is imported and asked
        reporter.unmute()
    try:
        finding = Finding(_TASKS[task.name](task.arguments, reporter))
    except _RefusedError as error:
        finding = Finding.refused(str(error))
    except foreign_errors() as error:
        finding = Finding.raised(reporter.stage, error)
    return replace(finding, facts={**reporter.facts, **finding.facts})


def load_value(value: str) -> Any:
    """Return what the value of an entry point names, ``"module"`` or ``"module:attribute"``."""
    module, _, attributes = value.partition("[")[0].partition(":")
    imported = import_module(module.strip())
    return attrgetter(attributes.strip())(imported) if attributes.strip() else imported


def check_plugin(
    plugin: object, name: str, value: str = "", *, reporter: Reporter | None = None
) -> tuple[tuple[Record, ...], list[str]]:
    """Return the records of an imported plugin, and what is wrong with it.

    Checked are the API version, the hooks, what ``interposer_records`` does and returns, and the
    records, without importing what they name. Records are returned only if nothing is wrong.
    What its code raises is passed on.

    Args:
        value: of its entry point; empty for a plugin that was given in code.
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
    with SideEffects(alone=reporter.alone, package=_package(value)) as side_effects:
        records = declared_records(manager, name)
    if side_effects.effects:
        return (), [f"calling interposer_records {effect}" for effect in side_effects.effects]
    reporter.begin("checking its records")
    faults = check_records(records)
    return (() if faults else tuple(records)), faults


def _examine_plugin(arguments: Arguments, reporter: Reporter) -> Verdict:
    value, name = str(arguments["value"]), str(arguments["name"])
    stage = f"importing {value.partition(':')[0].strip()}"
    watch = SideEffects(alone=reporter.alone, package=_package(value))
    plugin = _run(reporter, stage, watch, load_value, value)
    records, faults = check_plugin(plugin, name, value, reporter=reporter)
    if faults:
        return Verdict.refuse("; ".join(faults))
    platforms = [record for record in records if isinstance(record, PlatformEntry)]
    reporter.note(platforms=[{"name": entry.name, "score": entry.score} for entry in platforms])
    reporter.unmute()
    stage = "checking its classes"
    watch = SideEffects(light=False, alone=reporter.alone, package=_package(value))
    faults = _run(reporter, stage, watch, check_classes, records, load_target, reporter.begin)
    return Verdict.refuse("; ".join(faults)) if faults else Verdict.accept()


def _examine_targets(arguments: Arguments, reporter: Reporter) -> Verdict:
    _load(arguments["targets"], reporter)
    return Verdict.accept()


def _examine_platform(arguments: Arguments, reporter: Reporter) -> Verdict:
    target = str(arguments["target"])
    (platform,) = _load([target], reporter)
    watch = SideEffects(light=False, alone=reporter.alone, package=_package(target))
    if _verdict(reporter, f"probing {target}", watch, lambda: platform.probe()):
        reporter.begin(f"listing the devices of {target}")
        # What it raises is met again, and told of, by whoever chooses it.
        try:
            platform().devices()
        except foreign_errors():
            pass
    return Verdict.accept()


def _examine_predicate(arguments: Arguments, reporter: Reporter) -> Verdict:
    """Ask once, so that what never comes back is found; the answer itself is not kept."""
    target, member = str(arguments["target"]), str(arguments["member"])
    (loaded,) = _load([target], reporter)
    asked = getattr(loaded, member) if member else loaded
    request = read_request(arguments["request"])
    given = (request,) if request.detail is None else (request.detail, request.capability)
    _verdict(reporter, f"asking {target}", _calls(target, reporter), asked, *given)
    return Verdict.accept()


def _examine_kernel(arguments: Arguments, reporter: Reporter) -> Verdict:
    target = str(arguments["target"])
    reporter.begin(f"loading the op {arguments['op']}")
    op = load_target(arguments["op"]).allowing(arguments.get("extra_roundings", 0))
    try:
        compare = load_target(f"{COMPARISON}:compare")
    except ModuleNotFoundError as error:
        reporter.note(missing=error.name or "")
        return Verdict.refuse(
            f"cannot be compared with the reference of {op.name!r}: {error}. "
            "Try: pip install interposer-testing, or Config(canary='off')"
        )
    # Before the kernel is there, which may change what reading the record relies on.
    takes = _acceptance(arguments, reporter)
    function, *prepare = _load([target, *filter(None, [arguments.get("prepare")])], reporter)
    with _calls(target, reporter) as side_effects:
        compared = compare(
            op,
            function,
            prepare[0] if prepare else None,
            name=target,
            dtype=arguments["dtype"],
            dims=arguments["dims"],
            device=arguments["device"],
            takes=takes,
            begin=reporter.begin,
            fenced=reporter.alone,  # it is no harm to anybody else if that ends the process
        )
    if compared.faults:
        reason = f"departs from the reference of {op.name!r}: {'; '.join(compared.faults)}"
        return Verdict.refuse(reason, compared.traceback)
    if side_effects.effects:
        return Verdict.refuse(f"running {target} {', '.join(side_effects.effects)}")
    if not compared.num_cases:
        return Verdict.accept(f"no case of {op.name!r} is one that it takes")
    num_cases = compared.num_cases
    return Verdict.accept(f"agrees with the reference of {op.name!r} on {num_cases} case(s)")


def _acceptance(arguments: Arguments, reporter: Reporter) -> Callable[[Arguments], bool]:
    """Return a judge of a case's dims, by the requirements and predicate of the kernel's record.

    Without a record only the dims of the request itself are known to be accepted, whatever a case
    states besides.
    """
    if not arguments.get("plugin"):
        stated = dict(arguments["dims"])
        return lambda dims: stated.items() <= dims.items()
    record = _record(arguments, reporter)
    predicate = load_target(record.predicate) if record.predicate else None
    capability = Capability.from_json(arguments["capability"])
    request = Request(
        "kernel", record.op, arguments["platform"], capability, dtype=arguments["dtype"]
    )

    def takes(dims: Arguments) -> bool:
        asked = replace(request, dims=dims)
        verdict = record.requires.judge(asked)
        if verdict and predicate is not None:
            reporter.begin(f"asking {record.predicate}")
            verdict = predicate(asked)
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


def _load(targets: Iterable[str], reporter: Reporter) -> list[Any]:
    """Return what import strings name, each loaded as a stage of its own."""
    loaded = []
    for target in targets:
        watch = SideEffects(light=False, alone=reporter.alone, package=_package(target))
        loaded.append(_run(reporter, f"loading {target}", watch, load_target, target))
    return loaded


def _calls(target: str, reporter: Reporter) -> SideEffects:
    """Return the watch over calls of what was loaded before."""
    return SideEffects(light=False, alone=reporter.alone, package=_package(target), calls=True)


def _package(value: str) -> str:
    """Return the top-level package of what an import string or an entry point names."""
    return value.partition(":")[0].partition(".")[0].strip()


def _verdict(
    reporter: Reporter, stage: str, watch: SideEffects, action: Callable[..., Any], *given: Any
) -> Verdict:
    """Return the verdict of a stage.

    Raises: _RefusedError: it did something beside its work, or returned something else.
    """
    returned = _run(reporter, stage, watch, action, *given)
    if isinstance(returned, Verdict):
        return returned
    raise _RefusedError(f"{stage} returned {returned!r:.100}, not a Verdict")


def _run(
    reporter: Reporter, stage: str, watch: SideEffects, action: Callable[..., Any], *given: Any
) -> Any:
    """Return what ``action`` returns, as a stage of a task; what it raises is passed on.

    Raises: _RefusedError: it did something beside its work.
    """
    reporter.begin(stage)
    with watch:
        returned = action(*given)
    if watch.effects:
        raise _RefusedError("; ".join(f"{stage} {effect}" for effect in watch.effects))
    return returned


_TASKS: dict[TaskName, Callable[[Arguments, Reporter], Verdict]] = {
    "plugin": _examine_plugin,
    "target": _examine_targets,
    "platform": _examine_platform,
    "predicate": _examine_predicate,
    "kernel": _examine_kernel,
}
