"""The native kernel of ``gguf_linear`` beside the one in torch and a dense product in bfloat16.

All are called in turns, so that whatever else the machine does falls on all alike. Weights change
with every call and come from memory, as in a model. ``GB/s`` are bytes of blocks per second; at
what rate memory is read without any arithmetic stands in the first line. The others' times are
told as multiples of the native kernel's. Figures are medians, and those of the lowest in brackets.

    python benchmarks/gguf_linear.py [--threads N] [--rounds N] [FORMAT ...]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch.nn import functional

from interposer_gguf import _kernels as kernels
from interposer_gguf import _native_library as native_library
from interposer_gguf import _native_linear as native_linear
from interposer_gguf._block_formats import FORMATS, BlockFormat
from interposer_gguf._cases import random_rows

SHAPES = ((4096, 4096), (1024, 3072))  # O, I
TOKENS = (1, 4, 32)
# Several times the last-level cache.
WEIGHTS_BYTES = 96 << 20

Call = Callable[[], object]


def call_makers(
    layout: BlockFormat, shape: tuple[int, int]
) -> list[Callable[[torch.Tensor], Call]]:
    """Return functions that make the call of each kernel from inputs."""
    out_features, in_features = shape
    generator = torch.Generator().manual_seed(0)
    rows = random_rows(layout, out_features, in_features, generator, in_features**-0.5)
    blocks = [rows.clone() for _ in range(WEIGHTS_BYTES // rows.nbytes + 1)]
    halves = [kernels.pack_halves(one, None, layout.name)["weight"] for one in blocks]
    dense = layout.dequantized(rows, torch.float32).bfloat16()
    plain = [dense.clone() for _ in range(WEIGHTS_BYTES // dense.nbytes + 1)]

    def native(x: torch.Tensor) -> Call:
        turn = cycle(blocks)
        return lambda: native_linear.gguf_linear(x, next(turn), None, layout.name)

    def by_rows(x: torch.Tensor) -> Call:
        turn = cycle(halves)
        return lambda: kernels.gguf_linear(x, next(turn), None, layout.name)

    def in_bfloat16(x: torch.Tensor) -> Call:
        turn, short = cycle(plain), x.bfloat16()
        return lambda: functional.linear(short, next(turn))

    return [native, by_rows, in_bfloat16]


def measured(calls: Sequence[Call], rounds: int) -> list[list[float]]:
    """Return the seconds that each call takes, by round."""
    taken: list[list[float]] = [[] for _ in calls]
    for number in range(-1, rounds):  # the first warms up
        for place in range(len(calls)):
            place = (place + number) % len(calls)
            start = time.perf_counter()
            calls[place]()
            if number >= 0:
                taken[place].append(time.perf_counter() - start)
    return taken


def ratios(times: Sequence[float], others: Sequence[float]) -> str:
    """Return the median of the ratios within a round, and the ratio of the lowest."""
    median = statistics.median(one / other for one, other in zip(times, others, strict=True))
    return f"x{median:.2f} (x{min(times) / min(others):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    numbers = torch.ones(WEIGHTS_BYTES)
    (seconds,) = measured([numbers.sum], 15)
    read = numbers.nbytes / min(seconds) / 1e9
    level = native_library.LEVELS[native_library.library().level]
    print(f"{options.threads} threads, {options.dtype}, {level}, memory is read at {read:.1f} GB/s")
    print("format   O    I    T  native us    GB/s   by rows   dense bfloat16")
    for name in options.formats:
        layout = FORMATS[name]
        for shape in SHAPES:
            makers = call_makers(layout, shape)
            num_bytes = shape[0] * layout.row_bytes(shape[1])
            for num_tokens in TOKENS:
                x = torch.randn(num_tokens, shape[1]).to(getattr(torch, options.dtype))
                native, rows, dense = measured([make(x) for make in makers], options.rounds)
                median, best = statistics.median(native), min(native)
                print(
                    f"{name:6} {shape[0]:4} {shape[1]:4} {num_tokens:4}"
                    f"{median * 1e6:9.0f} ({best * 1e6:.0f})"
                    f"{num_bytes / median / 1e9:7.1f} ({num_bytes / best / 1e9:.1f})"
                    f"  {ratios(rows, native)}  {ratios(dense, native)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
