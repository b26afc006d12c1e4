"""Compile a checkpoint by inductor and print what came of it as JSON: tokens, graphs, cache hits.

In a process of its own: what inductor keeps in the memory of a process is no warm start.

TORCHINDUCTOR_CACHE_DIR=FOLDER python models/engine/tests/inductor_model.py CHECKPOINT STORE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from interposer import Config
from interposer_engine import load

OWN = ("interposer-cpu", "interposer-models", "interposer-ops", "interposer-quantization")
PROMPTS = [[3, 1, 4], [2, 7]]


def main() -> None:
    path, store = map(Path, sys.argv[1:])
    found = {}
    for backend in ("off", "inductor"):
        config = Config(compile=backend, plugins=OWN, canary="off", cache_dir=store)
        lm = load(path, config=config, cache_tokens=512)
        done = lm.generate(PROMPTS, max_new_tokens=3, ignore_eos=True)
        found[backend] = [completion.token_ids for completion in done]
    counted = torch._dynamo.utils.counters
    assert lm.engine.runner.compiled is not None
    json.dump(
        {
            "plain": found["off"],
            "compiled": found["inductor"],
            "graphs": lm.engine.runner.compiled.graphs,
            "hits": counted["inductor"]["fxgraph_cache_hit"],
            "misses": counted["inductor"]["fxgraph_cache_miss"],
            "graph_hits": counted["aot_autograd"]["autograd_cache_hit"],
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
