"""Measure the time to a first token behind a common beginning, with a prefix cache and without.

    python benchmarks/prefix_cache.py DIR [--shape qwen3-0.6b] [--common 2000] [--rounds 5]

Shapes with windows and with recurrent states are gemma-3-1b, qwen3-next-cut and mamba2-370m.

DIR gets a model of random weights and keeps it. Each round asks for one token behind a beginning
that is new in that round, then for one behind the same beginning and another end, with each of
both models in turn. Last it decodes with both, so that what the cache costs is seen. With
``--alone`` the model without a cache is left out, as what begins anew takes equally long.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from cpu_models import write_hugging_face
from interposer_engine import LanguageModel, load
from random_model import SHAPES

END, STEPS = 20, 32


def seconds(lm: LanguageModel, prompt: list[int], steps: int = 1) -> float:
    began = time.perf_counter()
    lm.generate([prompt], max_new_tokens=steps, ignore_eos=True, temperature=0.0)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dir", type=Path)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--common", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", action="store_true")
    given = parser.parse_args()
    folder = given.dir / given.shape
    if not folder.exists():
        write_hugging_face(SHAPES[given.shape](), folder)
    room: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_sequences": 1,
        "cache_tokens": 4 * (given.common + 64),
    }
    models = {"shared": load(folder, **room, prefix_cache=True)}
    if not given.alone:
        models["plain"] = load(folder, **room)
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(1, 200) for _ in range(count)]

    for lm in models.values():
        seconds(lm, tokens(64), 2)  # what is made on first use
    found: dict[str, list[float]] = {}
    for number in range(given.rounds):
        common = tokens(given.common)
        first, second = common + tokens(END), common + tokens(END)
        for name in [*models][:: 1 if number % 2 else -1]:
            lm = models[name]
            found.setdefault(f"{name}, first", []).append(seconds(lm, first))
            found.setdefault(f"{name}, second", []).append(seconds(lm, second))
            alone = tokens(48)
            spent = seconds(lm, alone, 1 + STEPS) - seconds(lm, [*alone[:47], 0])
            found.setdefault(f"{name}, a decoded token", []).append(spent / STEPS)
    for label, values in found.items():
        print(f"{label:24} {1e3 * statistics.median(values):9.2f} ms")
    for label, pair in {
        "first / second, shared": ("shared, first", "shared, second"),
        "decoding, shared / plain": ("shared, a decoded token", "plain, a decoded token"),
    }.items():
        if pair[1] not in found:
            continue
        ratios = [a / b for a, b in zip(*(found[name] for name in pair), strict=True)]
        print(f"{label:24} {statistics.median(ratios):9.3f} (median of {given.rounds} pairs)")
    print(models["shared"].engine.prefixes)


if __name__ == "__main__":
    main()
