"""Timing of calls in another process, and lower bounds of call times on this machine."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import quantiles
from typing import Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from interposer import Case, CustomOp
from interposer.roofline import copies, fastest, host_clock, matmul, readers
from interposer_testing._checks.call import tensors_of
from interposer_testing._checks.expectation import on_meta
from interposer_testing._checks.remote_value import RemoteValue
from interposer_testing._judge.remote import RemoteFunctions

# A batch should take this long, so that the messages take less than a hundredth of it.
_BATCH_SECONDS = 0.03
_MAX_CALLS, _MAX_BATCH_BYTES = 256, 64 << 20
# Arguments that this process has just written stay in the last cache, up to about this size.
_MAX_WARM_BYTES = 4 << 20
# Buffer that evicts the arguments from the caches of the usual processors.
_EVICTING_BYTES = 128 << 20
# The threads of this process wait actively for about so long after a parallel region.
_SETTLING_SECONDS = 0.002
_NUM_CHECKED = 2
# Elements of an argument that are changed to find out whether the result depends on all of it.
_NUM_PROBES = 6
# Smaller arguments count as read without such calls: they hardly change the floor.
_MIN_PROBED_FRACTION = 1 / 64
# The measured rates may miss the peak of the machine, but not by this factor.
_HEADROOM = 2.0
# Products of 8-bit integers beside those of float32 on processors with VNNI, and products of FP4
# beside those of bfloat16 on GPUs. torch has no matmul that shows these rates on every device.
_NARROW_SPEEDUP = 4.0
_RATE_REPEATS = 20
_LARGE_BYTES = 256 << 20


Caches = Literal["cold", "warm"]
"""Whether arguments lie in memory or in the caches when a call begins."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Seconds per call of a timed batch, and the calls of the batch that the judge checks."""

    seconds: float
    checked: Sequence[tuple[Case, Mapping[str, Any], Any]]


class BatchClock:
    """Times batches of calls with the clock of this process.

    The arguments of every call are new: other values at other addresses, which are written while
    the process of the kernel is stopped. Only the op's constants, such as weights, are the same in
    all calls. Results of a few calls, chosen after the calls, are read.
    """

    def __init__(
        self,
        functions: RemoteFunctions,
        call: Callable[[Case, Mapping[str, Any]], tuple[Sequence[Any], Mapping[str, Any]]],
        timer: Callable[[], float] = time.perf_counter,
        caches: Caches = "cold",
    ) -> None:
        """Create a clock for functions of another process.

        Args:
            caches: "cold" evicts the arguments from the caches before each batch; "warm" leaves
                them there, and makes batches small enough.
        """
        self._functions = functions
        self._caches = caches
        self._constants: dict[str, tuple[torch.Tensor, RemoteValue]] = {}
        self._call = call
        self._timer = timer
        self._random = random.Random()

    def batches(
        self, function: Any, draw: Callable[[], Case], num_batches: int, limit_seconds: float
    ) -> Iterator[tuple[int, Batch]]:
        """Yield (number of calls, batch): first an unmeasured batch, then the measured batches.

        Args:
            draw: draws the arguments of one call.
            limit_seconds: no batch is started afterwards, except for the first four.
        """
        start, num_calls = self._timer(), 2
        first = self.batch(function, [draw() for _ in range(num_calls)])
        yield num_calls, first
        sizes = [t.numel() * t.itemsize for t in tensors_of(dict(draw().arguments))]
        most_bytes = _MAX_WARM_BYTES if self._caches == "warm" else _MAX_BATCH_BYTES
        fitting = most_bytes // max(1, sum(sizes))
        num_calls = math.ceil(_BATCH_SECONDS / max(first.seconds, 1e-7))
        num_calls = max(2, min(num_calls, fitting, _MAX_CALLS))
        for number in range(num_batches):
            if number >= 4 and self._timer() - start > limit_seconds:
                break
            yield num_calls, self.batch(function, [draw() for _ in range(num_calls)])

    def batch(
        self, function: Any, cases: Sequence[Case], chosen: Sequence[int] | None = None
    ) -> Batch:
        """Time a batch with one call for each case.

        Args:
            chosen: indices of the calls whose results are read; by default a few random ones.
        """
        process, num_calls = self._functions.process, len(cases)
        cases = [self._with_constants(case) for case in cases]
        targets = [self._allocated(case) for case in cases]
        calls = [self._call(c, t) for c, t in zip(cases, targets, strict=True)]
        request = self._functions.requested(function, calls)
        process.request("prepare", calls=request["calls"])
        # The kernel sees the values only when the clock runs: it is stopped while they are written.
        process.stop()
        for case, target in zip(cases, targets, strict=True):
            for name, value in case.arguments.items():
                if isinstance(target[name], torch.Tensor):
                    fill(target[name], value)
        if self._caches == "cold":
            _evicting_buffer(process.memory.device).add_(1)
        time.sleep(_SETTLING_SECONDS)
        process.resume()
        run = {"action": "run", "function": request["function"], "exports": request["exports"]}
        # The judge reads its own clock, which the kernel cannot replace.
        start = self._timer()
        process.send(run)
        reply = process.receive()
        end = self._timer()
        process.raise_error(reply)
        if chosen is None:
            chosen = self._random.sample(range(num_calls), min(_NUM_CHECKED, num_calls))
        if request["exports"]:
            # The reply does not prove that a device has finished: a kernel can replace the function
            # that waits. So the calls end when this process has read their results.
            end = self._functions.read_timed(reply, chosen, self._timer)
        seconds = end - start
        if not chosen:
            return Batch(seconds / num_calls, ())
        reply = process.request("describe", indices=chosen)
        results = self._functions.results(reply, len(chosen))
        checked = [
            (cases[index], targets[index], (calls[index], result))
            for index, result in zip(chosen, results, strict=True)
        ]
        return Batch(seconds / num_calls, checked)

    def keep_constants(self, case: Case, names: Sequence[str]) -> None:
        """Store the constants of a case in the kernel's process, for all later calls."""
        for name in names:
            value = case.arguments[name]
            if isinstance(value, torch.Tensor):
                shared = allocated_like(value, self._functions.process.memory.allocate)
                fill(shared, value)
                self._constants[name] = value, self._functions.kept(shared)

    def keep_prepared(self, case: Case, prepared: Mapping[str, RemoteValue]) -> None:
        """Use constants that ``prepare`` returned in the kernel's process, for all later calls."""
        self._constants |= {name: (case.arguments[name], prepared[name]) for name in prepared}

    def _with_constants(self, case: Case) -> Case:
        constants = {name: value for name, (value, _) in self._constants.items()}
        return replace(case, arguments={**case.arguments, **constants})

    def _allocated(self, case: Case) -> dict[str, Any]:
        """Return the arguments of a case, with empty tensors of the same form in shared memory."""
        allocated = dict(case.arguments)
        for name, value in case.arguments.items():
            if name in self._constants:
                allocated[name] = self._constants[name][1]
            elif isinstance(value, torch.Tensor):
                allocated[name] = allocated_like(value, self._functions.process.memory.allocate)
        return allocated


