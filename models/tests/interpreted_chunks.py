"""Generate from a checkpoint on Triton's interpreter; print the tokens and the kernels as JSON.

In a process of its own with TRITON_INTERPRET=1: triton decides when it is imported.

python models/tests/interpreted_chunks.py CHECKPOINT
"""

from __future__ import annotations

import json
import sys

from interposer import Config
from interposer_engine import load


def main(path: str) -> None:
    plugins = ("interposer-models", "interposer-ops", "interposer-quantization")
    config = Config(platform="interpreter", plugins=plugins)
    lm = load(path, "float32", config=config, cache_tokens=128, max_sequences=2)
    found = lm.generate([list(range(3, 18)), [1, 2]], max_new_tokens=3, ignore_eos=True)
    names = [choice.chosen.name for choice, _ in lm.resolver.choices.values()]
    json.dump({"tokens": [each.token_ids for each in found], "chosen": names}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
