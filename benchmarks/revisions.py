"""Compare decoding with this checkout and with another one, such as that of an older revision.

    python benchmarks/revisions.py OTHER_PYTHON MODEL [--batch 1] [--context 128] [--rounds 21]

OTHER_PYTHON is that of an environment in which the other checkout is installed. Both load the model
in bfloat16, in processes of their own, of which one is stopped while the other runs; who is first
changes with every round. The ratio is the median of those of tokens per second within a round, this
checkout's to the other's, with the quartiles in brackets.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = 96


@dataclass(frozen=True)
class Row:
    model: str
    batch: int
    context: int

    def arguments(self) -> list[str]:
        return [self.model, "--batch", str(self.batch), "--context", str(self.context)]


class Side:
    """A process that decodes when it is told to, and is stopped in between."""

    def __init__(self, python: str, row: Row) -> None:
        script = str(Path(__file__).resolve())
        self.process = subprocess.Popen(
            [python, script, python, *row.arguments(), "--decodes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.speed()  # loads, and makes what is made on first use
        self.pause()

    def speed(self) -> float:
        """Return tokens per second."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        os.kill(self.process.pid, signal.SIGCONT)
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)


def decode(row: Row) -> None:
    """Answer each line of standard input with the speed of a decode."""
    from interposer_engine import SamplingParams, load

    room = row.batch * (row.context + STEPS + 64)
    options: dict[str, Any] = {"cache_tokens": room, "max_sequences": row.batch}
    lm = load(row.model, "bfloat16", **options)
    params = SamplingParams(max_new_tokens=STEPS + 2, ignore_eos=True)
    for _ in sys.stdin:
        requests = [
            lm.engine.add([n + 3 * place % 97 for place in range(row.context)], params)
            for n in range(row.batch)
        ]
        while not all(request.output for request in requests):
            lm.engine.step()
        start = time.perf_counter()
        for _ in range(STEPS):
            lm.engine.step()
        seconds = time.perf_counter() - start
        for request in requests:
            lm.engine.cancel(request)
        print(STEPS * row.batch / seconds, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("other")
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--decodes", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    row = Row(given.model, given.batch, given.context)
    if given.decodes:
        decode(row)
        return
    sides = [Side(python, row) for python in (sys.executable, given.other)]
    found: list[list[float]] = [[], []]
    for number in range(given.rounds):
        for index in (0, 1) if number % 2 else (1, 0):
            found[index].append(sides[index].speed())
            sides[index].pause()
    for side in sides:
        side.process.kill()
    ratios = [here / there for here, there in zip(*found, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    speeds = [statistics.median(each) for each in found]
    print(
        f"{Path(row.model).name}, batch {row.batch}, context {row.context}: here {speeds[0]:.1f} "
        f"tokens/s, there {speeds[1]:.1f}, x{middle:.3f} ({low:.3f} to {high:.3f})"
    )


if __name__ == "__main__":
    main()
