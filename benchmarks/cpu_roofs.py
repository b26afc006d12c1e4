"""Measure the processor's roofline: memory read bandwidth and GEMM throughput.

    python benchmarks/cpu_roofs.py [--threads N] [--rounds N] [--dtype float32]

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


def roofs_of(
    threads: int,
    rounds: int,
    read_bytes: int = READ_BYTES,
    dtype: torch.dtype = torch.bfloat16,
) -> Roofs:
    """Measure the roofline of the host with a number of threads; use few bytes for a rehearsal."""
    torch.set_num_threads(threads)
    side = 2048 if read_bytes == READ_BYTES else 256
    placement = place(Config(platform="cpu"))
    return measured_roofs(placement, rounds, dtype=dtype, read_bytes=read_bytes, side=side)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--read-mib", type=int, default=READ_BYTES >> 20)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    roofs = roofs_of(options.threads, options.rounds, options.read_mib << 20, dtype)
    print(json.dumps(asdict(roofs)))


if __name__ == "__main__":
    main()
