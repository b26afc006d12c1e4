"""The canary: a quick comparison of one kernel with the reference of its op before first use.

The core imports this module by name in the sandboxed process that examines plugins. There the
kernel runs in a fork of that process, so that it cannot change the comparison.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from interposer import Case, CustomOp
from interposer.errors import described, foreign_errors
from interposer_testing._checks.call import Prepare, Subject
from interposer_testing._checks.expectation import Expectation
from interposer_testing._checks.kernel import check_subject
from interposer_testing._checks.remote_value import RemoteValue
from interposer_testing._judge.process import KernelProcess, ProcessEndedError
from interposer_testing._judge.remote import RemoteFunction, RemoteFunctions
from interposer_testing._judge.worker import Channel, Functions, limit_privileges
from interposer_testing.cases import planned_cases

# Few cases and tokens, because the first use of a kernel waits for the comparison.
_MAX_CASES = 8
_MAX_FAULTS = 3
_NUM_TOKENS = 3
_SEED = 0
# A sample with a larger weight is skipped: the reference widens it to float64, and the check keeps
# several copies of every operand.
_MAX_WEIGHT_ELEMENTS = 1 << 24
# Factor of the usual time limit, because the first call may compile the kernel.
_TIME_FACTOR = 12.0

Begin = Callable[[str, float], None]
Takes = Callable[[Mapping[str, Any]], bool]
Use = Callable[[Callable[..., Any], Prepare | None, Takes], None]


class Comparison(NamedTuple):
    """The result of a comparison, with the traceback of the first case that raised."""

    num_cases: int
    faults: list[str]
    traceback: str


class Kernel(Protocol):
    """Interface to a kernel under test, in this process or in another one."""

    def takes(self, dims: Mapping[str, Any], /) -> bool:
        """Tell whether the kernel accepts the dims of a case."""

    def subject(self, op: CustomOp[..., Any], device: str) -> AbstractContextManager[Subject]:
        """Return a context manager that provides the function under test."""


class LocalKernel(NamedTuple):
    """A kernel in this process."""

    function: Callable[..., Any]
    prepare: Prepare | None
    takes: Takes

    @contextmanager
    def subject(self, op: CustomOp[..., Any], device: str) -> Iterator[Subject]:
        """Return a context manager that provides the function under test."""
        yield Subject(op, self.function, self.prepare, device=device)


class ForkedKernel(KernelProcess):
    """A kernel in a fork of this process, which has not loaded the code of the kernel.

    The comparison, the reference and the expected values stay in this process, which reads the
    results out of the memory of the fork while the fork is stopped.
    """

    def __init__(
        self,
        offer: Callable[[Use, Begin], Mapping[str, Any]],
        *,
        fork: Callable[[Callable[[], object]], int],
        join: Callable[[int], None],
        begin: Begin,
    ) -> None:
        """Store the functions that start and end the fork; ``with`` starts the fork.

        Args:
            offer: in the fork, loads the kernel, calls a ``Use`` with it, and returns the finding.
            fork: runs a function in a fork of this process, and returns the process id.
            join: waits for the end of the fork; ends this process in the same way if the fork
                crashed or left early.
            begin: called in this process with the steps of ``offer``.
        """
        # The sandbox limits the time, and finds changed settings.
        super().__init__({}, limit_seconds=math.inf, is_watched=False)
        self._offer = offer
        self._fork = fork
        self._join = join
        self._begin = begin
        self._functions = RemoteFunctions(self)

    def load(self) -> Mapping[str, Any] | None:
        """Load the kernel in the fork; return the refusal if loading fails, else None."""
        reply = self._ask("start")
        if "finding" in reply:
            return self._ended(reply)
        self._function = RemoteValue(int(reply["function"]))
        prepare = reply["prepare"]
        self._prepare = None if prepare is None else RemoteValue(int(prepare))
        return None

    def end(self) -> Mapping[str, Any]:
        """Let the fork end, and return its finding about the kernel's code."""
        return self._ended(self._ask("end"))

    def takes(self, dims: Mapping[str, Any], /) -> bool:
        """Tell whether the kernel in the fork accepts the dims of a case."""
        return self._ask("takes", dims=dict(dims)).get("takes") is True

    @contextmanager
    def subject(self, op: CustomOp[..., Any], device: str) -> Iterator[Subject]:
        """Return the function under test, whose arguments are in shared memory."""
        functions, prepare = self._functions, self._prepare
        with functions.scope():
            yield Subject(
                op,
                RemoteFunction(functions, self._function),
                None if prepare is None else RemoteFunction(functions, prepare, is_opaque=True),
                device=device,
                allocate=self.memory.allocate,
            )

    def _ask(self, action: str, **content: Any) -> dict[str, Any]:
        reply = self.request(action, **content)
        while "stage" in reply:
            self._begin(str(reply["stage"]), min(float(reply["patience"]), _TIME_FACTOR))
            reply = self.request("continue")
        return reply

    def _ended(self, reply: Mapping[str, Any]) -> Mapping[str, Any]:
        finding: Mapping[str, Any] = reply["finding"]
        self._begin("ending the process", 1.0)
        self._wait()
        return finding

    def _start(self, channel: socket.socket, stack: ExitStack) -> None:
        self._pid = self._fork(partial(self._serve, channel))

    def _serve(self, connection: socket.socket) -> bool:
        """Serve requests of the judging process in the fork; return whether the code passed."""
        limit_privileges()
        channel = Channel(connection)
        functions = Functions(mmap.mmap(self.memory.descriptor, 0))
        actions = functions.actions()
        channel.serve(actions, last="start")

        def begin(stage: str, patience: float) -> None:
            channel.send({"stage": stage, "patience": patience})
            next(channel.requests())

        def use(function: Callable[..., Any], prepare: Prepare | None, takes: Takes) -> None:
            added = None if prepare is None else functions.add(prepare)
            channel.send({"function": functions.add(function), "prepare": added})

            def accept(request: Mapping[str, Any]) -> dict[str, Any]:
                return {"takes": bool(takes(request["dims"]))}

            channel.serve({**actions, "takes": accept}, last="end")

        finding = self._offer(use, begin)
        channel.send({"finding": finding})
        return bool(finding["accepted"])

    def _end_of_process(self) -> str:
        self._wait()
        return "ended too early"

    def _wait(self) -> None:
        pid, self._pid = self._pid, 0
        if pid:
            self._join(pid)

    def _end(self) -> None:
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def compare(
    op: CustomOp[..., Any],
    kernel: Kernel,
    *,
    name: str,
    dtype: str,
    dims: Mapping[str, Any],
    device: str,
    begin: Begin,
    fenced: bool = False,
) -> Comparison:
    """Run a kernel on the smallest cases that it accepts, and on one case of the requested size.

    The comparison stops at the third fault.

    Args:
        name: name of the kernel, for messages.
        dtype: name of the dtype of the cases, such as ``"bfloat16"``.
        dims: dims of the request.
        device: torch device on which the kernel runs.
        begin: called with the name of each step and the factor of the time limit for that step.
        fenced: end the process if the kernel touches memory outside its arguments.
    Raises: ProcessEndedError: the process of the kernel ended.
    """
    faults: list[str] = []
    trace = ""
    num_cases = 0
    # Build cases on the CPU: the caller may plan a model on the meta device.
    with torch.device("cpu"):
        for case in _cases(op, getattr(torch, dtype), dims, kernel.takes, begin):
            begin(f"running {name} on case {case.label!r}", _TIME_FACTOR)
            num_cases += 1
            try:
                with kernel.subject(op, device) as subject:
                    expect = partial(Expectation.of, op, case)
                    case_faults = check_subject(subject, case, expect, fenced)
                # The messages are shown without the case, so name it.
                faults += [f"on case {case.label!r}, {fault}" for fault in case_faults]
            except ProcessEndedError:
                raise
            except foreign_errors() as error:
                trace = trace or traceback.format_exc()
                faults.append(f"on case {case.label!r} it raised {described(error)}")
            if len(faults) >= _MAX_FAULTS:
                break
    return Comparison(num_cases, faults[:_MAX_FAULTS], trace)


