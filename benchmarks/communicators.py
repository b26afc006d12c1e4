"""Sums over the processes of one host: gloo beside shared memory, by size, dtype and ranks.

    python benchmarks/communicators.py [--ranks 2 4] [--rounds 200] [--json FILE]

The communicators take turns within each size, so that a machine that changes its speed changes it
for both. A rate counts what a rank reads and writes where it sums a part of a message of S bytes,
over N ranks: 2 (N - 1) / N S to copy the parts of the others to its slot, (N + 2) / N S to read all
of its own part and to write the sum twice, and 2 (N - 1) / N S to copy the sums of the others.
That is 4 S for two ranks. Beside it stands the rate, of bytes read and written, at which all ranks
copy S bytes at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interposer import Communicator, Ranks, current_platform
from interposer.records import load_target

COMMUNICATORS = {
    "gloo": "interposer_ops.communicators:TorchCommunicator",
    "shared memory": "interposer_cpu._communicator:SharedMemoryCommunicator",
}
SIZES = tuple(1 << bits for bits in (10, 12, 14, 16, 18, 20, 22, 24))
TURNS = 4
SECONDS = 0.15  # of a turn of one communicator, at most


def quantiles(times: list[float]) -> tuple[float, float]:
    """Return median and 90th percentile, in microseconds."""
    ordered = sorted(times)
    return statistics.median(ordered) * 1e6, ordered[int(0.9 * len(ordered))] * 1e6


def timed(communicator: Communicator, x: torch.Tensor, rounds: int, times: list[float]) -> None:
    """Time calls; rank 0 counts, all do as many."""
    clock = time.perf_counter
    for _ in range(5):
        communicator.all_reduce(x)
    for _ in range(rounds):
        begin = clock()
        communicator.all_reduce(x)
        times.append(clock() - begin)


def copied(num_bytes: int, rounds: int) -> float:
    """Return how many bytes per second a copy reads and writes, with all ranks at it."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    times = list[float]()
    for _ in range(rounds):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    return 2 * num_bytes / statistics.median(times)


def run(rank: int, size: int, folder: Path, rounds: int) -> None:
    """Measure as one rank; rank 0 prints rows as JSON."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    ranks = Ranks.of(dist.group.WORLD, current_platform())
    made = {name: load_target(target)(ranks, "cpu") for name, target in COMMUNICATORS.items()}
    rows = list[dict[str, Any]]()
    for dtype in (torch.bfloat16, torch.float32):
        for num_bytes in SIZES:
            x = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype)
            times: dict[str, list[float]] = {name: [] for name in made}
            rates = list[float]()
            few = max(3, min(rounds, int(SECONDS * 2e9 / num_bytes / size)))
            for _ in range(TURNS):
                dist.barrier()
                rates.append(copied(num_bytes, few))
                for name, communicator in made.items():
                    dist.barrier()
                    timed(communicator, x, few, times[name])
            row: dict[str, Any] = {
                "ranks": size,
                "dtype": str(dtype).removeprefix("torch."),
                "bytes": num_bytes,
                "copy GB/s": statistics.median(rates) / 1e9,
            }
            for name, some in times.items():
                row[name], row[f"{name} p90"] = quantiles(some)
            rows.append(row)
    if rank == 0:
        print(json.dumps(rows))
    for communicator in made.values():
        communicator.close()


def measured(size: int, rounds: int) -> list[dict[str, Any]]:
    """Start the ranks, and return the rows of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--folder", folder, "--rounds", str(rounds)]
        processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--ranks", str(size)],
                stdout=subprocess.PIPE if rank == 0 else None,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(size)
        ]
        out = processes[0].communicate()[0]
        for process in processes:
            process.wait()
        rows: list[dict[str, Any]] = json.loads(out.splitlines()[-1])
        return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a table of Markdown; times are in microseconds, with the 90th percentile."""
    lines = [
        "| ranks | dtype | KiB | gloo | shared memory | ratio | GB/s, counted | of a copy |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        own, other = row["shared memory"], row["gloo"]
        num = row["ranks"]
        rate = (5 * num - 2) / num * row["bytes"] / own / 1e3
        lines.append(
            f"| {row['ranks']} | {row['dtype']} | {row['bytes'] >> 10} "
            f"| {other:.0f} ({row['gloo p90']:.0f}) | {own:.1f} ({row['shared memory p90']:.1f}) "
            f"| {other / own:.0f} | {rate:.1f} | {rate / row['copy GB/s']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse arguments, and measure as a rank or as who starts them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        return run(given.rank, given.ranks[0], given.folder, given.rounds)
    rows = [row for size in given.ranks for row in measured(size, given.rounds)]
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
