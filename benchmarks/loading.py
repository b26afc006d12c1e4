"""Time and memory of loading a model directory, as JSON.

    python benchmarks/loading.py MODEL_DIR [--dtype bfloat16] [--quantization fp8]

Memory is that of this process alone: anonymous pages, sampled every millisecond, above what was
there when the loading began, after a plan of the model that imported everything. Pages of mapped
files are not among them, because the system takes those back. `held` is what the layers refer to
in the end, `source` the checkpoint. The weights are then updated with the same ones, all at once
and block by block.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from interposer_models import LanguageModel
from interposer_models.checkpoint import Checkpoint
from interposer_models.loader import load, plan

MIB = 2**20


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


def held_bytes(lm: LanguageModel) -> int:
    """Return the size of all memory that attributes of the model's modules refer to."""
    leaves = _pytree.tree_leaves([vars(module) for module in lm.engine.model.modules()])
    sizes: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is torch.strided:
                memory = leaf.untyped_storage()
                sizes[memory.data_ptr()] = memory.nbytes()
            else:
                sizes[id(leaf)] = leaf.numel() * leaf.element_size()
    return sum(sizes.values())


def block(name: str) -> str:
    """Return the block that a tensor belongs to, or its own name."""
    found = re.match(r"model\.layers\.\d+\.", name)
    return found[0] if found else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    arguments = parser.parse_args()
    settings: dict[str, Any] = {"cache_tokens": 64, "quantization": arguments.quantization}
    plan(arguments.model_dir, arguments.dtype, quantization=arguments.quantization)
    started = time.perf_counter()
    with PeakMemory() as memory:
        lm = load(arguments.model_dir, arguments.dtype, **settings)
        seconds = time.perf_counter() - started
    checkpoint = Checkpoint.open(arguments.model_dir)
    with PeakMemory() as update:
        started = time.perf_counter()
        lm.update_weights(checkpoint.stream())
        update_seconds = time.perf_counter() - started
    with PeakMemory() as blocks:
        for _, tensors in itertools.groupby(checkpoint.stream(), key=lambda item: block(item[0])):
            lm.update_weights(tensors)
    figures = {
        "source_mib": checkpoint.num_bytes / MIB,
        "held_mib": held_bytes(lm) / MIB,
        "load_peak_mib": memory.risen_bytes / MIB,
        "load_s": seconds,
        "update_peak_mib": update.risen_bytes / MIB,
        "update_s": update_seconds,
        "update_by_block_peak_mib": blocks.risen_bytes / MIB,
    }
    print(json.dumps({name: round(figure, 2) for name, figure in figures.items()}))


if __name__ == "__main__":
    main()
