"""The tasks of an examination, step by step; the same in a fork and in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from operator import attrgetter
from typing import Any

import pluggy

from interposer import hookspecs
from interposer._config.config import variables
from interposer._contract.capability import Capability
from interposer._contract.errors import RecordError, foreign_errors
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

# The conformance kit stands above the core, so it is named here and imported when it is needed.
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
    # What most platforms and layers import; where the process has it, no fork imports it again.
    slow_modules=(
        *("torch", "torch.utils._device", "interposer._contract.attention"),
        *("interposer._contract.layer", "interposer._contract.platform"),
        *("interposer._contract.quantization", "interposer._selection.resolver"),
    ),
)

Arguments = Mapping[str, Any]


def perform(task: Task) -> Finding:
    """Do a task in this process and return what was found.

    What the code under examination raises becomes a refusal; a crash or a hang does not.
    """
    return run_here(FUNCTIONS[task.name], task.arguments)


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
    with _watch(value, reporter) as side_effects:
        records = declared_records(manager, name)
    if side_effects.effects:
        return (), [f"calling interposer_records {effect}" for effect in side_effects.effects]
    reporter.begin("checking its records")
    faults = check_records(records)
    return (() if faults else tuple(records)), faults


def examine_plugin(arguments: Arguments, reporter: Reporter) -> Finding:
    """Import a plugin, take its records and check them and what they name."""
    value, name = str(arguments["value"]), str(arguments["name"])
    stage = f"importing {value.partition(':')[0].strip()}"
    plugin = reporter.run(stage, _watch(value, reporter), load_value, value)
    records, faults = check_plugin(plugin, name, value, reporter=reporter)
    if faults:
        return Finding.refuse("; ".join(faults))
    platforms = [record for record in records if isinstance(record, PlatformEntry)]
    reporter.note(platforms=[{"name": entry.name, "score": entry.score} for entry in platforms])
    reporter.unmute()
    watch = _watch(value, reporter, light=False)
    faults = reporter.run(
        "checking its classes", watch, check_classes, records, load_target, reporter.begin
    )
    return Finding.refuse("; ".join(faults)) if faults else Finding.accept()


def examine_targets(arguments: Arguments, reporter: Reporter) -> Finding:
    """Load import strings."""
    _load(arguments["targets"], reporter)
    return Finding.accept()


def examine_platform(arguments: Arguments, reporter: Reporter) -> Finding:
    """Probe with a platform, and list its devices if it is there."""
    target = str(arguments["target"])
    (platform,) = _load([target], reporter)
    watch = _watch(target, reporter, light=False)
    if _verdict(reporter, f"probing {target}", watch, lambda: platform.probe()):
        reporter.begin(f"listing the devices of {target}")
        try:
            platform().devices()
        except foreign_errors():  # it is met again, and told of, by whoever chooses it
            pass
    return Finding.accept()


def examine_predicate(arguments: Arguments, reporter: Reporter) -> Finding:
    """Ask once, so that what never comes back is found; the answer itself is not kept."""
    target, member = str(arguments["target"]), str(arguments["member"])
    (loaded,) = _load([target], reporter)
    asked = getattr(loaded, member) if member else loaded
    request = read_request(arguments["request"])
    given = (request,) if request.detail is None else (request.detail, request.capability)
    watch = _watch(target, reporter, light=False, calls=True)
    _verdict(reporter, f"asking {target}", watch, asked, *given)
    return Finding.accept()


def examine_model(arguments: Arguments, reporter: Reporter) -> Finding:
    """Parse a config once, so that what never comes back is found."""
    target = str(arguments["target"])
    (family,) = _load([target], reporter)
    reporter.begin(f"parsing a config.json by {target}")
    try:
        family.parse(arguments["config"], "config.json")
    except foreign_errors():  # it is met again, and told of, by whoever chooses it
        pass
    return Finding.accept()


def examine_kernel(arguments: Arguments, reporter: Reporter) -> Finding:
    """Compare a kernel with the reference of its op on cases that it takes."""
    reporter.unmute()
    target = str(arguments["target"])
    reporter.begin(f"loading the op {arguments['op']}")
    op = load_target(arguments["op"]).allowing(arguments.get("extra_roundings", 0))
    try:
        compare = load_target(f"{COMPARISON}:compare")
    except ModuleNotFoundError as error:
        return Finding.refuse(
            f"cannot be compared with the reference of {op.name!r}: {error}. "
            "Try: pip install interposer-testing, or Config(canary='off')",
            missing=error.name or "",
        )
    # Before the kernel is there, which may change what reading the record relies on.
    takes = _acceptance(arguments, reporter)
    function, *prepare = _load([target, *filter(None, [arguments.get("prepare")])], reporter)
    with _watch(target, reporter, light=False, calls=True) as side_effects:
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
        return Finding.refuse(reason, compared.traceback)
    if side_effects.effects:
        return Finding.refuse(f"running {target} {', '.join(side_effects.effects)}")
    if not compared.num_cases:
        return Finding.accept(f"no case of {op.name!r} is one that it takes")
    num_cases = compared.num_cases
    return Finding.accept(f"agrees with the reference of {op.name!r} on {num_cases} case(s)")


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


def read_request(value: Mapping[str, Any]) -> Request:
    """Return the request that ``Request.to_json`` was called on."""
    capability, detail = Capability.from_json(value["capability"]), value["detail"]
    if detail is not None:
        # Imported here, as it needs torch, which few requests do.
        from interposer._contract.attention import AttentionSpec

        detail = AttentionSpec.from_json(detail)
    return Request(**{**value, "capability": capability, "detail": detail})


def _load(targets: Iterable[str], reporter: Reporter) -> list[Any]:
    """Return what import strings name, each loaded as a stage of its own."""
    reporter.unmute()  # a plugin's module alone has no reason to print
    loaded = []
    for target in targets:
        if is_loaded(target):  # a watch sees nothing, and takes longer than to look it up
            loaded.append(load_target(target))
            continue
        watch = _watch(target, reporter, light=False)
        loaded.append(reporter.run(f"loading {target}", watch, load_target, target))
    return loaded


def _watch(
    value: str, reporter: Reporter, *, light: bool = True, calls: bool = False
) -> SideEffects:
    """Return the watch over code of what an import string or an entry point names."""
    package = value.partition(":")[0].partition(".")[0].strip()
    return SideEffects(HOST, light=light, alone=reporter.alone, package=package, calls=calls)


def _verdict(
    reporter: Reporter, stage: str, watch: SideEffects, action: Callable[..., Any], *given: Any
) -> Verdict:
    """Return the verdict of a stage.

    Raises: RefusedError: it did something beside its work, or returned something else.
    """
    returned = reporter.run(stage, watch, action, *given)
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
