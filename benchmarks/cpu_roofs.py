"""Measure the roofs of the processor: read bandwidth of memory, and bfloat16 GEMM.

    python benchmarks/cpu_roofs.py [--threads N] [--rounds N]

Prints JSON. Bandwidth is that of the fastest of several ways to read far more than the caches
hold; each is the median of its rounds. `interposer_engine.roofline` measures.
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
    """Return the roofs of the host with so many threads; few bytes are for rehearsals."""
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
