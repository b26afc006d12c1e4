"""The judge: correctness, time, and a rerun after the verdict."""

from __future__ import annotations

import hashlib
import platform as machine
import random
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal

import importlib_metadata
import torch

from interposer import Case, CustomOp
from interposer.errors import ConfigError, install_command
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.training_step import training_step
from interposer_testing._judge.cases import changed, num_bytes, varied
from interposer_testing._judge.clock import BatchClock, Caches, Limits, Roofline, spread
from interposer_testing._judge.kernel import JudgedKernel, fault_of
from interposer_testing._judge.memory import memory_of
from interposer_testing._judge.process import KernelError, KernelProcess, ProcessEndedError
from interposer_testing._judge.remote import RemoteFunctions
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
_MAX_COMPARED = 12
_RERUN_BATCHES, _MIN_RERUN_BATCHES = 12, 4
_GROWTH = 8
_INTERPRETED = (
    "Triton's interpreter ran the kernel, so it was not timed, large workloads were left out, and "
    "races between the programs of a launch were not seen"
)
_NEVER_ON_A_GPU = (
    "this path of the judge has never run on its hardware: check the verdict before you use it. "
    "Times include a copy of each result, and an argument that the kernel writes is read after the "
    "whole device has finished"
)
_Style = Literal["plain", "module", "threads"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on the time and the number of calls of each stage of judging.

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
    device: str = "cpu",
    seed: int | None = None,
    quick: bool = False,
    backward: bool = False,
    caches: Caches = "cold",
    budget: Budget | None = None,
    progress: Progress | None = None,
    timer: Callable[[], float] = time.perf_counter,
) -> Verdict:
    """Judge whether a solution computes the task, and how fast.

    The solution runs in a process of its own, which has neither the reference nor expected values;
    this process never imports the solution. Inputs are drawn from a secret seed.

    Args:
        device: "cpu", or "cuda" for a GPU. The path for GPUs has never run on one.
        seed: seed of all inputs; by default a secret one, which the verdict states.
        quick: judge in a few seconds, with fewer cases and calls.
        backward: judge the backward pass too: after the forward pass alone, judge both passes as
            one kernel, whose results include the gradients. Takes several times as long.
        caches: where the arguments of timed calls lie when a call begins: "cold" for memory, "warm"
            for the caches, as far as they fit.
        budget: limits of time and calls, instead of those of a full or quick run.
        progress: called with the name of each step.
        timer: clock in seconds.

    Raises: ConfigError: this system is not Linux, has no such device, or lacks Triton and the
        solution imports it; or ``backward`` is set and the op has no gradient; or the reference of
        the task fails.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device = {device!r} is unknown. Try: 'cpu' or 'cuda'")
    if device != "cpu" and solution.style == "writes outputs":
        raise ConfigError(
            f"The solution {solution.name!r} writes to outputs that it is given, and {device!r} is "
            "for functions that return results. Try: the device 'cpu', or another function"
        )
    if solution.uses_triton and find_spec("triton") is None:
        raise ConfigError(
            f"The solution {solution.name!r} imports triton, which is not installed. "
            f"Try: {install_command('interposer-testing[triton]')}"
        )
    if backward:
        training_step(task.op)  # refuses an op without gradient before a process starts
    judging = _Judging(
        task,
        solution,
        device,
        secrets.randbits(48) if seed is None else seed,
        budget or (QUICK if quick else Budget()),
        progress or (lambda _: None),
        timer,
        backward,
        caches,
    )
    start, date = timer(), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    judging.run()
    tier: Tier = "triage" if quick or judging.num_left_out else "gate"
    if seed is not None:
        tier = "advisory"
    return Verdict(
        state=judging.state,
        tier=tier,
        task={"name": task.name, "source": task.source, "sha256": task.digest},
        solution={
            "name": solution.name,
            "language": "triton" if solution.uses_triton else solution.language,
            "sha256": _digest(solution),
        },
        seed=judging.seed,
        findings=tuple(judging.findings),
        largest_error=judging.largest_error,
        gradient_error=judging.gradient_error if backward else None,
        caches=caches,
        timings=tuple(judging.timings),
        num_calls=judging.num_calls,
        num_calls_afterwards=judging.num_calls_afterwards,
        versions={
            "interposer-testing": importlib_metadata.version("interposer-testing"),
            "python": machine.python_version(),
            "torch": torch.__version__,
        },
        device=judging.device_name,
        date=date,
        seconds=timer() - start,
        output=judging.output,
        notes=judging.notes,
    )


@dataclass(slots=True)
class _Judging:
    """One run of the judge, with the findings so far."""

    task: Task
    solution: Solution
    device: str
    seed: int
    budget: Budget
    progress: Progress
    timer: Callable[[], float]
    backward: bool
    caches: Caches
    findings: list[Finding] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    largest_error: float = 0.0
    gradient_error: float = 0.0
    num_calls: int = 0
    num_calls_afterwards: int = 0
    num_left_out: int = 0
    output: str = ""
    _compared: defaultdict[str, list[Workload]] = field(default_factory=lambda: defaultdict(list))

    @property
    def state(self) -> State:
        """The verdict that follows from the findings: accepted, refused or impossible."""
        if not self.findings:
            return "accepted"
        return "impossible" if all(f.check == "floor" for f in self.findings) else "refused"

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernel, as on any machine without a GPU."""
        return self.solution.uses_triton and self.device == "cpu"

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on limits of the verdict, such as workloads that were not compared."""
        notes = [_NEVER_ON_A_GPU] if self.device != "cpu" else []
        if self.is_interpreted:
            notes.append(_INTERPRETED)
        if self.num_left_out:
            notes.append(f"{self.num_left_out} workloads were not compared, as the time had ended")
        return tuple(notes)

    @property
    def device_name(self) -> str:
        """Name of the GPU, or machine and number of threads of the CPU, that runs the kernel."""
        if self.device != "cpu":
            return torch.cuda.get_device_name(self.device)
        cpu = machine.machine()
        if self.is_interpreted:
            return f"Triton's interpreter on {cpu}"
        return f"{cpu} with {torch.get_num_threads()} threads"

    def run(self) -> None:
        """Run all stages of judging; stop after the first stage with findings."""
        with self._process("loading") as process:
            kernels = self._loaded(process, "loading")
            for stage in (self._check, self._check_changes, self._check_threads, self._time):
                for kernel in kernels:
                    if not self.findings:
                        stage(kernel, self._shuffled(kernel))
            # Forward and backward pass run in one process: one check finds the changes of both.
            for kernel in kernels[:1]:
                self._check_process(kernel, "timing")
            self.num_calls = process.num_calls
            self.output = process.output()
        if self.findings:
            return
        # A new process, because a kernel may have kept results or replaced functions in the first.
        with self._process("rerun") as process:
            kernels = self._loaded(process, "rerun")
            for kernel in kernels:
                if not self.findings:
                    # State that a kernel keeps from a small call is often too small for a later
                    # one.
                    compared = self._compared[kernel.passes]
                    self._rerun(kernel, sorted(compared, key=self._size))
            for kernel in kernels[:1]:
                self._check_process(kernel, "rerun")
            self.num_calls_afterwards = process.num_calls
            self.output = process.output()

    def _shuffled(self, kernel: JudgedKernel) -> list[Workload]:
        order = random.Random(self.seed)
        workloads = order.sample(kernel.workloads, len(kernel.workloads))
        if self.is_interpreted:  # a large workload takes hours
            return [w for w in workloads if not w.timed] or [self._smallest(workloads)]
        return workloads

    def _process(self, stage: Stage) -> KernelProcess:
        return KernelProcess(
            self.solution.sources,
            limit_seconds=self.budget.call_seconds,
            environment={"TRITON_INTERPRET": "1"} if self.is_interpreted else {},
            # As the child of a shell, the process looks like that of an ordinary program.
            is_shell_child=stage == "rerun",
            memory=partial(memory_of, self.device),
        )

    def _loaded(self, process: KernelProcess, stage: Stage) -> list[JudgedKernel]:
        """Load the solution and, if judged, its backward pass. A failure becomes a finding."""
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
                name=solution.entry,
                file=solution.file,
                language=solution.language,
                uses_triton=solution.uses_triton,
                **create,
            )
            kernel = JudgedKernel(self.task, solution, functions, function)
            return [kernel, kernel.with_gradients()] if self.backward else [kernel]
        except (KernelError, ProcessEndedError) as error:
            self._add(stage, "", fault_of(error, "loading"))
            return []

    def _generator(self, *names: object) -> torch.Generator:
        """Return a random generator seeded from the judge's seed and ``names``."""
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

    def _check(self, kernel: JudgedKernel, workloads: Sequence[Workload]) -> None:
        """Compare the kernel's results on each workload with the reference, in guarded memory."""
        end = self.timer() + self.budget.correctness_seconds
        for number, workload in enumerate(workloads):
            if number and self.timer() > end:
                self.num_left_out += len(workloads) - number
                break
            self.progress(f"comparing {workload.label}{kernel.passes}")
            case = workload.case(self._generator("correctness", workload.label))
            # Half of the workloads run without fences, as in ordinary programs.
            faults, errors = kernel.faults(case, is_fenced=number % 2 == 0)
            self._compared[kernel.passes].append(workload)
            for name, error in errors.items():
                if name.startswith("gradient"):
                    self.gradient_error = max(self.gradient_error, error)
                else:
                    self.largest_error = max(self.largest_error, error)
            self._add("correctness", workload.label, *faults)
            if not (number or faults):
                self._check_idle(kernel)
            # A kernel that fails once usually fails for every workload, with the same message.
            if len(self.findings) >= _MAX_FINDINGS or any(f.check == "call" for f in faults):
                break

    def _check_changes(self, kernel: JudgedKernel, workloads: Sequence[Workload]) -> None:
        """Change some argument values between calls, and compare each call with the reference."""
        self.progress("comparing calls with changed arguments")
        for workload in workloads[:_NUM_CHANGED]:
            first, second, third = (
                workload.case(self._generator("changes", number)) for number in range(3)
            )
            if not num_bytes(first):
                continue
            # A kernel that reuses results often compares only a few elements of its arguments.
            cases = [first]
            generator = self._generator("changed elements", workload.label)
            for other_case, how in (
                (second, "one"),
                (third, "all"),
                (second, "last"),
                (first, "half"),
            ):
                cases.append(changed(cases[-1], other_case, how, kernel.op.constants, generator))
            self._add("correctness", workload.label, *kernel.departures_of_changes(cases))
            if self.findings:
                return

    def _check_threads(self, kernel: JudgedKernel, workloads: Sequence[Workload]) -> None:
        """Compare the results of calls from several threads at once with the reference."""
        self.progress("comparing calls of several threads")
        workload = self._smallest(workloads[:_MAX_COMPARED])
        cases = [
            workload.case(self._generator("threads", number)) for number in range(_NUM_THREADS)
        ]
        self._add("correctness", workload.label, *kernel.departures(cases, style="threads"))

    def _smallest(self, workloads: Sequence[Workload]) -> Workload:
        """Return the workload with the fewest bytes; workloads without any bytes come last."""
        return min(workloads, key=self._size)

    def _size(self, workload: Workload) -> tuple[bool, int]:
        """Return a sort key that puts fewer bytes first and workloads without any bytes last."""
        count = num_bytes(workload.case(self._generator("size")))
        return not count, count

    def _check_idle(self, kernel: JudgedKernel) -> None:
        """Find threads that keep running after a call, and so disturb other measurements."""
        try:
            share = kernel.functions.process.idle_share()
        except ProcessEndedError as error:
            self._add("correctness", "", fault_of(error, "process"))
            return
        if share > _MAX_IDLE_SHARE:
            reason = f"it uses {share:.0%} of a core after its calls have returned"
            self._add("correctness", "", Fault("call", "process", reason))

    def _check_process(self, kernel: JudgedKernel, stage: Stage) -> None:
        """Find settings and functions that the kernel changed in the whole process."""
        if any(finding.check == "process" for finding in self.findings):
            return
        try:
            changes = kernel.functions.process.request("changes").get("changes")
        except (KernelError, ProcessEndedError) as error:
            self._add(stage, "", fault_of(error, "process"))
            return
        for change in changes if isinstance(changes, list) else ():
            self._add(stage, "", Fault("call", "process", str(change)[:200]))

    def _time(self, kernel: JudgedKernel, workloads: Sequence[Workload]) -> None:
        """Time the workloads marked for timing, and compare results of timed calls."""
        timed = [w for w in kernel.workloads if w.timed] or list(workloads[:1])
        if self.is_interpreted:
            timed = [self._smallest(workloads[:_MAX_COMPARED])]
        for workload in timed[:_MAX_TIMED]:
            self.progress(f"timing {workload.label}{kernel.passes}")
            draw = partial(workload.case, self._generator("timing", workload.label))
            seconds, num_calls = [], 0
            clock = BatchClock(kernel.functions, kernel.arguments, self.timer, self.caches)
            # Every workload gets the same time, so that a slow one cannot prevent the others.
            limit = self.budget.timing_seconds / len(timed[:_MAX_TIMED])
            try:
                with kernel.functions.scope():
                    clock.keep_constants(draw(), kernel.op.constants)
                    batches = clock.batches(kernel.function, draw, _NUM_BATCHES, limit)
                    for number, (size, batch) in enumerate(batches):
                        num_calls = size
                        for case, arguments, (call, result) in batch.checked:
                            # The constants are those of the first draw.
                            output = kernel.output(call, result)
                            faults = kernel.compare(case, arguments, output, is_mixed=True)
                            self._add("timing", workload.label, *faults)
                        if number:  # the first batch has two calls, to find the size of others
                            seconds.append(batch.seconds)
            except (KernelError, ProcessEndedError) as error:
                self._add("timing", workload.label, fault_of(error, "timed call"))
            if self.findings or self.is_interpreted:
                return
            median, low, high = spread(seconds)
            try:
                # A running kernel could make the measured rates of the machine lower.
                kernel.functions.process.stop()
            except ProcessEndedError as error:
                self._add("timing", workload.label, fault_of(error, "roofline"))
                return
            limits = self._limits(kernel.op, draw)
            # The upper quartile, because single batches can be too short by an error of the clock.
            if high < limits.floor:
                # Other programs may have run while an earlier verdict measured the rates.
                _roofline.cache_clear()
                limits = self._limits(kernel.op, draw)
            timing = Timing(
                workload.label + kernel.passes,
                median,
                low,
                high,
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

    def _limits(self, op: CustomOp[..., Any], draw: Callable[[], Case]) -> Limits:
        """Compute the roofline and the floor of the time of a call."""
        return _roofline(self.timer, self.device).of(op, draw(), self._generator("roofline"))

    def _rerun(self, kernel: JudgedKernel, workloads: Sequence[Workload]) -> None:
        """Rerun as a program would: other call stacks, inputs and order, many more calls."""
        half = self.timer() + 0.5 * self.budget.rerun_seconds
        self.progress("running again after the verdict")
        for number, workload in enumerate(workloads):
            is_late = number >= _MAX_COMPARED and self.timer() > half
            if is_late and workload.of_other_size is None:
                continue
            # Other scales and sizes: a kernel that stored the results of the tests fails here.
            generator = self._generator("rerun", workload.label)
            cases = [varied(workload, generator)]
            if workload.of_other_size is not None:
                cases.append(workload.of_other_size(generator))
            self._add("rerun", workload.label, *kernel.departures_of_copies(cases))
            if self.findings:
                return
        smallest = self._smallest(workloads[:_MAX_COMPARED])
        draw = partial(smallest.case, self._generator("many calls"))
        most_repeats = -(-self.budget.rerun_calls // (2 * _RERUN_BATCHES))
        if kernel.op.mutates:
            most_repeats = 1  # a repeated call would get the result of the one before
        repeat, num_batches = 1, 0
        last_call = kernel.functions.process.num_calls + self.budget.rerun_calls
        end = self.timer() + 0.5 * self.budget.rerun_seconds
        while kernel.functions.process.num_calls < last_call:
            if num_batches >= _MIN_RERUN_BATCHES and self.timer() > end:
                break
            started, cases = self.timer(), [draw(), draw()]
            faults = kernel.departures_of_copies(cases, repeat=repeat)
            self._add("rerun", smallest.label, *faults)
            if self.findings:
                return
            num_batches += 1
            took = self.timer() - started
            # Short batches say little about the time of a call; at least six long ones fit.
            grown = repeat * _GROWTH if _GROWTH * took < self.budget.rerun_seconds else 1
            fitting = int(repeat * (self.budget.rerun_seconds / 6) / took)
            repeat = min(most_repeats, max(grown, fitting))


@cache
def _roofline(timer: Callable[[], float], device: str) -> Roofline:
    """Return the roofline of a device; all verdicts of this process share the measured rates."""
    return Roofline(timer, device=device)


def _digest(solution: Solution) -> str:
    """Return the SHA-256 of the names and contents of all files, in hexadecimal."""
    digest = hashlib.sha256()
    for name, content in sorted(solution.sources.items()):
        # The length separates files, so that no two sets of files have the same bytes.
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
