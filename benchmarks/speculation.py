"""Compare decoding with guesses and without, where text repeats itself and where it does not.

    python benchmarks/speculation.py [MODEL] [--draft DIR] [--rounds 9] [--tokens 128]

Both decode the same requests in turn, one at a time, in bfloat16. Ratios are medians of those in
one round, of tokens per second. `repeats` continues a list of similar lines greedily, `drawn` draws
at temperature 1 from seeds, where what was said is seldom said again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from interposer_engine import LanguageModel, Speculation, load

SHIPPED = "examples/models/stdlib-lm"
LINES = "".join(
    f"    parser.add_argument('--option{n}', type=int, default={n})\n" for n in range(12)
)
TEXTS = {"repeats": LINES, "drawn": "def main():\n"}


def speed(lm: LanguageModel, text: str, temperature: float, seed: int, count: int) -> float:
    began = time.perf_counter()
    options: dict[str, Any] = {"temperature": temperature, "seed": seed, "ignore_eos": True}
    lm.generate([text], max_new_tokens=count, **options)
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=SHIPPED)
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    options: dict[str, Any] = {"dtype": "bfloat16", "cache_tokens": 4096, "max_sequences": 1}
    lms = {
        "plain": load(given.model, **options),
        "guesses": load(given.model, **options, speculation=Speculation(draft=given.draft)),
    }
    for text, prompt in TEXTS.items():
        temperature = 0.0 if text == "repeats" else 1.0
        for lm in lms.values():
            speed(lm, prompt, temperature, 0, 32)  # what is made on first use
        found: dict[str, list[float]] = {name: [] for name in lms}
        for number in range(given.rounds):
            for name in [*lms][:: 1 if number % 2 else -1]:
                found[name].append(speed(lms[name], prompt, temperature, number, given.tokens))
        ratios = [a / b for a, b in zip(found["guesses"], found["plain"], strict=True)]
        medians = {name: statistics.median(values) for name, values in found.items()}
        print(
            f"{text:8} plain {medians['plain']:7.1f} tokens/s, with {given.draft} "
            f"{medians['guesses']:7.1f}, x{statistics.median(ratios):.2f}"
        )
        print(f"         {lms['guesses'].speculation}")


if __name__ == "__main__":
    main()
