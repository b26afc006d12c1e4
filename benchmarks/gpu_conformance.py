"""Verify a distribution on an accelerator, op by op, in processes beside each other.

    python benchmarks/gpu_conformance.py DIST [--parts NAME,NAME] [--jobs N] [--platform NAME]
        [--json FILE]

It is ``interposer verify DIST --quick``, cut into parts: an op that ends or hangs its process costs
itself alone, and what there is no time for is named. Most of the time goes into compiling, which
is why there are several processes.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from evidence.record import Deadline, Record, add_step_options
from gpu_worker import PARTS, Worker
from interposer import current_registry

_LONGEST_S = 170.0
_MOST_JOBS = 12
_TINY_OPS = ("apply_temperature",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("distribution")
    parser.add_argument("--jobs", type=int, default=_jobs(), help="number of parallel processes")
    parser.add_argument("--parts", default="", help="parts, separated by commas; default: all")
    add_step_options(parser)
    options = parser.parse_args()
    deadline, record = Deadline(options.seconds), Record(options.json)
    registry = current_registry()
    ops = [
        op
        for op in registry.subjects("kernel")
        if any(c.provider == options.distribution for c in registry.candidates("kernel", op))
    ]
    # What is no op has the longest trials, and so it goes first.
    parts = [*(_TINY_OPS if options.tiny else (*PARTS, *ops))]
    if wanted := [part for part in options.parts.split(",") if part]:
        if unknown := [part for part in wanted if part not in parts]:
            parser.error(f"--parts {unknown[0]!r} is none of {', '.join(parts)}")
        parts = wanted
    jobs = 1 if options.tiny else max(1, min(options.jobs, len(parts)))
    Conformance(options.distribution, options.platform, record, deadline).run(parts, jobs)
    states = Counter(row["state"] for row in record.rows)
    told = ", ".join(f"{states[state]} {state}" for state in sorted(states))
    record.headline = f"{options.distribution}: of {len(parts)} ops and parts {told or 'none ran'}"
    if not states["correct"]:
        record.faults.append("nothing ran, so nothing is proved")
    record.say(record.headline)


class Conformance:
    """The parts of one distribution, given out to workers until the time is over."""

    def __init__(
        self, distribution: str, platform: str, record: Record, deadline: Deadline
    ) -> None:
        program = str(Path(__file__).with_name("gpu_worker.py"))
        self.command = [sys.executable, "-X", "faulthandler", program, distribution, platform]
        self.record = record
        self.deadline = deadline
        self.lock = threading.Lock()

    def run(self, parts: list[str], jobs: int) -> None:
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for part in parts:
            waiting.put(part)
        threads = [threading.Thread(target=self._work, args=(waiting,)) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done = {row["part"] for row in self.record.rows}
        if left := [part for part in parts if part not in done]:
            self.record.skip(f"no time for {len(left)} more parts: {', '.join(left)}")

    def _work(self, waiting: queue.SimpleQueue[str]) -> None:
        worker = Worker(self.command)
        try:
            while self.deadline.left_s() > 0:
                try:
                    part = waiting.get_nowait()
                except queue.Empty:
                    return
                start = time.monotonic()
                answer = worker.ask(part, min(_LONGEST_S, self.deadline.left_s()))
                if answer is None and self.deadline.left_s() <= 0:
                    return
                self._keep(part, answer, worker.end, time.monotonic() - start)
                if answer is None or answer["state"] == "wrong":
                    # A device that faulted in a process does nothing more for it.
                    worker.close()
                    worker = Worker(self.command)
        finally:
            worker.close()

    def _keep(self, part: str, answer: dict[str, Any] | None, end: str, seconds: float) -> None:
        found = answer or {"state": "ended", "candidates": [], "faults": [f"its process {end}"]}
        with self.lock:
            text = f"{part:34}{found['state']:9}{seconds:>6.1f} s"
            self.record.row(text, part=part, seconds=round(seconds, 1), **found)
            for fault in found["faults"]:
                self.record.fault(f"{part}: {fault}")


def _jobs() -> int:
    return max(1, min(_MOST_JOBS, len(os.sched_getaffinity(0)) - 4))


if __name__ == "__main__":
    main()
