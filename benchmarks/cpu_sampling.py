"""Time native sampling, penalties and routing on one thread, against their references.

Results are medians of processor time in microseconds; both are called in turns.

    python benchmarks/cpu_sampling.py [--vocab 151936] [--rows 1] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from interposer_cpu._kernels import routing as native_routing
from interposer_cpu._kernels import sampling as native_sampling
from interposer_ops.experts import grouped_topk, topk_softmax
from interposer_ops.sampling import apply_penalties, sample_tokens

# Temperature, top_k, top_p, min_p.
SETTINGS: dict[str, tuple[float | None, int | None, float | None, float | None]] = {
    "greedy": (None, None, None, None),
    "temperature": (0.7, None, None, None),
    "top-k 20": (0.7, 20, None, None),
    "top-k 20, top-p 0.95": (0.7, 20, 0.95, None),
    "top-p 0.9": (0.9, None, 0.9, None),
    "min-p 0.1": (1.5, None, None, 0.1),
    "top-k 5000": (1.0, 5000, None, None),
}


def compare(name: str, rounds: int, native: Callable[[], Any], plain: Callable[[], Any]) -> None:
    """Print the median times of kernel and reference."""
    taken: dict[Callable[[], Any], list[float]] = {native: [], plain: []}
    for _ in range(rounds):
        for call, times in taken.items():
            start = time.thread_time()
            call()
            times.append(1e6 * (time.thread_time() - start))
    first, second = (statistics.median(times) for times in taken.values())
    print(f"{name:40} {first:9.1f} {second:9.1f}  x{second / first:.1f}", flush=True)


def column(value: float | None, rows: int, dtype: torch.dtype) -> torch.Tensor | None:
    return None if value is None else torch.full((rows,), value, dtype=dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    rows, vocab = given.rows, given.vocab
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    seeds = torch.arange(rows)
    print(f"{'':40} {'native':>9} {'reference':>9}")
    for dtype in (torch.bfloat16, torch.float32):
        logits = (4 * torch.randn(rows, vocab, generator=generator)).to(dtype)
        kind = str(dtype).removeprefix("torch.")
        for name, (temperature, top_k, top_p, min_p) in SETTINGS.items():
            call = (
                logits,
                column(temperature, rows, torch.float32),
                column(top_k, rows, torch.int64),
                column(top_p, rows, torch.float32),
                column(min_p, rows, torch.float32),
                seeds,
                seeds,
            )
            compare(
                f"{name}, {kind}",
                given.rounds,
                lambda call=call: native_sampling.sample_tokens(*call),  # type: ignore[misc]
                lambda call=call: sample_tokens.reference(*call),  # type: ignore[misc]
            )
        used = torch.rand(rows, vocab, generator=generator) < 0.1
        penalised = (logits, used, used.int(), *(torch.full((rows,), 1.1) for _ in range(3)))
        compare(
            f"penalties, {kind}",
            given.rounds,
            lambda call=penalised: native_sampling.apply_penalties(*call),  # type: ignore[misc]
            lambda call=penalised: apply_penalties.reference(*call),  # type: ignore[misc]
        )
    for tokens in (1, 128):
        logits, bias = torch.randn(tokens, 256, generator=generator), torch.zeros(256)
        grouped = (logits, bias, 8, 4, 8, "sigmoid", True, 2.5)
        few = logits[:, :128].contiguous()
        compare(
            f"8 of 128 experts, {tokens} tokens",
            10 * given.rounds,
            lambda call=few: native_routing.topk_softmax(call, 8, True),  # type: ignore[misc]
            lambda call=few: topk_softmax.reference(call, 8, True),  # type: ignore[misc]
        )
        compare(
            f"8 of 256 in 4 of 8 groups, {tokens} tokens",
            10 * given.rounds,
            lambda call=grouped: native_routing.grouped_topk(*call),  # type: ignore[misc]
            lambda call=grouped: grouped_topk.reference(*call),  # type: ignore[misc]
        )


if __name__ == "__main__":
    main()
