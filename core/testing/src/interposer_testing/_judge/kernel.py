"""Calls of a solution that the worker process has loaded, and checks of the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Literal

import torch

from interposer import Case
from interposer_testing._checks.call import Call, CallArguments, Subject
from interposer_testing._checks.expectation import Expectation
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.kernel import check_subject
from interposer_testing._checks.remote_value import RemoteValue
from interposer_testing._checks.training_step import TrainingStep, training_step
from interposer_testing._judge.clock import allocated_like, fill
from interposer_testing._judge.memory import SharedMemory
from interposer_testing._judge.process import KernelError, ProcessEndedError
from interposer_testing._judge.remote import RemoteFunction, RemoteFunctions
from interposer_testing._judge.task import Solution, Task

_Style = Literal["plain", "module", "threads"]


class JudgedKernel:
    """A solution that a worker process has loaded, with comparisons against the reference.

    Attributes:
        op: the op of the task, or its training step.
        workloads: inputs of ``op``.
        passes: suffix of the labels of workloads in reports.
    """

    def __init__(
        self, task: Task, solution: Solution, functions: RemoteFunctions, function: RemoteValue
    ) -> None:
        self.functions = functions
        self.function = function
        self.op = task.op
        self.workloads = task.workloads
        self.passes = ""
        self._task = task
        self._writes_outputs = solution.style == "writes outputs"
        self._step: TrainingStep | None = None

    def with_gradients(self) -> JudgedKernel:
        """Return a kernel that runs the forward and the backward pass of this kernel.

        Raises:
            ConfigError: the op declares no gradient.
            ProcessEndedError: the process ended.
        """
        step, kernel = training_step(self.op), copy(self)
        remote = RemoteFunction(self.functions, self.function)
        kernel.function = remote.differentiated(*step.places).function
        kernel.op, kernel.passes, kernel._step = step.op, ", forward and backward", step
        kernel.workloads = tuple(
            replace(
                workload,
                case=_with_output_gradients(step, workload.case),
                free=workload.free | {*step.output_gradients},
                of_other_size=None
                if workload.of_other_size is None
                else _with_output_gradients(step, workload.of_other_size),
            )
            for workload in self.workloads
        )
        return kernel

    @property
    def _memory(self) -> SharedMemory:
        return self.functions.process.memory

    def faults(self, case: Case, *, is_fenced: bool) -> tuple[list[Fault], dict[str, float]]:
        """Compare two calls with the reference, like ``check_kernel``; return faults and errors.

        Raises: ConfigError: kernel and reference fail, so the task is at fault.
        """
        remote = RemoteFunction(self.functions, self.function)
        errors, expectations = dict[str, float](), list[Expectation]()

        def function(*arguments: Any) -> Any:
            call = self._call(arguments)
            return self.output(call, remote(*call[0], **call[1]))

        def expect(call_arguments: CallArguments) -> Expectation:
            # The errors below need the expectation again; one run of the reference serves both.
            if not expectations:
                expectations.append(self._expectation(case, call_arguments))
            return expectations[0]

        memory = self._memory
        subject = Subject(self.op, function, device=memory.device, allocate=memory.allocate)
        try:
            with self.functions.scope():
                # GPU memory has no pages that the judge could protect.
                is_fenced = is_fenced and memory.device == "cpu"
                faults = check_subject(subject, case, expect, is_fenced)
                if not faults:
                    # Errors are only defined for results without faults, so a further call is made.
                    call_arguments = subject.given(case)
                    call = subject.call(call_arguments)
                    errors = expect(call_arguments).errors(call)
        except (KernelError, ProcessEndedError) as error:
            if self._task.source != "op":
                self._task.expect(case)  # raises ConfigError if the task cannot be computed at all
            return [fault_of(error, "call")], {}
        return faults, errors

    def departures(self, cases: Sequence[Case], *, style: _Style, repeat: int = 1) -> list[Fault]:
        """Compare the values of calls in shared, unguarded memory with the reference."""
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
                    for case, call_arguments, call, result in zip(
                        cases, arguments, calls, results, strict=True
                    )
                    for fault in self.compare(case, call_arguments, self.output(call, result))
                ]
        except (KernelError, ProcessEndedError) as error:
            return [fault_of(error, "call")]

    def departures_of_copies(self, cases: Sequence[Case], *, repeat: int = 1) -> list[Fault]:
        """Compare calls with the reference, on tensors that torch allocates as in a program."""
        names = list(self.op.signature.parameters)
        mutated = [names.index(name) for name in self.op.mutates]
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
                for case, (result, arguments_afterwards) in zip(cases, results, strict=True):
                    mutated_arguments = dict(
                        zip(self.op.mutates, arguments_afterwards, strict=False)
                    )
                    if outputs:
                        result = _joined(arguments_afterwards[len(mutated) :])
                    faults += self.compare(case, mutated_arguments, self._arranged(result))
                return faults
        except (KernelError, ProcessEndedError) as error:
            return [fault_of(error, "call")]

    def departures_of_changes(self, cases: Sequence[Case]) -> list[Fault]:
        """Compare calls on the same argument objects, with changing values, with the reference."""
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
                names = list(self.op.signature.bind(**cases[0].arguments).arguments)
                for number, case in enumerate(cases):
                    if number == len(cases) - 1:
                        # New objects at the addresses of earlier ones, as allocators create them.
                        process.stop()
                        for name, value in shared.items():
                            if isinstance(value, torch.Tensor):
                                fill(value, case.arguments[name])
                        process.request("prepare", calls=request["calls"])
                    elif number:
                        values = [
                            [names.index(n), self.functions.encoded(v)]
                            for n, v in case.arguments.items()
                            if isinstance(v, torch.Tensor)
                            and n not in self.op.constants
                            and 0 not in v.stride()  # ``changed`` leaves these as they are
                        ]
                        process.request("change", values=values)
                    exports = request["exports"]
                    process.request("run", function=request["function"], exports=exports)
                    reply = process.request("describe", indices=[0], exports=exports)
                    result = self.output(call, self.functions.results(reply, 1)[0])
                    if faults := self.compare(case, shared, result, is_mixed=number > 0):
                        return faults
            return []
        except (KernelError, ProcessEndedError) as error:
            return [fault_of(error, "call")]

    def compare(
        self, case: Case, arguments: Mapping[str, Any], result: Any, *, is_mixed: bool = False
    ) -> list[Fault]:
        """Compare form and values of a result with the reference.

        Args:
            is_mixed: the arguments are values of several draws, so that a few results may lie at a
                rounding boundary.
        """
        subject = Subject(self.op, self.op.reference, device=self._memory.device)
        # The reference gets fresh copies: the kernel may have written to its arguments.
        call_arguments = subject.given(case)
        for name in self.op.mutates:
            call_arguments.operands[name].tensor.copy_(arguments[name])
        expectation, call = self._expectation(case, call_arguments), Call(call_arguments, result)
        faults = list(expectation.departures(call))
        if is_mixed and faults and all(fault.check == "value" for fault in faults):
            faults = list(expectation.at_rounding_boundaries(call).departures(call))
        return faults

    def _expectation(self, case: Case, call_arguments: CallArguments) -> Expectation:
        """Return the expected result of a case."""
        if self._step is not None:
            return self._step.expectation(case, call_arguments)
        if self._task.source == "op":
            return Expectation.of(self.op, case, call_arguments)
        expected = self._task.expect(case)
        labels = [f"output {number}" for number in range(len(expected.forms))]
        return Expectation(
            self.op,
            case,
            _joined(list(expected.forms.values())),
            torch.device(self._memory.device).type,
            dict(zip(labels, expected.values.values(), strict=True)),
            dict(zip(labels, expected.bounds.values(), strict=True)),
            # Definitions of other projects do not say which strides a result has.
            any_strides=frozenset(labels),
        )

    def _arranged(self, result: Any) -> Any:
        """Order the outputs of a foreign task, which a solution may return as a dict or a list."""
        if self._task.source == "op":
            return result
        if isinstance(result, dict) and result.keys() == set(self._task.outputs):
            result = [result[name] for name in self._task.outputs]
        return _joined(result) if isinstance(result, list | tuple) and result else result

    def arguments(
        self, case: Case, arguments: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the positional and keyword arguments of a call, in shared memory."""
        return self._call(self.op.signature.bind(**{**case.arguments, **arguments}).args)

    def _call(self, arguments: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        if not self._writes_outputs:
            return arguments, {}
        case = Case("", self.op.signature.bind(*arguments).arguments)
        forms = self._task.expect(case).forms.values()
        return [*arguments, *(allocated_like(f, self._memory.allocate) for f in forms)], {}

    def output(self, call: tuple[Sequence[Any], Mapping[str, Any]], result: Any) -> Any:
        """Return the outputs of a call: the result, or the outputs that the solution writes to."""
        if not self._writes_outputs:
            return self._arranged(result)
        return _joined(call[0][len(self.op.signature.parameters) :])


def _with_output_gradients(
    step: TrainingStep, draw: Callable[[torch.Generator], Case]
) -> Callable[[torch.Generator], Case]:
    return lambda generator: step.case(draw(generator), generator)


def _shared(tensor: torch.Tensor, memory: SharedMemory) -> torch.Tensor:
    shared = allocated_like(tensor, memory.allocate)
    fill(shared, tensor)
    return shared


def _joined(outputs: Sequence[Any]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def fault_of(error: KernelError | ProcessEndedError, where: str) -> Fault:
    if isinstance(error, KernelError):
        return Fault("call", where, f"raised {type(error).__name__}: {error}")
    return Fault("call", "process", str(error))
