"""Prints what native kernels and a model do in this Python, as JSON.

    python conform.py MODEL PROMPT NUM_TOKENS

Run inside a Python of another architecture, in one process: importing torch in an emulator takes
longer than all that follows.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch

from interposer import Config, current_registry
from interposer.records import Kernel
from interposer.testing import conformance
from interposer_cpu import native
from interposer_cpu.platform import CPUPlatform
from interposer_models import load

# What compiles needs a compiler, which is not there; records are the same everywhere.
ASPECTS = ("numerics", "threads", "determinism", "batch invariance")

# An emulator starts no processes of its own architecture.
CONFIG = Config(isolation="off")


def conform() -> tuple[dict[str, int], list[str]]:
    """Return how many trials each native kernel took part in, and what failed of them."""
    ran, faults = Counter[str](), list[str]()
    device = CPUPlatform().devices()[0]
    registry = current_registry(CONFIG)
    for trial in conformance(registry, device, distribution="interposer-cpu", quick=True):
        record = trial.candidate.record
        if not isinstance(record, Kernel) or ".native" not in record.target or not trial.verdict:
            continue
        if trial.aspect not in ASPECTS:
            continue
        ran[record.name] += 1
        faults += [f"{trial}: {fault}" for fault in trial.run()]
    return dict(ran), faults


def main(model: str, prompt: str, num_tokens: str) -> None:
    found: dict[str, Any] = {
        "byteorder": sys.byteorder,
        "torch": torch.__version__,
        "absent": native.why_absent(),
        "levels": native.levels(),
    }
    language_model = load(model, dtype="float32", max_sequences=1, config=CONFIG)
    (completion,) = language_model.generate(prompt, max_new_tokens=int(num_tokens))
    found["tokens"] = list(completion.token_ids)
    found["ran"], found["faults"] = conform()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
