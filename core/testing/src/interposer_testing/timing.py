"""Times of kernels in processes of their own, by the clock of this process.

The kernels can replace neither the clock nor the comparison: both are in this process, which never
calls the kernels.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from interposer import Case, CustomOp, Platform
from interposer_testing._checks.call import Call, Subject, tensors_of
from interposer_testing._checks.expectation import Expectation
from interposer_testing._judge.clock import BatchClock, Roofline, allocated_like, fill, spread
from interposer_testing._judge.process import KernelError, ProcessEndedError
from interposer_testing._judge.remote import RemoteFunction
from interposer_testing._trials.kernels import SeparateKernels

__all__ = [
    "KernelProcesses",
    "RefusedTimesError",
    "Roofline",
    "TimedKernel",
    "batch_times",
    "can_travel",
]

# A message takes some 50 us; the calls of a batch should take longer.
_BATCH_SECONDS = 0.002
# Drawing the arguments takes longer than the calls.
_MAX_CALLS, _MAX_BATCH_BYTES = 16, 16 << 20
_NUM_CHECKED = 3
_random = random.SystemRandom()


class KernelProcesses:
    """One process for the kernels of each distribution, started on first use."""

    def __init__(self, platform: type[Platform]) -> None:
        """Create the collection without processes; each process starts on first use.

        Args:
            platform: created in each process, because a platform can change how its kernels run.
        """
        self._platform = platform
        self._open = ExitStack()
        self._processes: dict[str, SeparateKernels] = {}
        self._scope = ExitStack()
        self._scoped = set[str]()

    def __enter__(self) -> KernelProcesses:
        return self

    def __exit__(self, *_error: object) -> None:
        self._open.close()

    def of(self, distribution: str) -> SeparateKernels:
        """Return the worker process for the kernels of a distribution."""
        if distribution not in self._processes:
            self._processes[distribution] = self._open.enter_context(
                SeparateKernels(self._platform)
            )
        kernels = self._processes[distribution]
        if distribution not in self._scoped:
            self._scoped.add(distribution)
            scope = kernels.functions.scope()
            scope.__enter__()
            # As a callback, because an error of the block must not be replaced.
            self._scope.callback(_leave, scope)
        return kernels

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Free, at the end of a ``with`` block, the constants of kernels created in the block."""
        with ExitStack() as self._scope:
            self._scoped = set()
            yield


def _leave(scope: AbstractContextManager[None]) -> None:
    with suppress(ProcessEndedError):  # a process that has ended needs no scope
        scope.__exit__(None, None, None)


