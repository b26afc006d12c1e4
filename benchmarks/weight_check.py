"""Time that the search of weights for NaN and infinity adds to loading, as JSON lines.

    python benchmarks/weight_check.py MODEL_DIR [--rounds 12] [--threads 1] [--dtype bfloat16]

Loads without the search and with it take turns in one process, after one of each that is not
counted, so that both find the same memory and the same machine; their order changes from round
to round. Ways: ``warm``, the file lies in the system's cache; ``cold``, it is dropped from there
before each load; ``packed``, weights are mapped from a packed file, which remembers the search.

``copies`` is the part that the search is in, without the noise of whole loads: each tensor is
copied to memory at hand, plainly and with the search in turn; ``off_s`` and ``refuse_s`` are sums.

``ratio`` is the median over rounds of the time with the search by the time without, ``cpu_ratio``
that of processor time, ``same_ratio`` that of two loads without the search: the noise. The goal is
a ``ratio`` of at most 1.03.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Iterable
from itertools import permutations
from pathlib import Path
from statistics import median

import torch

from interposer import Config, place
from interposer_engine import Checkpoint, load

WAYS = ("copies", "warm", "cold", "packed")
# Of each round: a load with the search, and two without.
POLICIES = ("refuse", "off", "off again")
ORDERS = [*permutations(POLICIES)]


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Let the system forget the pages of files."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(model_dir: Path, dtype: str, config: Config) -> tuple[float, float]:
    """Return wall time and processor time of a load."""
    started, cpu_started = time.perf_counter(), time.process_time()
    lm = load(model_dir, dtype, config=config, cache_tokens=64)
    taken = time.perf_counter() - started, time.process_time() - cpu_started
    del lm
    gc.collect()
    return taken


def measured(model_dir: Path, dtype: str, way: str, rounds: int, folder: str) -> dict[str, object]:
    """Return the medians of one way to load."""
    configs = {
        policy: Config(
            packed="on" if way == "packed" else "off",
            weight_check=policy.split()[0],  # type: ignore[arg-type]
            cache_dir=folder,
        )
        for policy in POLICIES
    }
    shards = Checkpoint.open(model_dir).shards
    taken: list[dict[str, tuple[float, float]]] = []
    for number in range(rounds + 1):
        # The first load of all searches and packs: a file packed without would not be mapped.
        taken.append({})
        for policy in ORDERS[number % len(ORDERS)]:
            if way == "cold":
                drop_from_cache(shards)
            taken[-1][policy] = seconds(model_dir, dtype, configs[policy])
    del taken[0]

    def ratio(policy: str, part: int) -> float:
        return median(each[policy][part] / each["off"][part] for each in taken)

    return {
        "way": way,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "mib": sum(shard.stat().st_size for shard in shards) >> 20,
        "off_s": round(median(each["off"][0] for each in taken), 3),
        "refuse_s": round(median(each["refuse"][0] for each in taken), 3),
        "ratio": round(ratio("refuse", 0), 3),
        "cpu_ratio": round(ratio("refuse", 1), 3),
        "same_ratio": round(ratio("off again", 0), 3),
    }


def copies(model_dir: Path, rounds: int) -> dict[str, object]:
    """Return the medians of copying each tensor to memory at hand."""
    platform = place(Config(platform="cpu")).platform
    checkpoint = Checkpoint.open(model_dir)
    tensors = {name: tensor for name, tensor in checkpoint.stream() if tensor.nbytes >= 1 << 20}
    largest = max(tensor.nbytes for tensor in tensors.values())
    buffer = torch.zeros(largest, dtype=torch.uint8)
    taken: list[dict[str, float]] = []
    for number in range(rounds):
        taken.append(dict.fromkeys(POLICIES, 0.0))
        for tensor in tensors.values():
            target = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor)  # its pages are at hand then
            for policy in ORDERS[number % len(ORDERS)]:
                started = time.perf_counter()
                if policy == "refuse":
                    platform.copy_finite(target, tensor)
                else:
                    target.copy_(tensor)
                taken[-1][policy] += time.perf_counter() - started
    return {
        "way": "copies",
        "threads": torch.get_num_threads(),
        "off_s": round(median(each["off"] for each in taken), 3),
        "refuse_s": round(median(each["refuse"] for each in taken), 3),
        "ratio": round(median(each["refuse"] / each["off"] for each in taken), 3),
        "same_ratio": round(median(each["off again"] / each["off"] for each in taken), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for way in arguments.ways:
        if way == "copies":
            print(json.dumps(copies(arguments.model_dir, arguments.rounds)), flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            line = measured(arguments.model_dir, arguments.dtype, way, arguments.rounds, folder)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
