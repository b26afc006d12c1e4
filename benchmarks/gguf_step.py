"""Time a GGUF file's embedding and lm_head in a decode step, as blocks and in 16 bits.

    python benchmarks/gguf_step.py FILE

The file is loaded twice, the second time with both dequantized while they are read. Steps of the
two take turns, so that whatever else the machine does falls on both alike; of one thread, processor
time counts. ``held`` is all memory that layers hold, each once; benchmarks/loading.py measures what
loading takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils import _pytree

from interposer_engine import LanguageModel, SamplingParams, load
from interposer_gguf import _placement as placement

CONTEXT, STEPS = 128, 256


@contextmanager
def tables_in_16_bits() -> Iterator[None]:
    """Leave nothing but the projections in blocks."""
    names = placement._IN_BLOCKS
    placement._IN_BLOCKS = ("_proj.weight",)
    try:
        yield
    finally:
        placement._IN_BLOCKS = names


def loaded(path: Path, in_blocks: bool) -> LanguageModel:
    if in_blocks:
        return load(path, "bfloat16", cache_tokens=2 * (CONTEXT + STEPS), max_sequences=1)
    with tables_in_16_bits():
        return loaded(path, True)


def held_bytes(lm: LanguageModel) -> int:
    """Return the bytes of the tensors that the layers of a model hold."""
    found: dict[int, int] = {}
    for layer in lm.engine.model.modules():
        for leaf in _pytree.tree_leaves(list(vars(layer).values())):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


class Decoding:
    """A request, decoded step by step; a new one begins after the longest context."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self.left = 0

    def step(self) -> float:
        """Return the seconds of processor time of a step."""
        if not self.left:
            params = SamplingParams(max_new_tokens=STEPS + 1, ignore_eos=True)
            sequence = self.lm.engine.add(list(range(1, CONTEXT + 1)), params)
            while not sequence.output:
                self.lm.engine.step()
            self.left = STEPS
        start = time.thread_time()
        self.lm.engine.step()
        self.left -= 1
        return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {"in their blocks": True, "in 16 bits": False}
    models = [loaded(options.file, kind) for kind in kinds.values()]
    taken: list[list[float]] = [[] for _ in models]
    with torch.inference_mode():
        decodings = [Decoding(lm) for lm in models]
        for _ in range(options.rounds):
            for decoding, times in zip(decodings, taken, strict=True):
                times.append(decoding.step())
    print("embedding and output   held MiB   step ms (lowest)")
    for name, lm, times in zip(kinds, models, taken, strict=True):
        median, best = statistics.median(times) * 1e3, min(times) * 1e3
        print(f"{name:20}{held_bytes(lm) / 2**20:11.1f}{median:9.2f} ({best:.2f})")


if __name__ == "__main__":
    main()
