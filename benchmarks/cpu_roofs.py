"""Measure the processor's roofline: memory read bandwidth and bfloat16 GEMM throughput.

    python benchmarks/cpu_roofs.py [--threads N] [--rounds N]

Prints JSON. The bandwidth is the best of several methods that read far more bytes than the caches
hold; every method's result is the median of its rounds. `interposer_engine.roofline` measures.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import torch

from interposer import Config, place
from interposer_engine.roofline import Roofs, measured_roofs

__all__ = ["READ_BYTES", "roofs_of"]

READ_BYTES = 512 << 20


def roofs_of(threads: int, rounds: int, read_bytes: int = READ_BYTES) -> Roofs:
    """Measure the roofline of the host with a number of threads; use few bytes for a rehearsal."""
    torch.set_num_threads(threads)
    side = 2048 if read_bytes == READ_BYTES else 256
    return measured_roofs(place(Config(platform="cpu")), rounds, read_bytes=read_bytes, side=side)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--read-mib", type=int, default=READ_BYTES >> 20)
    options = parser.parse_args()
    print(json.dumps(asdict(roofs_of(options.threads, options.rounds, options.read_mib << 20))))


if __name__ == "__main__":
    main()
