"""Measure the roofline of a device: memory bandwidth and matmul rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from interposer import Kernel, Placement, Request, current_registry
from interposer.records import load_target
from interposer_models._engine.cache_budget import is_host

READ_BYTES = 512 << 20
COPIED_BYTES = 1 << 30
_IN_FEATURES = 1024

Seconds = Callable[[Sequence[Callable[[], object]]], Sequence[float]]
"""Measures the median seconds of each call."""


class Timed(NamedTuple):
    """One way to read memory or to multiply; ``amount`` is the bytes or operations of a call."""

    name: str
    amount: float
    call: Callable[[], object]


@dataclass(frozen=True)
class Roofs:
    """The roofline of a device; each rate is the best of several measurements.

    Attributes:
        bytes_per_s: of reading; on devices other than a host of a copy, counting reads and writes.
        read_by: name of the way that reached ``bytes_per_s``.
        flops_per_s: operations of a matmul.
        threads: of torch on the host.
        multiplied_by: name of the way that reached ``flops_per_s``.
    """

    bytes_per_s: float
    read_by: str
    flops_per_s: float
    threads: int
    multiplied_by: str = "torch.matmul"

    def __str__(self) -> str:
        return (
            f"{self.bytes_per_s / 1e9:.1f} GB/s by {self.read_by}, "
            f"{self.flops_per_s / 1e12:.3g} TFLOP/s by {self.multiplied_by}"
        )


def measured_roofs(
    placement: Placement,
    rounds: int = 7,
    *,
    dtype: torch.dtype = torch.bfloat16,
    read_bytes: int | None = None,
    side: int | None = None,
    products: Iterable[Timed] = (),
    seconds: Seconds | None = None,
) -> Roofs:
    """Measure the roofline of a device.

    A host reads a buffer far larger than the CPU caches, in several ways, because a single way may
    be limited by overhead. Any other device copies.

    Args:
        rounds: number of measurements, of which the median counts.
        read_bytes: size of the buffer; by default 512 MiB for a host and 1 GiB for other devices.
        side: rows and columns of the square matrices of ``dtype``; by default 2048 for a host and
            8192 for other devices.
        products: more ways to multiply.
        seconds: measures times instead of the host's clock.
    """
    platform, device = placement.platform, placement.device.torch_device
    on_host = is_host(platform)
    seconds = seconds or _host_clock(rounds, lambda: platform.synchronize(device))
    read_bytes = read_bytes or (READ_BYTES if on_host else COPIED_BYTES)
    side = side or (2048 if on_host else 8192)
    with torch.inference_mode():
        # Kernels of the platform join in: they may read faster than torch's reductions.
        readers = _readers(placement, read_bytes) if on_host else _copies(device, read_bytes)
        bandwidth, read_by = _fastest(readers, seconds)
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        torch_matmul = Timed("torch.matmul", 2.0 * side**3, lambda: a @ b)
        matmul_rate, multiplied_by = _fastest((torch_matmul, *products), seconds)
    return Roofs(bandwidth, read_by, matmul_rate, torch.get_num_threads(), multiplied_by)


def _fastest(ways: Iterable[Timed], seconds: Seconds) -> tuple[float, str]:
    """Return the highest rate and its name; each way's memory is freed before the next one runs."""
    return max((way.amount / seconds([way.call])[0], way.name) for way in ways)


def _host_clock(rounds: int, synchronize: Callable[[], object]) -> Seconds:
    def seconds(calls: Sequence[Callable[[], object]]) -> list[float]:
        medians = []
        for call in calls:
            durations = []
            for _ in range(rounds + 1):
                synchronize()
                start = time.perf_counter()
                call()
                synchronize()
                durations.append(time.perf_counter() - start)
            # The first call warms up.
            medians.append(statistics.median(durations[1:]))
        return medians

    return seconds


def _copies(device: str, size: int) -> Iterator[Timed]:
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    # A copy reads and writes every byte.
    yield Timed("a copy", 2.0 * size, lambda: target.copy_(source))


def _readers(placement: Placement, size: int) -> Iterator[Timed]:
    numbers = torch.ones(size // 4)
    half = len(numbers) // 2
    yield Timed("torch.dot", size, lambda: torch.dot(numbers[:half], numbers[half:]))
    yield Timed("torch.sum", size, lambda: torch.sum(numbers))
    yield Timed("torch.amax", size, lambda: torch.amax(numbers))
    # A GEMV reads the whole weight once.
    weight = torch.ones(size // _IN_FEATURES // 2, _IN_FEATURES, dtype=torch.bfloat16)
    x = torch.ones(1, _IN_FEATURES, dtype=torch.bfloat16)
    for name, function, constants in _linear_kernels(placement, weight):
        operands = {"weight": weight, "bias": None} | constants
        yield Timed(name, size, lambda f=function, h=operands: f(x, h["weight"], h["bias"]))  # type: ignore[misc]


def _linear_kernels(
    placement: Placement, weight: torch.Tensor
) -> Iterator[tuple[str, Callable[..., object], dict[str, Any]]]:
    """Yield the available kernels for unquantized linear layers, with prepared constants."""
    dtype = str(weight.dtype).removeprefix("torch.")
    dims = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
    capability, name = placement.device.capability, placement.platform.name
    request = Request("kernel", "linear", name, capability, dtype, dims)
    for candidate in current_registry().candidates("kernel", "linear"):
        record = candidate.record
        if isinstance(record, Kernel) and record.prepare and candidate.judge(request):
            constants = load_target(record.prepare)(weight=weight, bias=None)
            yield candidate.name, load_target(record.target), constants
