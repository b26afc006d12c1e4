"""Measure the roofs of the processor: read bandwidth of memory, and bfloat16 GEMM.

    python benchmarks/cpu_roofs.py [--threads N] [--rounds N]

Prints JSON. Bandwidth is that of the fastest of several ways to read far more than the caches
hold; each is the median of its rounds. What one of them does not reach is its own cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from interposer import Kernel, Request, current_registry
from interposer.records import load_target
from interposer_cpu import CPUPlatform

__all__ = ["Roofs", "linear_kernels", "measured_roofs"]

READ_BYTES = 512 << 20
MATRIX = 2048


@dataclass(frozen=True)
class Roofs:
    """Bytes per second of reading, the way that was fastest, and operations per second."""

    bytes_per_s: float
    read_by: str
    flops_per_s: float
    threads: int


def measured_roofs(threads: int, rounds: int, read_bytes: int = READ_BYTES) -> Roofs:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        taken = {
            name: read / median_seconds(call, rounds) for name, read, call in readers(read_bytes)
        }
        size = MATRIX if read_bytes == READ_BYTES else 256
        left, right = (torch.randn(size, size).bfloat16() for _ in range(2))
        seconds = median_seconds(lambda: left @ right, rounds)
    best = max(taken, key=lambda name: taken[name])
    return Roofs(taken[best], best, 2 * size**3 / seconds, threads)


def readers(size: int) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """Yield ways to read: their name, the bytes of one call, the call."""
    numbers = torch.ones(size // 4)
    half = len(numbers) // 2
    yield "torch.dot", size, lambda: torch.dot(numbers[:half], numbers[half:])
    yield "torch.sum", size, lambda: torch.sum(numbers)
    yield "torch.amax", size, lambda: torch.amax(numbers)
    columns = 1024
    weight = torch.ones(size // columns // 2, columns, dtype=torch.bfloat16)
    x = torch.ones(1, columns, dtype=torch.bfloat16)
    for name, function, constants in linear_kernels(weight):
        held = {"weight": weight, "bias": None} | constants
        yield name, size, lambda f=function, h=held: f(x, h["weight"], h["bias"])  # type: ignore[misc]


def linear_kernels(
    weight: torch.Tensor,
) -> Iterator[tuple[str, Callable[..., object], dict[str, Any]]]:
    """Yield the kernels of this platform for a plain product, with the constants they prepared."""
    device = CPUPlatform().devices()[0]
    dtype = str(weight.dtype).removeprefix("torch.")
    dims = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
    request = Request("kernel", "linear", "cpu", device.capability, dtype, dims)
    for candidate in current_registry().candidates("kernel", "linear"):
        record = candidate.record
        if isinstance(record, Kernel) and record.prepare and candidate.judge(request):
            constants = load_target(record.prepare)(weight=weight, bias=None)
            yield candidate.name, load_target(record.target), constants


def median_seconds(call: Callable[[], object], rounds: int) -> float:
    call()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--read-mib", type=int, default=READ_BYTES >> 20)
    options = parser.parse_args()
    print(
        json.dumps(asdict(measured_roofs(options.threads, options.rounds, options.read_mib << 20)))
    )


if __name__ == "__main__":
    main()
