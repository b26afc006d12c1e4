"""Time in which a trainer in another process renews the weights of a model, as JSON lines.

    python benchmarks/weight_updates.py MODEL_DIR [--quantization none int8] [--rounds 5]

A second process holds the tensors of the checkpoint and sends them with ``send_weights`` over gloo.
``update_s`` is the time of ``update_weights`` that receives them. Plain broadcasts over the same
group take turns with it, of as many bytes, one after another: ``tensors_s`` of each tensor from
its own memory to other memory of its own, which is the time that the bytes take; ``cached_s`` of
one bucket again and again, which stays in a cache, as weights cannot. Figures are
medians of the rounds behind a first one, ratios those of ratios within a round. The goal is below
2. With ``keeps_memory`` the memory of weights that are replaced is kept for the next ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from interposer import Config
from interposer_engine import Checkpoint, WeightsFrom, load, send_weights

MIB = 2**20


def join(store: Path, rank: int) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(minutes=2)
    )


def plain_seconds(parts: Iterable[torch.Tensor]) -> float:
    """Return the time of broadcasts from rank 0, one after another."""
    distributed.barrier()
    started = time.perf_counter()
    for part in parts:
        distributed.broadcast(part, 0)
    distributed.barrier()
    return time.perf_counter() - started


def cached(num_bytes: int, bucket: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield one bucket until there were so many bytes."""
    for start in range(0, num_bytes, len(bucket)):
        yield bucket[: num_bytes - start]


def send(model_dir: Path, store: Path, rounds: int, bucket_bytes: int) -> None:
    """Be the trainer: the other side of ``measured``."""
    checkpoint = Checkpoint.open(model_dir)
    tensors = {name: tensor.clone() for name, tensor in checkpoint.stream()}
    bucket = torch.zeros(bucket_bytes, dtype=torch.uint8)
    join(store, 0)
    for _ in range(rounds + 1):
        plain_seconds(tensors.values())
        plain_seconds(cached(checkpoint.num_bytes, bucket))
        distributed.barrier()
        send_weights(tensors, bucket_bytes=bucket_bytes)


def measured(
    model_dir: Path, method: str, rounds: int, bucket_bytes: int, keeps: bool
) -> dict[str, object]:
    """Return the medians of a model that is held with this quantization."""
    quantization = None if method == "none" else method
    lm = load(
        model_dir,
        "bfloat16",
        config=Config(packed="off"),
        cache_tokens=64,
        quantization=quantization,
    )
    checkpoint = Checkpoint.open(model_dir)
    others = [tensor.clone() for _, tensor in checkpoint.stream()]
    bucket = torch.zeros(bucket_bytes, dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        options = ["--rounds", str(rounds), "--bucket-mib", str(bucket_bytes / MIB)]
        command = [sys.executable, __file__, str(model_dir), *options, "--send", str(store)]
        trainer = subprocess.Popen(command)
        join(store, 1)
        tensors, buckets, updates = [], [], []
        for _ in range(rounds + 1):
            tensors.append(plain_seconds(others))
            buckets.append(plain_seconds(cached(checkpoint.num_bytes, bucket)))
            distributed.barrier()
            started = time.perf_counter()
            lm.update_weights(WeightsFrom(keeps_memory=keeps))
            updates.append(time.perf_counter() - started)
        trainer.wait()
        distributed.destroy_process_group()
    del tensors[0], buckets[0], updates[0]
    found = {
        "quantization": method,
        "keeps_memory": keeps,
        "mib": round(checkpoint.num_bytes / MIB),
        "bucket_mib": round(bucket_bytes / MIB, 2),
        "update_s": round(statistics.median(updates), 3),
    }
    for name, plain in (("tensors", tensors), ("cached", buckets)):
        ratios = sorted(update / base for update, base in zip(updates, plain, strict=True))
        found |= {
            f"{name}_s": round(statistics.median(plain), 3),
            f"{name}_ratio": round(statistics.median(ratios), 2),
            f"{name}_ratios": [round(ratio, 2) for ratio in ratios],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--quantization", nargs="*", default=["none", "int8"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=float, nargs="*", default=[32])
    parser.add_argument("--send", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = [round(mib * MIB) for mib in given.bucket_mib]
    if given.send is not None:
        torch.set_num_threads(1)
        send(given.model_dir, given.send, given.rounds, sizes[0])
        return
    for method in given.quantization:
        for bucket_bytes in sizes:
            for keeps in (False, True):
                found = measured(given.model_dir, method, given.rounds, bucket_bytes, keeps)
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
