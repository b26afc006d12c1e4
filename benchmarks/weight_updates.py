"""Time in which a trainer in another process renews the weights of a model, as JSON lines.

    python benchmarks/weight_updates.py MODEL_DIR [--quantization none int8] [--rounds 5]

A second process holds the tensors of the checkpoint and sends them with ``send_weights`` over gloo.
``update_s`` is the time of ``update_weights`` that receives them, ``plain_s`` that of broadcasts of
as many bytes, of the same bucket size, one after another, over the same group. Both take turns, and
figures are medians of the rounds, the ratio that of ratios within a round. The goal is below 2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from interposer import Config
from interposer_models import Checkpoint, WeightsFrom, load, send_weights

MIB = 2**20


def join(store: Path, rank: int) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(minutes=2)
    )


def plain_seconds(num_bytes: int, bucket_bytes: int) -> float:
    """Return the time of broadcasts of so many bytes from rank 0."""
    bucket = torch.zeros(bucket_bytes, dtype=torch.uint8)
    distributed.barrier()
    started = time.perf_counter()
    for start in range(0, num_bytes, bucket_bytes):
        distributed.broadcast(bucket[: num_bytes - start], 0)
    distributed.barrier()
    return time.perf_counter() - started


def send(model_dir: Path, store: Path, rounds: int, bucket_bytes: int) -> None:
    """Be the trainer: the other side of ``measured``."""
    checkpoint = Checkpoint.open(model_dir)
    tensors = {name: tensor.clone() for name, tensor in checkpoint.stream()}
    join(store, 0)
    for _ in range(rounds):
        plain_seconds(checkpoint.num_bytes, bucket_bytes)
        distributed.barrier()
        send_weights(tensors, bucket_bytes=bucket_bytes)


def measured(model_dir: Path, method: str, rounds: int, bucket_bytes: int) -> dict[str, object]:
    """Return the medians of a model that is held with this quantization."""
    quantization = None if method == "none" else method
    lm = load(
        model_dir,
        "bfloat16",
        config=Config(packed="off"),
        cache_tokens=64,
        quantization=quantization,
    )
    num_bytes = Checkpoint.open(model_dir).num_bytes
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        options = ["--rounds", str(rounds), "--bucket-mib", str(bucket_bytes // MIB)]
        command = [sys.executable, __file__, str(model_dir), *options, "--send", str(store)]
        trainer = subprocess.Popen(command)
        join(store, 1)
        plain, updates = [], []
        for _ in range(rounds):
            plain.append(plain_seconds(num_bytes, bucket_bytes))
            distributed.barrier()
            started = time.perf_counter()
            lm.update_weights(WeightsFrom())
            updates.append(time.perf_counter() - started)
        trainer.wait()
        distributed.destroy_process_group()
    ratios = [update / base for update, base in zip(updates, plain, strict=True)]
    return {
        "quantization": method,
        "mib": round(num_bytes / MIB),
        "bucket_mib": bucket_bytes // MIB,
        "plain_s": round(statistics.median(plain), 2),
        "update_s": round(statistics.median(updates), 2),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--quantization", nargs="*", default=["none", "int8"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, nargs="*", default=[32])
    parser.add_argument("--send", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = [mib * MIB for mib in given.bucket_mib]
    if given.send is not None:
        torch.set_num_threads(1)
        send(given.model_dir, given.send, given.rounds, sizes[0])
        return
    for method in given.quantization:
        for bucket_bytes in sizes:
            print(json.dumps(measured(given.model_dir, method, given.rounds, bucket_bytes)))


if __name__ == "__main__":
    main()
