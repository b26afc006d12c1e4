"""Run a checkpoint on Triton's interpreter, plainly and compiled; print what came out as JSON.

In a process of its own with TRITON_INTERPRET=1: triton decides when it is imported.

python models/engine/tests/interpreted_model.py CHECKPOINT CACHE ADAPTER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from interposer import Config, explain
from interposer_engine import load

OWN = ("interposer-models", "interposer-ops", "interposer-quantization")
PROMPTS = [[3, 1, 4], [2, 7]]


def computed(
    path: Path, cache: Path, adapter: Path, compile: str, **kernels: Any
) -> dict[str, Any]:
    config = Config(
        platform="interpreter", plugins=OWN, cache_dir=cache, compile=compile, kernels=kernels
    )
    lm = load(path, "float32", config=config, cache_tokens=256, max_sequences=4)
    batch = lm.generate(PROMPTS, max_new_tokens=2, ignore_eos=True)
    logits = [] if lm.engine.runner.compiled else lm.logits(PROMPTS[0]).tolist()
    if not lm.engine.runner.compiled:
        lm.load_adapter("own", adapter)
    blocks: Any = lm.engine.model.model.layers
    return {
        "tokens": [completion.token_ids for completion in batch],
        "logits": logits,
        "adapted": lm.logits(PROMPTS[0], adapter="own").tolist() if lm.adapters else [],
        "graphs": lm.engine.runner.compiled.graphs if lm.engine.runner.compiled else 0,
        "kernels": sorted(
            choice.chosen.name
            for choice, _ in lm.resolver.choices.values()
            if choice.request.kind == "kernel" and not choice.idle
        ),
        "bound": getattr(blocks[0].input_layernorm.add_norm, "__name__", ""),
        "notes": str(explain(lm).head),
    }


def main() -> None:
    path, cache, adapter = map(Path, sys.argv[1:4])
    found = {
        way: computed(path, cache, adapter, compile)
        for way, compile in (("plain", "off"), ("compiled", "aot_eager"))
    }
    if "quantization_config" in json.loads((path / "config.json").read_text(encoding="utf-8")):
        fused = ("rms_norm", "fused_add_rms_norm", "silu_and_mul")
        apart = {f"{op}_quantize_fp8": "reference" for op in fused}
        found["apart"] = computed(path, cache, adapter, "off", **apart)
    found["ops"] = sorted(vars(torch.ops.interposer_kernels))  # type: ignore[assignment]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
