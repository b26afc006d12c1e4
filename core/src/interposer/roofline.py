"""Peak rates of a device: bytes per second that torch reads, operations per second of matmuls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

__all__ = ["Seconds", "Timed", "copies", "fastest", "host_clock", "matmul", "readers"]

Seconds = Callable[[Sequence[Callable[[], object]]], Sequence[float]]
"""Measures the seconds of each call."""


class Timed(NamedTuple):
    """One way to read memory or to multiply; ``amount`` is the bytes or operations of a call."""

    name: str
    amount: float
    call: Callable[[], object]


def fastest(ways: Iterable[Timed], seconds: Seconds) -> tuple[float, str]:
    """Return the highest rate among ``ways`` and the way's name; memory is freed after each way."""
    return max((way.amount / seconds([way.call])[0], way.name) for way in ways)


def host_clock(
    rounds: int,
    synchronize: Callable[[], object] = lambda: None,
    *,
    of_rounds: Callable[[list[float]], float],
    timer: Callable[[], float] = time.perf_counter,
) -> Seconds:
    """Return a function that times calls with the host's clock, after a call to warm up.

    Args:
        synchronize: waits for the work of a device.
        of_rounds: the result from the seconds of all rounds, such as the median.
    """

    def seconds(calls: Sequence[Callable[[], object]]) -> list[float]:
        results = []
        for call in calls:
            durations = []
            for _ in range(rounds + 1):
                synchronize()
                start = timer()
                call()
                synchronize()
                durations.append(timer() - start)
            results.append(of_rounds(durations[1:]))
        return results

    return seconds


def readers(num_bytes: int) -> Iterator[Timed]:
    """Yield several torch reductions that read a host buffer, as overhead may limit one of them."""
    numbers = torch.ones(num_bytes // 4)
    half = len(numbers) // 2
    yield Timed("torch.dot", num_bytes, lambda: torch.dot(numbers[:half], numbers[half:]))
    yield Timed("torch.sum", num_bytes, lambda: torch.sum(numbers))
    yield Timed("torch.amax", num_bytes, lambda: torch.amax(numbers))


def copies(device: str, num_bytes: int) -> Iterator[Timed]:
    """Yield a copy of a buffer on a device, which reads and writes every byte."""
    source = torch.ones(num_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    yield Timed("a copy", 2.0 * num_bytes, lambda: target.copy_(source))


def matmul(side: int, dtype: torch.dtype, device: str = "cpu") -> Timed:
    """Return the product of two square matrices."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return Timed("torch.matmul", 2.0 * side**3, lambda: a @ b)
