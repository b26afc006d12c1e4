"""Bytes of weights per second of a model that exceeds its memory, over what the disk reads.

    python benchmarks/offload.py MODEL_DIR [--resident 30%] [--limit 700] [--rounds 7]

Rounds of steps alternate with a plain sequential read of the same packed file past the system's
cache (``O_DIRECT``, 4 MiB at a time, one thread), as ``dd iflag=direct bs=4M`` does it. The bytes
of a round are those that the system counts for this process. With ``--limit`` it is in a control
group with so much memory, and ``--resident no`` leaves the model to the system's cache.
"""

from __future__ import annotations

import argparse
import mmap
import os
import re
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from interposer import Config, effective_config
from interposer.tooling import default_store
from interposer_engine import LanguageModel, load
from memory_limit import limited

_PIECE_BYTES = 4 << 20


def main() -> None:
    """Print a line per round, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--resident", default="30%", help="a size, a share of the weights, or no")
    parser.add_argument("--limit", type=int, help="MiB of memory, on top of what the process has")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="in a round")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    forget()
    with nullcontext() if arguments.limit is None else limited(arguments.limit << 20):
        lm = load(
            arguments.model_dir,
            quantization=arguments.quantization,
            offload=False if arguments.resident == "no" else arguments.resident,
            cache_tokens=1024,
            max_sequences=1,
            config=Config(packed="on"),
        )
        for note in lm.resolver.notes:
            print(note)
        measure(lm, packed_file(), arguments.rounds, arguments.steps)


def measure(lm: LanguageModel, path: Path, rounds: int, steps: int) -> None:
    """Print the rates of steps and of plain reads, in turns."""
    ratios, rates = [], []
    generate(lm, 2)
    for number in range(rounds):
        plain = direct_rate(path)
        first, start = bytes_read(), time.perf_counter()
        generate(lm, steps)
        seconds = time.perf_counter() - start
        count = bytes_read() - first
        rate = count / seconds
        plain = (plain + direct_rate(path)) / 2
        ratios.append(rate / plain)
        rates.append(steps / seconds)
        print(
            f"round {number}: {rate / 1e9:.2f} GB/s of weights, disk {plain / 1e9:.2f} GB/s, "
            f"x{ratios[-1]:.2f}, {rates[-1]:.2f} steps/s, {count / steps / 2**20:.0f} MiB a step"
        )
    print(
        f"median x{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
        f"{statistics.median(rates):.2f} steps/s"
    )


def generate(lm: LanguageModel, steps: int) -> None:
    """Run so many steps."""
    lm.generate([[1, 2, 3]], max_new_tokens=steps, ignore_eos=True)


def bytes_read() -> int:
    """Return the bytes that this process has had read from disks."""
    text = Path("/proc/self/io").read_text(encoding="ascii")
    found = re.search(r"^read_bytes: (\d+)", text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def packed_file() -> Path:
    """Return the packed file that this process has mapped."""
    text = Path("/proc/self/maps").read_text(encoding="utf-8")
    found = re.findall(r" (/.*packed.*\.safetensors)$", text, re.MULTILINE)
    return Path(found[0])


def forget() -> None:
    """Drop packed files from the system's cache, in which they would count for nobody's limit."""
    for path in (default_store(effective_config(None)).folder / "packed").glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def direct_rate(path: Path) -> float:
    """Return the bytes per second of a plain read."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    piece, done = mmap.mmap(-1, _PIECE_BYTES), 0
    start = time.perf_counter()
    while count := os.preadv(file, [piece], done):
        done += count
        if count < _PIECE_BYTES:
            break
    seconds = time.perf_counter() - start
    os.close(file)
    return done / seconds


if __name__ == "__main__":
    main()
