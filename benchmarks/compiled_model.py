"""Time the first steps and the decoding of a model that torch compiles, beside the plain one.

Run it twice with one CACHE and different folders of torch's own: the second process has what the
first one left in the store, and nothing else.

TORCHINDUCTOR_CACHE_DIR=/tmp/one python benchmarks/compiled_model.py MODEL CACHE
TORCHINDUCTOR_CACHE_DIR=/tmp/two python benchmarks/compiled_model.py MODEL CACHE
"""

from __future__ import annotations

import argparse
import os
import time

import torch

from interposer import Config
from interposer_engine import LanguageModel, load

PROMPT = [1, 2, 3, 4]


def busy_seconds() -> float:
    """Return the processor's time of this process and of those that it waited for."""
    return sum(os.times()[:4])


def decoded(lm: LanguageModel, count: int) -> float:
    """Return tokens per second of one sequence."""
    start = time.perf_counter()
    lm.generate([PROMPT], max_new_tokens=count, ignore_eos=True)
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("cache", help="the store; it may be empty")
    parser.add_argument("--backend", default="on")
    parser.add_argument("--tokens", type=int, default=64)
    asked = parser.parse_args()
    plain, compiled = (
        load(asked.model, config=Config(compile=how, cache_dir=asked.cache), cache_tokens=1024)
        for how in ("off", asked.backend)
    )
    start, busy = time.perf_counter(), busy_seconds()
    compiled.generate([PROMPT], max_new_tokens=3, ignore_eos=True)
    print(f"first steps: {time.perf_counter() - start:.1f} s, {busy_seconds() - busy:.1f} s busy")
    counted = torch._dynamo.utils.counters["inductor"]
    for name in ("fxgraph_cache_hit", "fxgraph_cache_miss"):
        print(f"{name}: {counted[name]}")
    plain.generate([PROMPT], max_new_tokens=3, ignore_eos=True)
    for name, lm in (("plain", plain), ("compiled", compiled)):
        speeds = sorted(decoded(lm, asked.tokens) for _ in range(5))
        print(f"{name}: {speeds[2]:.0f} tokens/s, from {speeds[0]:.0f} to {speeds[-1]:.0f}")


if __name__ == "__main__":
    main()
