"""Time what a step draws by: carried on from the step before, and built anew.

    python benchmarks/models_sampling.py [--vocab 151936] [--requests 8] [--rounds 21]

Requests have 1,000 tokens of prompt and a penalty on what they used. Both are called in turns, on
one thread; medians of processor time in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from interposer_engine import SamplingParams
from interposer_engine.parts import SamplingState, TokenSequence, penalties_of, sampling_batch

PROMPT_TOKENS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=21)
    given = parser.parse_args()
    torch.set_num_threads(1)
    params = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5)
    sequences = [
        TokenSequence(
            n, [(n + 7919 * place) % given.vocab for place in range(PROMPT_TOKENS)], params, n
        )
        for n in range(given.requests)
    ]
    state = SamplingState(given.vocab, "cpu")

    def anew() -> None:
        sampling_batch(sequences, given.vocab, "cpu")
        penalties_of(sequences, given.vocab, "cpu")

    taken: dict[str, list[float]] = {"kept": [], "anew": []}
    with torch.inference_mode():
        for number in range(given.rounds + 1):
            for name, call in (("kept", lambda: state.batch(sequences)), ("anew", anew)):
                for sequence in sequences:
                    sequence.output.append(number)
                start = time.thread_time()
                call()
                if number:  # the first one of either is built anew
                    taken[name].append(1e6 * (time.thread_time() - start))
    kept, built = (statistics.median(times) for times in taken.values())
    print(f"{given.requests} requests with penalties: kept {kept:.1f} us, anew {built:.1f} us")


if __name__ == "__main__":
    main()
