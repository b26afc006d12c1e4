"""Time and memory of loading a model directory, as JSON, a line for each quantization.

    python benchmarks/loading.py MODEL_DIR [--dtype bfloat16] [--quantization none int8 int4 w4a8]

Nothing is mapped that another load has packed; ``models_starting.py`` measures that.

Memory is that of this process alone: anonymous pages, sampled every millisecond. `load_peak` is
what they rose above those at the beginning of the loading, after a plan of the model that imported
what it needs; `process_peak` is all of them, those of Python and torch included. Pages of mapped
files are not among them, because the system takes those back. `held` is what the layers refer to
in the end, `cache` the keys and values, `source` the checkpoint. The goal is a `process_peak` of at
most `peak_bound`: what is held, the cache and 350 MB.

Then the model is loaded again, now that its file and its memory are at hand: `load` is the
processor time of that, in one thread. The goal is at most `load_bound`: 1.5 times what it takes to
read the file once into a buffer and to copy what is held to new memory. At last the weights are
updated with the same ones, all at once and block by block.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from interposer import Config
from interposer_engine import Checkpoint, LanguageModel, load, plan

MIB = 2**20
UNPACKED = Config(packed="off")
BUFFER_BYTES = 8 * MIB
MOST_BESIDE_BYTES = 350_000_000
MOST_TIME = 1.5


class PeakMemory:
    """The largest number of anonymous bytes while it is open, above those at its start."""

    def __enter__(self) -> PeakMemory:
        self.start = self.peak = anonymous_bytes()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self.peak = max(self.peak, anonymous_bytes())

    @property
    def risen_bytes(self) -> int:
        return self.peak - self.start

    def _watch(self) -> None:
        while not self.ended.wait(0.001):
            self.peak = max(self.peak, anonymous_bytes())


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def held(lm: LanguageModel) -> list[torch.Tensor]:
    """Return a tensor of each memory that attributes of the model's modules refer to."""
    leaves = _pytree.tree_leaves([vars(module) for module in lm.engine.model.modules()])
    found: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is torch.strided:
                memory = leaf.untyped_storage()
                found[memory.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(memory)
            else:
                found[id(leaf)] = leaf
    return list(found.values())


def num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def least_seconds(paths: tuple[Path, ...], tensors: list[torch.Tensor]) -> tuple[float, float]:
    """Return the processor time of reading files once, and of copying tensors to new memory."""
    buffer = bytearray(BUFFER_BYTES)
    started = time.thread_time()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    read = time.thread_time() - started
    started = time.thread_time()
    copies = [tensor.clone() for tensor in tensors]
    copied = time.thread_time() - started
    del copies
    return read, copied


def block(name: str) -> str:
    """Return the block that a tensor belongs to, or its own name."""
    found = re.match(r"model\.layers\.\d+\.", name)
    return found[0] if found else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", nargs="*", default=["none"])
    arguments = parser.parse_args()
    if len(arguments.quantization) == 1:
        print(json.dumps(measured(arguments.model_dir, arguments.dtype, *arguments.quantization)))
        return
    for method in arguments.quantization:  # each in a process of its own
        command = [sys.executable, __file__, str(arguments.model_dir), "--dtype", arguments.dtype]
        subprocess.run([*command, "--quantization", method], check=True)


def measured(model_dir: Path, dtype: str, method: str) -> dict[str, object]:
    """Return the time and memory of loading with this quantization, and the bounds of both."""
    torch.set_num_threads(1)
    quantization = None if method == "none" else method
    settings: dict[str, Any] = {"cache_tokens": 64, "quantization": quantization}
    plan(model_dir, dtype, quantization=quantization)
    started = time.perf_counter()
    with PeakMemory() as memory:
        lm = load(model_dir, dtype, config=UNPACKED, **settings)
        seconds = time.perf_counter() - started
    checkpoint = Checkpoint.open(model_dir)
    held_bytes, cache_bytes = num_bytes(held(lm)), num_bytes(lm.engine.runner.caches)
    del lm
    gc.collect()
    started = time.thread_time()
    lm = load(model_dir, dtype, config=UNPACKED, **settings)
    load_seconds = time.thread_time() - started
    read, copied = least_seconds(checkpoint.shards, held(lm))
    with PeakMemory() as update:
        started = time.perf_counter()
        lm.update_weights(checkpoint.stream())
        update_seconds = time.perf_counter() - started
    with PeakMemory() as blocks:
        for _, tensors in itertools.groupby(checkpoint.stream(), key=lambda item: block(item[0])):
            lm.update_weights(tensors)
    figures = {
        "source_mib": checkpoint.num_bytes / MIB,
        "held_mib": held_bytes / MIB,
        "cache_mib": cache_bytes / MIB,
        "load_peak_mib": memory.risen_bytes / MIB,
        "process_peak_mib": memory.peak / MIB,
        "peak_bound_mib": (held_bytes + cache_bytes + MOST_BESIDE_BYTES) / MIB,
        "first_load_s": seconds,
        "load_s": load_seconds,
        "read_s": read,
        "copy_s": copied,
        "load_bound_s": MOST_TIME * (read + copied),
        "update_peak_mib": update.risen_bytes / MIB,
        "update_s": update_seconds,
        "update_by_block_peak_mib": blocks.risen_bytes / MIB,
    }
    return {"quantization": method, **{name: round(figure, 2) for name, figure in figures.items()}}


if __name__ == "__main__":
    main()