class RefusedTimesError(Exception):
    """A kernel has no valid times: it failed, returned a wrong result, or was impossibly fast.

    Attributes:
        name: of the kernel.
        reason: completes a sentence that begins with the kernel.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} {reason}")
        self.name = name
        self.reason = reason


class TimedKernel:
    """A kernel with prepared constants, which is called in another process.

    Args:
        name: for errors and results.
        op: with the tolerance that the kernel may use.
        kernels: the process that the kernel is loaded in.
        target: import string of the kernel.
        prepare: import string of the function that prepares the constants; empty for none.
        case: holds the constants of all calls.
    Raises: RefusedTimesError: the kernel cannot be loaded, or its constants cannot be prepared.
    """

    def __init__(
        self,
        name: str,
        op: CustomOp[..., Any],
        kernels: SeparateKernels,
        target: str,
        prepare: str,
        case: Case,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.op = op
        self._kernels = kernels
        with self._refusals():
            self._function = kernels.load(target)
            self._clock = BatchClock(kernels.functions, self._arguments, timer)
            if prepare:
                self._prepare(prepare, case)
            else:
                self._clock.keep_constants(case, op.constants)

    def seconds(self, cases: Sequence[Case], answers: Answers) -> float:
        """Run a batch, check some of its results, and return the seconds per call.

        Raises: RefusedTimesError: a result is wrong, or the kernel failed.
        """
        functions = self._kernels.functions
        with self._refusals():
            with functions.scope():
                batch = self._clock.batch(self._function, cases, answers.chosen)
                for index, (case, arguments, (_, result)) in zip(
                    answers.chosen, batch.checked, strict=True
                ):
                    for fault in answers.faults(index, case, self.op, arguments, result):
                        raise RefusedTimesError(self.name, f"returned a wrong result: {fault}")
            # Threads that the kernel left running would slow the other kernels.
            functions.process.stop()
        return batch.seconds

    def _prepare(self, target: str, case: Case) -> None:
        function = RemoteFunction(
            self._kernels.functions, self._kernels.load(target), is_opaque=True
        )
        constants = {name: self._shared(case.arguments[name]) for name in self.op.constants}
        try:
            prepared = Subject(self.op, function, function).prepared(constants)
        except ValueError as error:
            raise RefusedTimesError(self.name, str(error)) from error
        self._clock.keep_prepared(case, prepared)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except KernelError as error:
            # Only the first line, because allocators report many.
            first_line, newline, _ = repr(error).partition("\\n")
            reason = f"raised {first_line}{' ...' if newline else ''}"
            raise RefusedTimesError(self.name, reason) from error
        except ProcessEndedError as error:
            self._kernels.end()
            raise RefusedTimesError(self.name, f"cannot be timed: {error}") from error

    def _arguments(
        self, case: Case, arguments: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        return self.op.signature.bind(**{**case.arguments, **arguments}).args, {}

    def _shared(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shared = allocated_like(value, self._kernels.functions.process.memory.allocate)
        fill(shared, value)
        return shared


class Answers:
    """The expected results of a few calls of a batch, which all kernels share.

    Attributes:
        chosen: indices of the calls to compare.
    """

    def __init__(self, chosen: Sequence[int] = ()) -> None:
        self.chosen = chosen
        self._expected: dict[int, tuple[Any, Expectation]] = {}

    def faults(
        self,
        index: int,
        case: Case,
        op: CustomOp[..., Any],
        arguments: Mapping[str, Any],
        result: Any,
    ) -> Iterator[Any]:
        """Yield the differences between the result of a call and the reference.

        Args:
            op: with the tolerance that the kernel may use.
            arguments: mutated arguments by name, as the call left them; others are ignored.
        """
        if index not in self._expected:
            call_arguments = Subject(op, op.reference).given(case)
            self._expected[index] = call_arguments, Expectation.of(op, case, call_arguments)
        call_arguments, expectation = self._expected[index]
        for name in op.mutates:
            call_arguments.operands[name].tensor.copy_(arguments[name])
        yield from replace(expectation, op=op).departures(Call(call_arguments, result))


def can_travel(value: Any) -> bool:
    """Tell whether an argument can be sent to another process."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and can_travel(v) for name, v in value.items())
    if isinstance(value, tuple | list):
        return all(map(can_travel, value))
    plain = torch.Tensor | torch.dtype | bool | int | float | str
    return value is None or isinstance(value, plain)


def batch_times(
    kernels: Sequence[TimedKernel],
    draw: Callable[[int], Case],
    repeats: int,
    roofline: Roofline,
) -> dict[str, tuple[float, float, float]]:
    """Time kernels in turns, by the clock of this process; return medians and quartiles by name.

    The calls of a batch have different arguments at different addresses, and other ones than all
    batches before. All kernels get the same arguments. The results of a few calls are compared
    with the reference; a kernel cannot know which. A message to the process counts as part of
    each batch, for all kernels alike.

    Args:
        draw: draws arguments from a seed.
        repeats: number of timed batches.
    Raises: RefusedTimesError: a kernel failed, a result is wrong, or a time is below the floor.
    """

    def drawn(count: int) -> list[Case]:
        return [draw(_random.getrandbits(31)) for _ in range(count)]

    # The first batch compiles; the second one tells how many calls a batch needs.
    for _ in range(2):
        cases = drawn(2)
        fastest_seconds = min(kernel.seconds(cases, Answers()) for kernel in kernels)
    num_bytes = sum(t.numel() * t.itemsize for t in tensors_of(dict(cases[0].arguments)))
    num_calls = math.ceil(_BATCH_SECONDS / max(fastest_seconds, 1e-7))
    num_calls = max(1, min(num_calls, _MAX_CALLS, _MAX_BATCH_BYTES // max(1, num_bytes)))
    seconds: dict[str, list[float]] = {kernel.name: [] for kernel in kernels}
    compared = _random.sample(range(repeats), min(_NUM_CHECKED, repeats))
    for repeat in range(repeats):
        cases = drawn(num_calls)
        answers = Answers([_random.randrange(num_calls)] if repeat in compared else [])
        # Another kernel begins in each round, so that other load affects all alike.
        for offset in range(len(kernels)):
            kernel = kernels[(repeat + offset) % len(kernels)]
            seconds[kernel.name].append(kernel.seconds(cases, answers))
    times = {name: spread(values) for name, values in seconds.items()}
    for kernel in kernels:
        median, _, high = times[kernel.name]
        generator = torch.Generator().manual_seed(_random.getrandbits(60))
        limits = roofline.impossible(kernel.op, cases[0], high, generator)
        if limits is not None:
            raise RefusedTimesError(
                kernel.name,
                f"is impossibly fast: a call takes {median * 1e6:.3g} us, but the {limits.limit} "
                f"of this machine allows no less than {limits.floor * 1e6:.3g} us",
            )
    return times
