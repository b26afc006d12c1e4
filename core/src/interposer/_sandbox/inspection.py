"""What a task does, step by step; the same in the examining process and in this one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from typing import Any

import pluggy

from interposer import hookspecs
from interposer._contract.errors import FOREIGN_ERRORS
from interposer._contract.records import PlatformEntry, Record, load_target
from interposer._contract.verdict import Verdict
from interposer._sandbox.side_effects import Witness
from interposer._sandbox.task import Finding, Reporter, Task, read_request
from interposer._validation.compatibility import check_api
from interposer._validation.hooks import declared_records, register_hooks
from interposer._validation.records import check_classes, check_records


def load_value(value: str) -> Any:
    """Return what the value of an entry point names, ``"module"`` or ``"module:attribute"``."""
    module, _, attributes = value.partition("[")[0].partition(":")
    imported = import_module(module.strip())
    return attrgetter(attributes.strip())(imported) if attributes.strip() else imported


def check_plugin(
    plugin: object, name: str, *, in_code: bool = True, reporter: Reporter | None = None
) -> tuple[tuple[Record, ...], list[str]]:
    """Return the records of an imported plugin, and what is wrong with it.

    Checked are the API version, the hooks, what ``interposer_records`` does and returns, and the
    records, without importing what they name. Records are returned only if nothing is wrong.
    What its code raises is passed on.
    """
    reporter = reporter or Reporter()
    reporter.begin("reading INTERPOSER_API")
    verdict = check_api(plugin, in_code)
    if not verdict:
        return (), [verdict.reason]
    manager = pluggy.PluginManager("interposer")
    manager.add_hookspecs(hookspecs)
    reporter.begin("reading its hooks")
    faults = register_hooks(manager, plugin, name)
    if faults:
        return (), [f"its hooks are not valid: {'; '.join(faults)}"]
    reporter.begin("calling interposer_records")
    with Witness(alone=reporter.alone) as witness:
        records = declared_records(manager, name)
    if witness.effects:
        return (), [f"calling interposer_records {effect}" for effect in witness.effects]
    reporter.begin("checking its records")
    faults = check_records(records)
    return (() if faults else tuple(records)), faults


def examine_plugin(task: Task, reporter: Reporter) -> Finding:
    """Return the finding on an entry point: its import, hooks, records and classes."""
    value, name = str(task.arguments["value"]), str(task.arguments["name"])
    with _Step(
        reporter, f"importing {value.partition(':')[0].strip()}", Witness(alone=reporter.alone)
    ) as step:
        plugin = load_value(value)
    if step.finding:
        return step.finding
    records, faults = check_plugin(plugin, name, in_code=False, reporter=reporter)
    if faults:
        return Finding.refused("; ".join(faults))
    platforms = [
        {"name": record.name, "score": record.score}
        for record in records
        if isinstance(record, PlatformEntry)
    ]
    reporter.note(platforms=platforms)
    reporter.unmute()
    with _Step(
        reporter, "checking its classes", Witness(light=False, alone=reporter.alone)
    ) as step:
        faults = check_classes(records, load_target, reporter.begin)
    if step.finding:
        return Finding(step.finding.verdict, {**step.finding.facts, "platforms": platforms})
    verdict = Verdict.refuse("; ".join(faults)) if faults else Verdict.accept()
    return Finding(verdict, {"platforms": platforms})


def examine_targets(task: Task, reporter: Reporter) -> Finding:
    """Return the finding on import strings that are loaded one after the other."""
    reporter.unmute()
    return load_all(task.arguments["targets"], reporter)[1] or Finding(Verdict.accept())


def examine_platform(task: Task, reporter: Reporter) -> Finding:
    """Return the finding on a platform class that is loaded and probed."""
    reporter.unmute()
    target = str(task.arguments["target"])
    loaded, refusal = load_all([target], reporter)
    if refusal:
        return refusal
    with _Step(reporter, f"probing {target}", Witness(light=False, alone=reporter.alone)) as step:
        verdict = loaded[0].probe()
    if step.finding:
        return step.finding
    if not isinstance(verdict, Verdict):
        return Finding.refused(f"probing {target} returned {verdict!r:.100}, not a Verdict")
    if verdict:
        reporter.begin(f"listing the devices of {target}")
        # What it raises is met again, and told of, by whoever chooses it.
        with suppress(*FOREIGN_ERRORS):
            loaded[0]().devices()
    return Finding(Verdict.accept())


def examine_predicate(task: Task, reporter: Reporter) -> Finding:
    """Ask once, so that what never comes back is found; a verdict itself is not kept."""
    reporter.unmute()
    target, member = str(task.arguments["target"]), str(task.arguments["member"])
    loaded, refusal = load_all([target], reporter)
    if refusal:
        return refusal
    asked = getattr(loaded[0], member) if member else loaded[0]
    request = read_request(task.arguments["request"])
    given = (request,) if request.detail is None else (request.detail, request.capability)
    with _Step(reporter, f"asking {target}", Witness(light=False, alone=reporter.alone)) as step:
        answer = asked(*given)
    if step.finding:
        return step.finding
    if not isinstance(answer, Verdict):
        return Finding.refused(f"asking {target} returned {answer!r:.100}, not a Verdict")
    return Finding(Verdict.accept())


def load_all(targets: Iterable[str], reporter: Reporter) -> tuple[list[Any], Finding | None]:
    """Return what import strings name, or the refusal of one that fails or has side effects."""
    loaded = []
    for target in targets:
        with _Step(
            reporter, f"loading {target}", Witness(light=False, alone=reporter.alone)
        ) as step:
            loaded.append(load_target(target))
        if step.finding:
            return [], step.finding
    return loaded, None


class _Step:
    """A stage under a witness; ``finding`` is set if it raised or had effects."""

    def __init__(self, reporter: Reporter, stage: str, witness: Witness) -> None:
        reporter.begin(stage)
        self.reporter = reporter
        self.stage = stage
        self.witness = witness
        self.finding: Finding | None = None

    def __enter__(self) -> _Step:
        self.witness.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.witness.__exit__(None, None, None)
        if isinstance(error, FOREIGN_ERRORS):
            self.finding = Finding.raised(self.reporter.stage, error)
        elif error is None and self.witness.effects:
            effects = (f"{self.stage} {effect}" for effect in self.witness.effects)
            self.finding = Finding.refused("; ".join(effects))
        return isinstance(error, FOREIGN_ERRORS)
