"""Prints what native kernels and a model do in this Python, as JSON.

    python conform.py MODEL PROMPT NUM_TOKENS

Run inside a Python of another architecture, in one process: importing torch in an emulator takes
minutes. How far it got is said on the standard error output.

At the best level of instructions every trial is run. At each level below it are a few cases of
every kernel: all cases are run there against golden vectors, by a program that needs no torch, and
what is left to see is that the library does switch levels here.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import Any

import torch

from interposer import Config, current_registry
from interposer.records import Kernel
from interposer_cpu import CPUPlatform, native
from interposer_engine import load
from interposer_testing import conformance

# What compiles needs a compiler, which is not there; records are the same everywhere.
ASPECTS = ("numerics", "threads", "determinism", "batch invariance")

# An emulator starts no processes of its own architecture.
CONFIG = Config(isolation="off")

# Cases of each kernel at a level below the best.
FEW = 6


def conform() -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return the number of trials of each native kernel at each level, and the failures."""
    ran, faults = {level: Counter[str]() for level in native.levels()}, list[str]()
    *lower, best = native.levels()
    device = CPUPlatform().devices()[0]
    registry = current_registry(CONFIG)
    said = ""
    for trial in conformance(registry, device, distribution="interposer-cpu", quick=True):
        record = trial.candidate.record
        if not isinstance(record, Kernel) or "._kernels." not in record.target or not trial.verdict:
            continue
        if trial.aspect not in ASPECTS:
            continue
        if record.name != said:
            tell(said := record.name)
        few = trial.aspect == "numerics" and all(ran[level][said] < FEW for level in lower)
        for level in [*lower, best] if few else [best]:
            native.force_level(level)
            ran[level][said] += 1
            faults += [f"{trial} at level {level}: {fault}" for fault in trial.run()]
    return {level: dict(counts) for level, counts in ran.items()}, faults


def tell(what: str) -> None:
    print(f"{time.process_time():7.0f} s of processor time: {what}", file=sys.stderr, flush=True)


def main(model: str, prompt: str, num_tokens: str) -> None:
    found: dict[str, Any] = {
        "byteorder": sys.byteorder,
        "torch": torch.__version__,
        "absent": native.why_absent(),
        "levels": native.levels(),
    }
    tell("generating")
    language_model = load(model, dtype="float32", max_sequences=1, config=CONFIG)
    (completion,) = language_model.generate(prompt, max_new_tokens=int(num_tokens))
    found["tokens"] = list(completion.token_ids)
    found["ran"], found["faults"] = conform()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