def _cases(
    op: CustomOp[..., Any],
    dtype: torch.dtype,
    dims: Mapping[str, Any],
    takes: Takes,
    begin: Begin,
) -> Iterator[Case]:
    begin(f"preparing cases of the op {op.name!r}", _TIME_FACTOR)
    planned = planned_cases(op, _SEED, quick=True)
    built = (plan.build() for plan in planned if plan.dtype == dtype)
    yield from _selected(sorted((c for c in built if takes(c.dims)), key=_num_elements))
    if op.sample is not None and _weight_elements(dims) <= _MAX_WEIGHT_ELEMENTS:
        begin(f"preparing a sample of the op {op.name!r}", _TIME_FACTOR)
        yield op.sample(dtype, dims, _NUM_TOKENS, _SEED)


def _selected(cases: list[Case]) -> list[Case]:
    """Return the first cases, reordered so that cases with new argument layouts come first."""
    covered_layouts: set[tuple[str, str]] = set()
    with_new_layout: list[Case] = []
    with_old_layouts: list[Case] = []
    for case in cases:
        layouts = {(n, _layout(v)) for n, v in case.arguments.items() if _is_filled(v)}
        (with_old_layouts if layouts <= covered_layouts else with_new_layout).append(case)
        covered_layouts |= layouts
    return [*with_new_layout, *with_old_layouts][:_MAX_CASES]


def _is_filled(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _layout(tensor: torch.Tensor) -> str:
    if not tensor.is_contiguous():
        return "strided"
    return "offset" if tensor.storage_offset() else "dense"


def _num_elements(case: Case) -> int:
    values = case.arguments.values()
    return sum(value.numel() for value in values if isinstance(value, torch.Tensor))


def _weight_elements(dims: Mapping[str, Any]) -> int:
    """Estimate the elements of a request's largest weight: the product of the two largest dims."""
    sizes = sorted(size for size in dims.values() if type(size) is int)
    return math.prod(sizes[-2:])
