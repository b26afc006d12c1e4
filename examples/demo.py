"""Run the shipped model on two prompts, and show its text, kernels and speed.

make demo, or: python examples/demo.py
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import interposer
from interposer_engine import LanguageModel, load

MODEL = Path(__file__).parent / "models" / "stdlib-lm"
# They end before white space, because an indentation is one token with the newline before it.
PROMPTS = ("def read_file(path):", "class Stack:\n    def __init__(self")
NEW_TOKENS = 48
ROUNDS = 5


def write(lm: LanguageModel) -> None:
    """Print a greedy continuation of every prompt."""
    completions = lm.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        print(f"--- {len(completion.token_ids)} tokens, {completion.finish_reason}")
        print(prompt + completion.text)


def compare(lm: LanguageModel) -> None:
    """Print tokens per second beside transformers, whole calls, in alternating rounds."""
    dtype = lm.engine.runner.caches[0].dtype
    logging.disable_progress_bar()
    rival = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).eval()
    ids = lm.tokenizer.encode(PROMPTS[0])

    def ours() -> None:
        lm.generate([ids], max_new_tokens=NEW_TOKENS, ignore_eos=True)

    def theirs() -> None:
        prompt = torch.tensor([ids])
        rival.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
        )

    rates: dict[str, list[float]] = {"interposer": [], "transformers": []}
    for index in range(ROUNDS + 1):
        for name, run in (("interposer", ours), ("transformers", theirs)):
            start = time.perf_counter()
            run()
            if index:  # the first round warms up
                rates[name].append(NEW_TOKENS / (time.perf_counter() - start))
    pairs = zip(rates["interposer"], rates["transformers"], strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    for name, values in rates.items():
        print(f"{name:13s} {statistics.median(values):7.1f} tokens/s")
    print(f"ratio         {ratio:7.2f}  ({dtype}, {torch.get_num_threads()} threads, batch 1)")


def main() -> None:
    """Run the three parts."""
    lm = load(MODEL)
    write(lm)
    print(interposer.explain(lm))
    compare(lm)


if __name__ == "__main__":
    main()
