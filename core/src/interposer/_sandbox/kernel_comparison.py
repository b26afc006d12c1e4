"""The numerics check of one kernel: its results against those of the op's reference."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from interposer._contract.capability import Capability
from interposer._contract.errors import FOREIGN_ERRORS, RecordError, described
from interposer._contract.op import Case, CustomOp
from interposer._contract.records import Kernel, load_target
from interposer._contract.request import Request
from interposer._contract.verdict import Verdict
from interposer._sandbox.inspection import check_plugin, load_all, load_value
from interposer._sandbox.side_effects import Witness
from interposer._sandbox.task import Finding, Reporter, Task

# The conformance kit stands above the core, so it is named here and imported when it is needed.
_CHECK = "interposer_testing:check_kernel"
_CASES = "interposer_testing.cases:planned_cases"
_MOST_CASES = 8
_MOST_FAULTS = 3
_NUM_TOKENS = 3
_SEED = 0
# The reference computes in float64, and every operand is guarded by copies.
_MOST_WEIGHT_ELEMENTS = 1 << 24
# A kernel may be compiled when it is first called.
_PATIENCE = 12.0


def examine_kernel(task: Task, reporter: Reporter) -> Finding:
    """Return the finding on a task ``kernel``; what the plugin's code raises is passed on."""
    reporter.unmute()
    arguments = task.arguments
    reporter.begin(f"loading the op {arguments['op']}")
    op: CustomOp[..., Any] = load_target(arguments["op"])
    op = op.allowing(arguments.get("extra_roundings", 0))
    try:
        check_kernel, planned_cases = load_target(_CHECK), load_target(_CASES)
    except ModuleNotFoundError as error:
        return Finding.refused(
            f"cannot be compared with the reference of {op.name!r}: {error}. "
            "Try: pip install interposer-testing, or Config(canary='off')",
            missing=error.name or "",
        )
    dtype: torch.dtype = getattr(torch, arguments["dtype"])
    # Before the kernel is there, which may change what reading the record relies on.
    judge = _judge(task, reporter)
    targets = [arguments["target"], *filter(None, [arguments.get("prepare")])]
    loaded, refusal = load_all(targets, reporter)
    if refusal:
        return refusal
    function, prepare = loaded[0], loaded[1] if len(loaded) > 1 else None
    # On the CPU wherever the caller builds its model: a model may be planned without memory.
    with Witness(light=False, alone=reporter.alone) as witness, torch.device("cpu"):
        faults: list[str] = []
        trace = ""
        count = 0
        planned = planned_cases(op, _SEED, quick=True)
        for case in _cases(op, dtype, arguments["dims"], planned, judge, reporter):
            reporter.begin(f"running {arguments['target']} on case {case.label!r}", _PATIENCE)
            try:
                found = check_kernel(
                    op, function, case, prepare=prepare, device=arguments["device"]
                )
                faults += [f"on case {case.label!r}, {fault}" for fault in found]
            except FOREIGN_ERRORS as error:
                trace = trace or traceback.format_exc()
                faults.append(f"on case {case.label!r} it raised {described(error)}")
            count += 1
            if len(faults) >= _MOST_FAULTS:
                break
    if faults:
        shown = "; ".join(faults[:_MOST_FAULTS])
        return Finding.refused(f"departs from the reference of {op.name!r}: {shown}", trace)
    if witness.effects:
        return Finding.refused(f"running {arguments['target']} {', '.join(witness.effects)}")
    if not count:
        return Finding(Verdict.accept(f"no case of {op.name!r} is one that it takes"))
    return Finding(Verdict.accept(f"agrees with the reference of {op.name!r} on {count} case(s)"))


def _cases(
    op: CustomOp[..., Any],
    dtype: torch.dtype,
    dims: Mapping[str, Any],
    planned: Iterable[Any],
    judge: Callable[[Mapping[str, Any]], Verdict],
    reporter: Reporter,
) -> Iterator[Case]:
    """Yield the op's smallest cases that the kernel takes, then one of the request's own size."""
    reporter.begin(f"preparing cases of the op {op.name!r}", _PATIENCE)
    built = (plan.build() for plan in planned if plan.dtype == dtype)
    cases = sorted((case for case in built if judge(case.dims)), key=_size)
    yield from cases[:_MOST_CASES]
    if op.sample is not None and _weight_elements(dims) <= _MOST_WEIGHT_ELEMENTS:
        reporter.begin(f"preparing a sample of the op {op.name!r}", _PATIENCE)
        yield op.sample(dtype, dims, _NUM_TOKENS, _SEED)


def _weight_elements(dims: Mapping[str, Any]) -> int:
    """Return how large a weight the dims can mean: that of the two largest of them."""
    sizes = sorted(size for size in dims.values() if type(size) is int)
    return math.prod(sizes[-2:])


def _judge(task: Task, reporter: Reporter) -> Callable[[Mapping[str, Any]], Verdict]:
    """Return a judge of a case's dims, by the requirements and predicate of the kernel's record.

    Without a record only the dims of the request itself are known to be accepted.
    """
    arguments = task.arguments
    stated = dict(arguments["dims"])
    if not arguments.get("plugin"):
        return lambda dims: (
            Verdict.accept() if dims == stated else Verdict.refuse("it may not take these dims")
        )
    record = _record(task, reporter)
    predicate = load_target(record.predicate) if record.predicate else None
    capability = Capability.from_json(arguments["capability"])
    request = Request("kernel", record.op, arguments["platform"], capability)

    def judge(dims: Mapping[str, Any]) -> Verdict:
        asked = replace(request, dtype=arguments["dtype"], dims=dims)
        verdict = record.requires.judge(asked)
        if verdict and predicate is not None:
            reporter.begin(f"asking {record.predicate}")
            verdict = predicate(asked)
        return verdict

    return judge


def _record(task: Task, reporter: Reporter) -> Kernel:
    value, name = str(task.arguments["plugin"]), task.arguments["kernel"]
    reporter.begin(f"importing {value}")
    plugin = load_value(value)
    records, faults = check_plugin(plugin, value, in_code=False, reporter=reporter)
    target = task.arguments["target"]
    for record in records:
        if isinstance(record, Kernel) and (record.name, record.target) == (name, target):
            return record
    raise RecordError("; ".join(faults) or f"{value!r} declares no kernel {name!r} at {target!r}")


def _size(case: Case) -> int:
    values = case.arguments.values()
    return sum(value.numel() for value in values if isinstance(value, torch.Tensor))
