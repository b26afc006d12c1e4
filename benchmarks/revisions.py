"""Compare this checkout's speed with another one's, such as that of the last release.

    python benchmarks/revisions.py OTHER_PYTHON MODEL [--quantization none int8] [--rounds 9]
    python benchmarks/revisions.py OTHER_PYTHON MODEL --at-least 0.93   # fails if it became slower

OTHER_PYTHON belongs to an environment in which the other version is installed. Both versions load
the model in processes of their own. One process is stopped while the other runs, and each round
changes the order. A ratio is the median over the rounds of this checkout's tokens per second
divided by the other version's, with the quartiles in brackets.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEPS = 32


@dataclass(frozen=True)
class Row:
    """One workload: prefill or decode of ``batch`` requests with ``context`` tokens each."""

    phase: str
    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.phase} {self.batch} x {self.context}"


ROWS = (
    Row("decode", 1, 128),
    Row("decode", 1, 1024),
    Row("decode", 8, 128),
    Row("prefill", 1, 512),
)


class Side:
    """A process with one version's engine, which is stopped unless it measures."""

    def __init__(self, python: str, model: str, quantization: str) -> None:
        self._python = python
        command = [python, str(Path(__file__).resolve()), python, model, "--measures"]
        self.process = subprocess.Popen(
            [*command, "--quantization", quantization],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def speed(self, row: Row) -> float:
        """Return tokens per second, summed over requests.

        Raises: SystemExit: the process ended, for a reason that it printed.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        os.kill(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(json.dumps(asdict(row)) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of {self._python} ended without a measurement")
        os.kill(self.process.pid, signal.SIGSTOP)
        return float(answer)


def measure(model: str, quantization: str) -> None:
    """Answer each row on standard input with its speed."""
    from interposer_engine import SamplingParams, load

    most = max(row.batch * (row.context + STEPS + 64) for row in ROWS)
    method = None if quantization == "none" else quantization
    options: dict[str, Any] = {"quantization": method, "cache_tokens": most, "max_sequences": 8}
    lm = load(model, "bfloat16", **options)
    params = SamplingParams(max_new_tokens=STEPS + 2, ignore_eos=True)
    for number, line in enumerate(sys.stdin):
        row = Row(**json.loads(line))
        start = time.perf_counter()
        requests = [
            # Other tokens each time: a prefix cache must not know the prompt.
            lm.engine.add([n + (3 + number) * i % 97 for i in range(row.context)], params)
            for n in range(row.batch)
        ]
        while not all(request.output for request in requests):
            lm.engine.step()
        num_tokens = row.context
        if row.phase == "decode":
            num_tokens, start = STEPS, time.perf_counter()
            for _ in range(STEPS):
                lm.engine.step()
        seconds = time.perf_counter() - start
        for request in requests:
            lm.engine.cancel(request)
        print(num_tokens * row.batch / seconds, flush=True)


def ratios(sides: list[Side], row: Row, rounds: int) -> tuple[list[float], list[list[float]]]:
    """Return the ratio of every round, and the speeds of both versions."""
    for side in sides:
        side.speed(row)  # touches memory, and compiles what is compiled on first use
    speeds: list[list[float]] = [[], []]
    for number in range(rounds):
        for index in (0, 1) if number % 2 else (1, 0):
            speeds[index].append(sides[index].speed(row))
    return [ours / theirs for ours, theirs in zip(*speeds, strict=True)], speeds


def compare(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Yield the name and the median ratio of every row, and print it."""
    for quantization in options.quantization:
        pythons = (sys.executable, options.other)
        sides = [Side(python, options.model, quantization) for python in pythons]
        try:
            for row in ROWS:
                found, speeds = ratios(sides, row, options.rounds)
                low, middle, high = statistics.quantiles(found, n=4)
                ours, theirs = (statistics.median(each) for each in speeds)
                name = f"{quantization}, {row}"
                print(
                    f"{name:28} {ours:8.1f} and {theirs:8.1f} tokens/s, x{middle:.3f} "
                    f"({low:.3f} to {high:.3f})",
                    flush=True,
                )
                yield name, middle
        finally:
            for side in sides:
                side.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("other", metavar="OTHER_PYTHON")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--quantization", nargs="+", default=["none"], metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--at-least", type=float, default=0.0, help="smallest ratio that passes")
    parser.add_argument("--measures", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measures:
        measure(options.model, options.quantization[0])
        return
    slower = [
        f"{name}: x{ratio:.3f}" for name, ratio in compare(options) if ratio < options.at_least
    ]
    if slower:
        raise SystemExit(f"slower than x{options.at_least}: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
