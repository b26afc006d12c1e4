"""The roofs of a device: the bandwidth of its memory, and the rate of matrix products."""

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
_COLUMNS = 1024

Seconds = Callable[[Sequence[Callable[[], object]]], Sequence[float]]
"""Returns the median seconds of each of some calls."""


class Timed(NamedTuple):
    """One way to take bytes, or operations, of which a call takes so many."""

    name: str
    amount: float
    call: Callable[[], object]


@dataclass(frozen=True)
class Roofs:
    """The fastest of several ways each.

    Attributes:
        bytes_per_s: of reading, or of a copy, which reads and writes.
        read_by: the way.
        flops_per_s: operations of a matrix product.
        threads: of torch on the host.
        multiplied_by: the way.
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
    """Measure the roofs of a device.

    A host reads far more than its caches hold, in several ways: what one of them does not reach is
    its own cost. Any other device copies.

    Args:
        rounds: of which the median is taken.
        read_bytes: 512 MiB of a host and 1 GiB of any other device, unless given.
        side: of the matrices of ``dtype`` that are multiplied; 2048 on a host, else 8192.
        products: further ways to multiply.
        seconds: takes the times, in place of the host's clock.
    """
    platform, device = placement.platform, placement.device.torch_device
    on_host = is_host(platform)
    seconds = seconds or _by_clock(rounds, lambda: platform.synchronize(device))
    read_bytes = read_bytes or (READ_BYTES if on_host else COPIED_BYTES)
    side = side or (2048 if on_host else 8192)
    with torch.inference_mode():
        ways = _readers(placement, read_bytes) if on_host else _copies(device, read_bytes)
        taken, read_by = _fastest(ways, seconds)
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        plain = Timed("torch.matmul", 2.0 * side**3, lambda: left @ right)
        multiplied, multiplied_by = _fastest((plain, *products), seconds)
    return Roofs(taken, read_by, multiplied, torch.get_num_threads(), multiplied_by)


def _fastest(ways: Iterable[Timed], seconds: Seconds) -> tuple[float, str]:
    """Return the highest rate and its name; one way's memory is given back before the next."""
    return max((way.amount / seconds([way.call])[0], way.name) for way in ways)


def _by_clock(rounds: int, settle: Callable[[], object]) -> Seconds:
    def seconds(calls: Sequence[Callable[[], object]]) -> list[float]:
        medians = []
        for call in calls:
            taken = []
            for _ in range(rounds + 1):
                settle()
                start = time.perf_counter()
                call()
                settle()
                taken.append(time.perf_counter() - start)
            medians.append(statistics.median(taken[1:]))
        return medians

    return seconds


def _copies(device: str, size: int) -> Iterator[Timed]:
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    yield Timed("a copy", 2.0 * size, lambda: target.copy_(source))


def _readers(placement: Placement, size: int) -> Iterator[Timed]:
    numbers = torch.ones(size // 4)
    half = len(numbers) // 2
    yield Timed("torch.dot", size, lambda: torch.dot(numbers[:half], numbers[half:]))
    yield Timed("torch.sum", size, lambda: torch.sum(numbers))
    yield Timed("torch.amax", size, lambda: torch.amax(numbers))
    weight = torch.ones(size // _COLUMNS // 2, _COLUMNS, dtype=torch.bfloat16)
    x = torch.ones(1, _COLUMNS, dtype=torch.bfloat16)
    for name, function, constants in _linear_kernels(placement, weight):
        held = {"weight": weight, "bias": None} | constants
        yield Timed(name, size, lambda f=function, h=held: f(x, h["weight"], h["bias"]))  # type: ignore[misc]


def _linear_kernels(
    placement: Placement, weight: torch.Tensor
) -> Iterator[tuple[str, Callable[..., object], dict[str, Any]]]:
    """Yield the kernels here for a plain product, with the constants that they prepared."""
    dtype = str(weight.dtype).removeprefix("torch.")
    dims = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
    capability, name = placement.device.capability, placement.platform.name
    request = Request("kernel", "linear", name, capability, dtype, dims)
    for candidate in current_registry().candidates("kernel", "linear"):
        record = candidate.record
        if isinstance(record, Kernel) and record.prepare and candidate.judge(request):
            constants = load_target(record.prepare)(weight=weight, bias=None)
            yield candidate.name, load_target(record.target), constants