@cache
def _evicting_buffer(device: str) -> torch.Tensor:
    with torch.inference_mode(mode=False):  # later writes may be outside of that mode
        return torch.zeros(_EVICTING_BYTES // 4, dtype=torch.int32, device=device)


def allocated_like(tensor: torch.Tensor, allocate: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the same shape, strides and dtype in memory from ``allocate``."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    covered = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
    buffer = allocate(-(-covered * tensor.itemsize // 64) * 64)
    return torch.empty(0, dtype=tensor.dtype, device=buffer.device).set_(
        buffer.untyped_storage(), 0, tensor.shape, tensor.stride()
    )


def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values to a tensor of the same form; elements that share memory are copied once."""
    if values.numel():
        once = tuple(slice(0, 1 if step == 0 else None) for step in values.stride())
        target[once].copy_(values[once])


def spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return median, lower quartile and upper quartile of ``seconds``."""
    low, median, high = quantiles(seconds, n=4, method="inclusive")
    return median, low, high


@dataclass(frozen=True, slots=True)
class Limits:
    """Roofline and floor of the time of one call on this machine, in seconds.

    Attributes:
        roofline: time at the rates that torch reaches, with arguments in main memory.
        floor: time that no kernel can beat: arguments in the caches, and twice the rates.
        limit: "memory" or "arithmetic".
    """

    roofline: float
    floor: float
    limit: str


class Roofline:
    """The least time of a call: bytes over bandwidth, or operations over peak.

    Only those arguments count that determine the result wholly, and only products of matrices
    count as operations. The rates are the best that torch reaches in this process, with all
    threads: the faster one of float32 and bfloat16 matmuls, because torch emulates many other
    dtypes. For arguments of 8 bits, the floor assumes four times this rate.
    """

    def __init__(
        self,
        timer: Callable[[], float] = time.perf_counter,
        rounds: int = _RATE_REPEATS,
        device: str = "cpu",
    ) -> None:
        self._device = device
        wait = (lambda: None) if device == "cpu" else torch.accelerator.synchronize
        self._seconds = host_clock(rounds, wait, of_rounds=min, timer=timer)
        self._rates: dict[int, float] = {}

    def of(self, op: CustomOp[..., Any], case: Case, generator: torch.Generator) -> Limits:
        """Compute roofline and floor of the time of a call with the arguments of ``case``."""
        arguments = dict(case.arguments)
        result, num_operations = _counted(op, _copied(arguments))
        sizes = {n: v.nbytes for n, v in arguments.items() if isinstance(v, torch.Tensor)}
        min_probed_bytes = _MIN_PROBED_FRACTION * sum(sizes.values())
        names = [
            name
            for name, size in sizes.items()
            if name in op.mutates
            or size < min_probed_bytes
            or _determines(op, arguments, name, result, generator)
        ]
        return self._limits(arguments, names, result, num_operations)

    def impossible(
        self, op: CustomOp[..., Any], case: Case, seconds: float, generator: torch.Generator
    ) -> Limits | None:
        """Return the limits of a call if ``seconds`` is below the floor, else None."""
        arguments = dict(case.arguments)
        # If all arguments counted, the floor would be highest; it takes no call of the reference.
        names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
        highest = self._limits(arguments, names, *_counted(op, on_meta(arguments)))
        if seconds >= highest.floor:
            return None
        limits = self.of(op, case, generator)
        return limits if seconds < limits.floor else None

    def _limits(
        self,
        arguments: Mapping[str, Any],
        arguments_read: Sequence[str],
        result: Any,
        num_operations: int,
    ) -> Limits:
        """Compute the limits of a call that reads only the arguments ``arguments_read``."""
        tensors = [*tensors_of(result), *(arguments[name] for name in arguments_read)]
        num_bytes = sum(t.numel() * t.itemsize for t in tensors)
        # The caches may hold the arguments, if they fit.
        from_cache = num_bytes / max(self._reading_rate(n) for n in (num_bytes, _LARGE_BYTES))
        from_memory = num_bytes / self._reading_rate(_LARGE_BYTES)
        from_arithmetic = num_operations / self._peak if num_operations else 0.0
        is_narrow = any(_is_narrow(value) for value in arguments.values())
        least_arithmetic = from_arithmetic / (_NARROW_SPEEDUP if is_narrow else 1.0)
        return Limits(
            roofline=max(from_memory, from_arithmetic),
            floor=max(from_cache, least_arithmetic) / _HEADROOM,
            limit="arithmetic" if from_arithmetic > from_memory else "memory",
        )

    def _reading_rate(self, num_bytes: int) -> float:
        """Measure the rate of reading a buffer of about ``num_bytes``, in bytes per second."""
        size = max(4096, 4 << (min(num_bytes, _LARGE_BYTES) // 4).bit_length())
        if size not in self._rates:
            on_host = self._device == "cpu"
            ways = readers(size) if on_host else copies(self._device, size)
            self._rates[size], _ = fastest(ways, self._seconds)
        return self._rates[size]

    @cached_property
    def _peak(self) -> float:
        """The most operations per second that square matmuls reach."""
        size = 1024 if self._device == "cpu" else 8192
        dtypes = (torch.float32, torch.bfloat16)
        rate, _ = fastest((matmul(size, dtype, self._device) for dtype in dtypes), self._seconds)
        return rate


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.itemsize == 1 and value.dtype != torch.bool


def _counted(op: CustomOp[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, int]:
    """Run the reference; return the result and the number of operations of its matmuls."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        result = op.reference(**arguments)
    return result, counter.get_total_flops()


def _determines(
    op: CustomOp[..., Any],
    arguments: Mapping[str, Any],
    name: str,
    result: Any,
    generator: torch.Generator,
) -> bool:
    """Tell whether the result depends on each of a few randomly drawn elements of an argument."""
    value = arguments[name]
    if not value.is_floating_point() or not value.numel():
        return False
    expected = tensors_of(result)
    for _ in range(_NUM_PROBES):
        changed = _copied(arguments)
        index = tuple(int(torch.randint(n, (), generator=generator)) for n in value.shape)
        changed[name] = changed[name].clone()
        changed[name][index] = torch.nan
        with torch.no_grad():
            actual = tensors_of(op.reference(**changed))
        if all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)):
            return False
    return True


def _copied(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copy all tensors in ``arguments``, because a reference may write to its arguments."""
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
