"""The judge: correctness, time, and a rerun after the verdict."""

from __future__ import annotations

import hashlib
import platform as machine
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import importlib_metadata
import torch

from interposer import Case
from interposer_testing._checks.call import Call, CallArguments, Subject, tensors_of
from interposer_testing._checks.expectation import Expectation
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.kernel import check_subject
from interposer_testing._checks.remote_value import RemoteValue
from interposer_testing._judge.clock import BatchClock, Roofline, allocated_like, fill, spread
from interposer_testing._judge.memory import SharedMemory
from interposer_testing._judge.process import KernelError, KernelProcess, ProcessEndedError
from interposer_testing._judge.remote import RemoteFunction, RemoteFunctions
from interposer_testing._judge.task import Solution, Task, Workload
from interposer_testing._judge.verdict import Finding, Stage, State, Tier, Timing, Verdict

Progress = Callable[[str], None]
"""Called with the name of each step."""

_MAX_FINDINGS = 5
_NUM_BATCHES = 15
_MAX_TIMED = 3
_NUM_THREADS = 4
_NUM_CHANGED = 4
_MAX_IDLE_SHARE = 0.2
# A program that uses kernels has loaded these.
_PRODUCTION_MODULES = ("interposer", "interposer_engine")
_RERUN_WORKLOADS = 12
_RERUN_BATCHES = 12
_Style = Literal["plain", "module", "threads"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of judging.

    Attributes:
        correctness_seconds, timing_seconds, rerun_seconds: time after which a stage starts no
            further case.
        rerun_calls: number of calls after the verdict.
        call_seconds: time limit of one request to the process of the kernel.
    """

    correctness_seconds: float = 20.0
    timing_seconds: float = 10.0
    rerun_seconds: float = 10.0
    rerun_calls: int = 120_000
    call_seconds: float = 60.0


QUICK = Budget(5.0, 3.0, 2.0, 10_000)
"""Limits of a quick run."""


def judge(
    task: Task,
    solution: Solution,
    *,
    seed: int | None = None,
    quick: bool = False,
    budget: Budget | None = None,
    progress: Progress | None = None,
    timer: Callable[[], float] = time.perf_counter,
) -> Verdict:
    """Judge whether a solution computes the task, and how fast.

    The solution runs in a process of its own, which has neither the reference nor expected values;
    this process never imports the solution. Inputs are drawn from a secret seed.

    Args:
        seed: seed of all inputs; by default a secret one, which the verdict states.
        quick: judge in a few seconds, with fewer cases and calls.
        budget: limits of time and calls, instead of those of a full or quick run.
        progress: called with the name of each step.
        timer: clock in seconds.

    Raises: ConfigError: this system is not Linux.
    """
    judging = _Judging(
        task,
        solution,
        secrets.randbits(48) if seed is None else seed,
        budget or (QUICK if quick else Budget()),
        progress or (lambda _: None),
        timer,
    )
    tier: Tier = "advisory" if seed is not None else "triage" if quick else "gate"
    start, date = timer(), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    judging.run()
    return Verdict(
        state=judging.state,
        tier=tier,
        task={"name": task.name, "source": task.source, "sha256": task.digest},
        solution={
            "name": solution.name,
            "language": solution.language,
            "sha256": _digest(solution),
        },
        seed=judging.seed,
        findings=tuple(judging.findings),
        largest_error=judging.largest_error,
        timings=tuple(judging.timings),
        num_calls=judging.num_calls,
        num_calls_afterwards=judging.num_calls_afterwards,
        versions={
            "interposer-testing": importlib_metadata.version("interposer-testing"),
            "python": machine.python_version(),
            "torch": torch.__version__,
        },
        device=f"{machine.machine()} with {torch.get_num_threads()} threads",
        date=date,
        seconds=timer() - start,
        output=judging.output,
    )


@dataclass(slots=True)
class _Judging:
    """One run of the judge, with the findings so far."""

    task: Task
    solution: Solution
    seed: int
    budget: Budget
    progress: Progress
    timer: Callable[[], float]
    findings: list[Finding] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    largest_error: float = 0.0
    num_calls: int = 0
    num_calls_afterwards: int = 0
    output: str = ""

    @property
    def state(self) -> State:
        """The verdict from the findings."""
        if not self.findings:
            return "accepted"
        return "impossible" if all(f.check == "floor" for f in self.findings) else "refused"

    def run(self) -> None:
        """Run all stages; stop after the first stage with findings."""
        order = random.Random(self.seed)
        workloads = order.sample(self.task.workloads, len(self.task.workloads))
        with self._process("loading") as process:
            kernel = self._loaded(process, "loading")
            if kernel is not None:
                stages = (self._check, self._check_changes, self._check_threads, self._time)
                for stage in stages:
                    if not self.findings:
                        stage(kernel, workloads)
                self._check_process(kernel, "timing")
            self.num_calls = process.num_calls
            self.output = process.output()
        if self.findings:
            return
        with self._process("rerun") as process:
            kernel = self._loaded(process, "rerun")
            if kernel is not None:
                self._rerun(kernel, workloads[::-1])
                self._check_process(kernel, "rerun")
            self.num_calls_afterwards = process.num_calls
            self.output = process.output()

    def _process(self, stage: Stage) -> KernelProcess:
        return KernelProcess(
            self.solution.sources,
            limit_seconds=self.budget.call_seconds,
            is_shell_child=stage == "rerun",
        )

    def _loaded(self, process: KernelProcess, stage: Stage) -> _Kernel | None:
        """Load the solution; a failure is a finding."""
        self.progress("loading")
        functions, solution = RemoteFunctions(process), self.solution
        try:
            if stage == "rerun":
                process.request("import", modules=_PRODUCTION_MODULES)
            create: dict[str, Any] = {}
            if (module := self.task.module) is not None:
                create = {
                    "create": True,
                    "seed": module.seed,
                    "arguments": functions.encoded(list(module.arguments)),
                    "state": functions.encoded_items(module.tensors),
                }
            function = functions.load(
                name=solution.entry, file=solution.file, language=solution.language, **create
            )
        except (KernelError, ProcessEndedError) as error:
            self._add(stage, "", _fault_of(error, "loading"))
            return None
        return _Kernel(self.task, solution, functions, function)

    def _generator(self, *names: object) -> torch.Generator:
        """Return a generator that depends on the seed and the names."""
        value = random.Random(f"{self.seed} {names}").getrandbits(60)
        return torch.Generator().manual_seed(value)

    def _add(self, stage: Stage, workload: str, *faults: Fault) -> None:
        for fault in faults[: _MAX_FINDINGS - len(self.findings)]:
            self.findings.append(
                Finding(
                    stage,
                    workload,
                    fault.check if fault.where != "process" else "process",
                    fault.where,
                    fault.reason,
                    fault.error,
                    fault.bound,
                )
            )

    def _check(self, kernel: _Kernel, workloads: Sequence[Workload]) -> None:
        """Compare each workload with the reference, in guarded memory."""
        end = self.timer() + self.budget.correctness_seconds
        for number, workload in enumerate(workloads):
            if self.timer() > end:
                break
            self.progress(f"comparing {workload.label}")
            case = workload.case(self._generator("correctness", workload.label))
            faults, error = kernel.faults(case, is_fenced=number % 2 == 0)
            self.largest_error = max(self.largest_error, error)
            self._add("correctness", workload.label, *faults)
            if not (number or faults):
                self._check_idle(kernel)
            if len(self.findings) >= _MAX_FINDINGS or any(f.check == "call" for f in faults):
                break

    def _check_changes(self, kernel: _Kernel, workloads: Sequence[Workload]) -> None:
        """Change some values of the same arguments between calls, and compare again."""
        self.progress("comparing calls with changed arguments")
        for workload in workloads[:_NUM_CHANGED]:
            first, second, third = (
                workload.case(self._generator("changes", number)) for number in range(3)
            )
            if not _num_bytes(first):
                continue
            cases = [first]
            generator = self._generator("changed elements", workload.label)
            for other, how in ((second, "one"), (third, "all"), (second, "last"), (first, "half")):
                cases.append(_changed(cases[-1], other, how, self.task.op.constants, generator))
            self._add("correctness", workload.label, *kernel.departures_of_changes(cases))
            if self.findings:
                return

    def _check_threads(self, kernel: _Kernel, workloads: Sequence[Workload]) -> None:
        """Compare calls that run at the same time."""
        self.progress("comparing calls of several threads")
        workload = min(workloads[:8], key=lambda w: _num_bytes(w.case(self._generator("size"))))
        cases = [
            workload.case(self._generator("threads", number)) for number in range(_NUM_THREADS)
        ]
        self._add("correctness", workload.label, *kernel.departures(cases, style="threads"))

    def _check_idle(self, kernel: _Kernel) -> None:
        """Find threads that work on after a call, and so disturb other measurements."""
        try:
            share = kernel.functions.process.idle_share()
        except ProcessEndedError as error:
            self._add("correctness", "", _fault_of(error, "process"))
            return
        if share > _MAX_IDLE_SHARE:
            reason = f"it uses {share:.0%} of a core after its calls have returned"
            self._add("correctness", "", Fault("call", "process", reason))

    def _check_process(self, kernel: _Kernel, stage: Stage) -> None:
        """Find what the kernel changed in its process, which other code of a program shares."""
        if any(finding.check == "process" for finding in self.findings):
            return
        try:
            changes = kernel.functions.process.request("changes").get("changes")
        except (KernelError, ProcessEndedError) as error:
            self._add(stage, "", _fault_of(error, "process"))
            return
        for change in changes if isinstance(changes, list) else ():
            self._add(stage, "", Fault("call", "process", str(change)[:200]))

    def _time(self, kernel: _Kernel, workloads: Sequence[Workload]) -> None:
        """Time the timed workloads, and compare results of timed calls."""
        timed = [w for w in self.task.workloads if w.timed] or list(workloads[:1])
        roofline = Roofline(self.timer)
        for workload in timed[:_MAX_TIMED]:
            self.progress(f"timing {workload.label}")
            draw = partial(workload.case, self._generator("timing", workload.label))
            seconds, num_calls = [], 0
            clock = BatchClock(kernel.functions, kernel.arguments, self.timer)
            limit = self.budget.timing_seconds / len(timed[:_MAX_TIMED])
            try:
                with kernel.functions.scope():
                    clock.keep_constants(draw(), self.task.op.constants)
                    batches = clock.batches(kernel.function, draw, _NUM_BATCHES, limit)
                    for number, (size, batch) in enumerate(batches):
                        num_calls = size
                        for case, arguments, (call, result) in batch.checked:
                            faults = kernel.compare(case, arguments, kernel.output(call, result))
                            self._add("timing", workload.label, *faults)
                        if number:
                            seconds.append(batch.seconds)
            except (KernelError, ProcessEndedError) as error:
                self._add("timing", workload.label, _fault_of(error, "timed call"))
            if self.findings:
                return
            limits = roofline.of(self.task, draw(), self._generator("roofline"))
            timing = Timing(
                workload.label,
                *spread(seconds),
                len(seconds),
                num_calls,
                limits.roofline,
                limits.floor,
                limits.limit,
            )
            self.timings.append(timing)
            if timing.high < limits.floor:
                reason = (
                    f"a call takes {timing.median * 1e6:.3g} µs, but the {limits.limit} of this "
                    f"machine allows no less than {limits.floor * 1e6:.3g} µs"
                )
                self.findings.append(Finding("timing", workload.label, "floor", "time", reason))

    def _rerun(self, kernel: _Kernel, workloads: Sequence[Workload]) -> None:
        """Run as a program would: other frames, other inputs, other order, and many more calls."""
        end = self.timer() + self.budget.rerun_seconds
        self.progress("running again after the verdict")
        for workload in workloads[:_RERUN_WORKLOADS]:
            case = _varied(workload, self._generator("rerun", workload.label))
            self._add("rerun", workload.label, *kernel.departures_of_copies([case]))
            if self.findings:
                return
        smallest = min(
            workloads[:_RERUN_WORKLOADS], key=lambda w: _num_bytes(w.case(self._generator("size")))
        )
        draw = partial(smallest.case, self._generator("many calls"))
        repeat = -(-self.budget.rerun_calls // (2 * _RERUN_BATCHES))
        if self.task.op.mutates:
            repeat = 1  # a repeated call would get the result of the one before
        while kernel.functions.process.num_calls < self.budget.rerun_calls and self.timer() < end:
            started, cases = self.timer(), [draw(), draw()]
            faults = kernel.departures_of_copies(cases, repeat=repeat)
            self._add("rerun", smallest.label, *faults)
            if self.findings:
                return
            took = self.timer() - started
            # At least six batches fit into the time.
            repeat = max(1, min(repeat, int(repeat * (self.budget.rerun_seconds / 6) / took)))


class _Kernel:
    """A solution that is loaded in its process."""

    def __init__(
        self, task: Task, solution: Solution, functions: RemoteFunctions, function: RemoteValue
    ) -> None:
        self.functions = functions
        self.function = function
        self._task = task
        self._writes_outputs = solution.style == "writes outputs"

    @property
    def _memory(self) -> SharedMemory:
        return self.functions.process.memory

    def faults(self, case: Case, *, is_fenced: bool) -> tuple[list[Fault], float]:
        """Compare two calls with the reference, as ``check_kernel`` does; return the error too."""
        op = self._task.op
        remote = RemoteFunction(self.functions, self.function)
        errors: list[float] = []

        results: list[Any] = []

        def function(*arguments: Any) -> Any:
            call = self._call(arguments)
            results.append(self.output(call, remote(*call[0], **call[1])))
            return results[-1]

        def expect(given: CallArguments) -> Expectation:
            return self._expectation(case, given, results[-1])

        subject = Subject(op, function, allocate=self._memory.allocate)
        try:
            with self.functions.scope():
                faults = check_subject(subject, case, expect, is_fenced)
                if not faults:
                    given = subject.given(case)
                    call = subject.call(given)
                    errors.append(expect(given).largest_error(call))
        except (KernelError, ProcessEndedError) as error:
            return [_fault_of(error, "call")], 0.0
        return faults, max(errors, default=0.0)

    def departures(self, cases: Sequence[Case], *, style: _Style, repeat: int = 1) -> list[Fault]:
        """Compare the values of calls with the reference, without guards."""
        try:
            with self.functions.scope():
                arguments = [
                    {
                        n: _shared(v, self._memory) if isinstance(v, torch.Tensor) else v
                        for n, v in case.arguments.items()
                    }
                    for case in cases
                ]
                calls = [self.arguments(c, a) for c, a in zip(cases, arguments, strict=True)]
                results = self.functions.call(
                    self.function, calls, style=style, repeat=repeat, threads=len(calls)
                )
                return [
                    fault
                    for case, given, call, result in zip(
                        cases, arguments, calls, results, strict=True
                    )
                    for fault in self.compare(case, given, self.output(call, result))
                ]
        except (KernelError, ProcessEndedError) as error:
            return [_fault_of(error, "call")]

    def departures_of_copies(self, cases: Sequence[Case], *, repeat: int = 1) -> list[Fault]:
        """Compare the values of calls on ordinary memory, as a program makes them."""
        names = list(self._task.op.signature.parameters)
        mutated = [names.index(name) for name in self._task.op.mutates]
        num_outputs = 0
        try:
            with self.functions.scope():
                calls = [self.arguments(case, {})[0] for case in cases]
                num_outputs = len(calls[0]) - len(names)
                outputs = range(len(calls[0]) - num_outputs, len(calls[0]))
                results = self.functions.call_with_copies(
                    self.function,
                    calls,
                    arguments=[*mutated, *outputs],
                    style="module",
                    repeat=repeat,
                )
                faults = list[Fault]()
                for case, (result, written) in zip(cases, results, strict=True):
                    given = dict(zip(self._task.op.mutates, written, strict=False))
                    if outputs:
                        result = _joined(written[len(mutated) :])
                    faults += self.compare(case, given, self._arranged(result))
                return faults
        except (KernelError, ProcessEndedError) as error:
            return [_fault_of(error, "call")]

    def departures_of_changes(self, cases: Sequence[Case]) -> list[Fault]:
        """Compare calls on the same argument objects, whose values change from case to case."""
        process = self.functions.process
        try:
            with self.functions.scope():
                shared = {
                    n: _shared(v, self._memory) if isinstance(v, torch.Tensor) else v
                    for n, v in cases[0].arguments.items()
                }
                call = self.arguments(cases[0], shared)
                request = self.functions.requested(self.function, [call])
                process.request("prepare", calls=request["calls"])
                names = list(self._task.op.signature.bind(**cases[0].arguments).arguments)
                for number, case in enumerate(cases):
                    if number == len(cases) - 1:
                        # New objects at the addresses of earlier ones, as allocators create them.
                        with process.stopped():
                            for name, value in shared.items():
                                if isinstance(value, torch.Tensor):
                                    fill(value, case.arguments[name])
                        process.request("prepare", calls=request["calls"])
                    elif number:
                        values = [
                            [names.index(n), self.functions.encoded(v)]
                            for n, v in case.arguments.items()
                            if isinstance(v, torch.Tensor) and n not in self._task.op.constants
                        ]
                        process.request("change", values=values)
                    process.request("run", function=request["function"])
                    reply = process.request("describe", indices=[0])
                    result = self.output(call, self.functions.results(reply, 1)[0])
                    if faults := self.compare(case, shared, result):
                        return faults
            return []
        except (KernelError, ProcessEndedError) as error:
            return [_fault_of(error, "call")]

    def compare(self, case: Case, arguments: Mapping[str, Any], result: Any) -> list[Fault]:
        """Compare form and values of a result with the reference."""
        subject = Subject(self._task.op, self._task.op.reference)
        given = subject.given(case)
        for name in self._task.op.mutates:
            given.operands[name].tensor.copy_(arguments[name])
        return list(self._expectation(case, given, result).departures(Call(given, result)))

    def _expectation(self, case: Case, given: CallArguments, result: Any) -> Expectation:
        """Return the expected result of a case.

        Args:
            result: result of the kernel. Definitions of other projects do not say which strides a
                result has, so those of the kernel are right.
        """
        if self._task.source == "op":
            return Expectation.of(self._task.op, case, given)
        expected = self._task.expect(case)
        actual = tensors_of(result)
        forms = list(expected.forms.values())
        if [t.shape for t in actual] == [form.shape for form in forms]:
            forms = [
                torch.empty_strided(form.shape, tensor.stride(), dtype=form.dtype, device="meta")
                for form, tensor in zip(forms, actual, strict=True)
            ]
        labels = [f"output {number}" for number in range(len(forms))]
        return Expectation(
            self._task.op,
            case,
            _joined(forms),
            "cpu",
            dict(zip(labels, expected.values.values(), strict=True)),
            dict(zip(labels, expected.bounds.values(), strict=True)),
        )

    def _arranged(self, result: Any) -> Any:
        """Return the outputs of a task of another project, which may be named or in a list."""
        if self._task.source == "op":
            return result
        if isinstance(result, dict) and result.keys() == set(self._task.outputs):
            result = [result[name] for name in self._task.outputs]
        return _joined(result) if isinstance(result, list | tuple) and result else result

    def arguments(
        self, case: Case, arguments: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the positional and keyword arguments of a call, in shared memory."""
        return self._call(self._task.op.signature.bind(**{**case.arguments, **arguments}).args)

    def _call(self, arguments: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        if not self._writes_outputs:
            return arguments, {}
        case = Case("", self._task.op.signature.bind(*arguments).arguments)
        forms = self._task.expect(case).forms.values()
        return [*arguments, *(allocated_like(f, self._memory.allocate) for f in forms)], {}

    def output(self, call: tuple[Sequence[Any], Mapping[str, Any]], result: Any) -> Any:
        """Return the result of a call, which may be in the last arguments."""
        if not self._writes_outputs:
            return self._arranged(result)
        return _joined(call[0][len(self._task.op.signature.parameters) :])


def _shared(tensor: torch.Tensor, memory: SharedMemory) -> torch.Tensor:
    shared = allocated_like(tensor, memory.allocate)
    fill(shared, tensor)
    return shared


def _digest(solution: Solution) -> str:
    """Return the SHA-256 of the names and contents of all files, in hexadecimal."""
    digest = hashlib.sha256()
    for name, content in sorted(solution.sources.items()):
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _varied(workload: Workload, generator: torch.Generator) -> Case:
    """Draw a case in which the values that may have any distribution have another one."""
    case = workload.case(generator)
    arguments = dict(case.arguments)
    for name in workload.free:
        exponent = int(torch.randint(-2, 3, (), generator=generator))
        arguments[name] = arguments[name] * 2.0**exponent
    return replace(case, arguments=arguments)


def _joined(outputs: Sequence[Any]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _changed(
    case: Case, other: Case, how: str, constants: Sequence[str], generator: torch.Generator
) -> Case:
    """Return a case in which "one", the "last", "half" or "all" of the values are of another case.

    Arguments of other shapes stay, and so do constants, which no program changes.
    """
    arguments = dict(case.arguments)
    for name, value in case.arguments.items():
        new = other.arguments[name]
        if not isinstance(value, torch.Tensor) or name in constants or not value.numel():
            continue
        if new.shape != value.shape or new.dtype != value.dtype or 0 in value.stride():
            continue
        # Integers, such as indices, are valid only together.
        if how != "all" and not value.is_floating_point():
            continue
        is_changed = torch.zeros(value.numel(), dtype=torch.bool)
        match how:
            case "one":
                is_changed[torch.randint(value.numel(), (), generator=generator)] = True
            case "last":
                is_changed[-1] = True
            case "half":
                is_changed[value.numel() // 2 :] = True
            case _:
                is_changed[:] = True
        mixed = torch.where(is_changed.view(value.shape), new, value)
        arguments[name] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        fill(arguments[name], mixed)
    return replace(case, arguments=arguments)


def _num_bytes(case: Case) -> int:
    tensors = (v for v in case.arguments.values() if isinstance(v, torch.Tensor))
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _fault_of(error: KernelError | ProcessEndedError, where: str) -> Fault:
    if isinstance(error, KernelError):
        return Fault("call", where, f"raised {type(error).__name__}: {error}")
    return Fault("call", "process", str(error))
