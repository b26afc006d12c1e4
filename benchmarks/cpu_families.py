"""Compare decode and prefill of several model families with transformers, on random weights.

    python benchmarks/cpu_families.py DIR [--shapes qwen3.5-0.8b ...] [--threads 2] [--rounds 5]

The models are written to DIR in bfloat16 and kept. Both engines run in this process and take turns,
so that changes of the machine's speed affect both. Results are medians over the rounds, and ratios
are those within a round. `decode` is greedy steps after 128 tokens, `prefill` the first token after
512. transformers runs eagerly with its own cache, as in `generate`, and with its own fallbacks for
kernels that are not installed, such as those of linear attention.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cpu_models import write_hugging_face
from interposer_engine import LanguageModel, load
from random_model import SHAPES

CONTEXT, STEPS, PROMPT = 128, 32, 512
KINDS = ("qwen3-0.6b", "qwen3-moe-16e", "gemma-3-1b", "qwen3.5-0.8b", "mamba2-370m")


Run = Callable[[list[int], int], None]


def seconds(run: Run, prompt: list[int], steps: int) -> float:
    began = time.perf_counter()
    run(prompt, steps)
    return time.perf_counter() - began


def ours(lm: LanguageModel, prompt: list[int], steps: int) -> None:
    lm.generate([prompt], max_new_tokens=steps, ignore_eos=True, temperature=0.0)


@torch.inference_mode()
def theirs(model: Any, prompt: list[int], steps: int) -> None:
    options = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False}
    model.generate(torch.tensor([prompt]), pad_token_id=0, **options)


def compared(folder: Path, rounds: int) -> dict[str, Any]:
    lm = load(folder, dtype="bfloat16", max_sequences=1, cache_tokens=1024)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    prompt = [1 + n % 200 for n in range(PROMPT)]
    runs: dict[str, Run] = {
        "interposer": lambda tokens, steps: ours(lm, tokens, steps),
        "transformers": lambda tokens, steps: theirs(model, tokens, steps),
    }
    found: dict[str, dict[str, list[float]]] = {n: {"decode": [], "prefill": []} for n in runs}
    short = prompt[:CONTEXT]
    for run in runs.values():
        run(short, 2)  # what is made on first use
    for number in range(rounds):
        for name in [*runs][:: 1 if number % 2 else -1]:
            run, rows = runs[name], found[name]
            first = seconds(run, short, 1)
            rows["decode"].append(STEPS / (seconds(run, short, 1 + STEPS) - first))
            rows["prefill"].append(PROMPT / seconds(run, prompt, 1))
    told: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    for row in ("decode", "prefill"):
        mine, other = found["interposer"][row], found["transformers"][row]
        told[row] = {
            "tokens_per_second": round(statistics.median(mine), 1),
            "of_transformers": round(statistics.median(other), 1),
            "ratio": round(statistics.median(a / b for a, b in zip(mine, other, strict=True)), 2),
        }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", nargs="+", default=KINDS, choices=SHAPES)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    for shape in options.shapes:
        folder = options.folder / shape
        if not folder.exists():
            write_hugging_face(SHAPES[shape](), folder)
        print(json.dumps({shape: compared(folder, options.rounds)}), flush=True)
    print(f"threads {options.threads}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
