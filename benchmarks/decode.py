"""Prefill and decode speed beside transformers, on one model directory, in paired runs.

    python benchmarks/decode.py MODEL_DIR [--dtype float32] [--threads 2] [--rounds 7]

Every round runs all engines one after another in a new order, so that drift of the machine
hits all alike; the ratio is the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interposer_engine import LanguageModel, SamplingParams, load

Run = Callable[[list[list[int]], int], tuple[float, float]]
"""Prompts and new tokens to seconds of prefill and seconds of decode."""


@dataclass(frozen=True)
class Row:
    """One kind of work: ``batch`` prompts of ``prompt_tokens``, then ``new_tokens`` each."""

    batch: int
    prompt_tokens: int
    new_tokens: int


def interposer_run(lm: LanguageModel) -> Run:
    """Return a function that drives the engine step by step."""

    def run(prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        start = time.perf_counter()
        sequences = [lm.engine.add(prompt, params) for prompt in prompts]
        while not all(sequence.output for sequence in sequences):
            lm.engine.step()
        middle = time.perf_counter()
        while lm.engine.busy:
            lm.engine.step()
        return middle - start, time.perf_counter() - middle

    return run


def transformers_run(path: Path, dtype: torch.dtype, attention: str) -> Run:
    """Return a function that uses ``generate``: prefill alone, then the rest of its time."""
    from transformers import AutoModelForCausalLM

    # Any, because the type of generate's self excludes what from_pretrained returns.
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention
    )
    model.eval()

    def generate(prompts: list[list[int]], new_tokens: int) -> float:
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        return time.perf_counter() - start

    def run(prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        prefill = generate(prompts, 1)
        return prefill, generate(prompts, new_tokens) - prefill

    return run


def measure(runs: dict[str, Run], row: Row, vocab_size: int, rounds: int) -> None:
    """Print medians of tokens per second for one row, and each rival's median ratio."""
    order = list(runs)
    generator = random.Random(0)
    prefill: dict[str, list[float]] = {name: [] for name in runs}
    decode: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        shape = range(row.prompt_tokens)
        prompts = [[generator.randrange(vocab_size) for _ in shape] for _ in range(row.batch)]
        generator.shuffle(order)
        for name in order:
            first, rest = runs[name](prompts, row.new_tokens)
            if index:  # the first round warms up
                prefill[name].append(row.batch * row.prompt_tokens / first)
                decode[name].append(row.batch * (row.new_tokens - 1) / rest)
    for phase, rates in (("prefill", prefill), ("decode", decode)):
        work = f"{phase} batch {row.batch} prompt {row.prompt_tokens}"
        cells = []
        for name, values in rates.items():
            pairs = zip(rates["interposer"], values, strict=True)
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            low, high = min(values), max(values)
            cells.append(f"{name} {statistics.median(values):.0f} ({low:.0f}-{high:.0f})")
            if name != "interposer":
                cells.append(f"x{ratio:.2f}")
        print(f"{work:32s} " + "  ".join(cells), flush=True)


def main() -> None:
    """Parse the arguments and print one line per row, tokens per second with spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    lm = load(arguments.model_dir, dtype=dtype)
    runs = {
        "interposer": interposer_run(lm),
        "eager": transformers_run(arguments.model_dir, dtype, "eager"),
        "sdpa": transformers_run(arguments.model_dir, dtype, "sdpa"),
    }
    print(
        f"{arguments.model_dir} {arguments.dtype}, {arguments.threads} threads, tokens per second"
    )
    for batch, prompt in ((1, 32), (1, 512), (4, 128), (8, 128)):
        row = Row(batch, prompt, arguments.new_tokens)
        measure(runs, row, lm.engine.model.config.vocab_size, arguments.rounds)


if __name__ == "__main__":
    main()
