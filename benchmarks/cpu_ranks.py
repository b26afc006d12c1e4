"""Compare tensor-parallel decoding by several one-thread processes with one multi-threaded process.

    python benchmarks/cpu_ranks.py MODEL_DIR [--ranks 2] [--rounds 9] [--new-tokens 48]
        [--quantization int8] [--communicator torch] [--times]

Both load the model once and take turns in alternating order, so that changes of the machine's speed
affect both; the waiting one uses no processor. Printed are medians of decoded tokens per second,
without the first token, and the median of the ratios within a round. With ``--times``, every rank
also reports the time of a step by parts: the model, sampling, and everything else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from interposer import Config
from interposer_engine import LanguageModel, SamplingParams, launched, load

PROMPT = [(7 * place) % 997 for place in range(16)]
WAITING = "waiting"


@contextmanager
def loaded(given: argparse.Namespace, num_ranks: int) -> Iterator[LanguageModel]:
    """Load the model for one process or several."""
    options: dict[str, Any] = {"cache_tokens": 1024, "max_sequences": 1}
    if given.quantization:
        options["quantization"] = given.quantization
    if num_ranks == 1:
        yield load(given.model, config=Config(packed="off"), **options)
        return
    sums = {"all_reduce": given.communicator} if given.communicator else {}
    with launched(num_ranks) as load_on_all:
        yield load_on_all(given.model, config=Config(communicators=sums, packed="off"), **options)


def decoded(lm: LanguageModel, new_tokens: int) -> float:
    """Decode and return tokens per second, without the first token."""
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, temperature=0)
    sequence = lm.engine.add(PROMPT, params)
    while not sequence.output:
        lm.engine.step()
    start = time.perf_counter()
    while lm.engine.busy:
        lm.engine.step()
    return (new_tokens - 1) / (time.perf_counter() - start)


def timed(owner: Any, name: str, seconds: dict[str, float], key: str) -> None:
    """Record the times of a method's calls."""
    call: Callable[..., Any] = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*arguments, **options)
        finally:
            seconds[key] = seconds.get(key, 0.0) + time.perf_counter() - start

    setattr(owner, name, counted)


def parts(lm: LanguageModel, new_tokens: int) -> dict[str, float]:
    """Compute the milliseconds of a step in the decoder, in the lm_head, and in total."""
    seconds: dict[str, float] = {}
    model: Any = lm.engine.model
    watched = (model.model, "decoder"), (model.lm_head, "head"), (model.model.embed_tokens, "embed")
    for owner, key in watched:
        timed(owner, "forward", seconds, key)
    rate = decoded(lm, new_tokens)
    for owner, _ in watched:
        del owner.forward
    return {key: 1e3 * value / new_tokens for key, value in seconds.items()} | {"step": 1e3 / rate}


def work(given: argparse.Namespace) -> None:
    """Run one turn per input line, and print its result."""
    with loaded(given, given.work) as lm:
        print(json.dumps(WAITING), flush=True)
        for line in sys.stdin:
            measure = parts if line.strip() == "parts" else decoded
            print(json.dumps(measure(lm, given.new_tokens)), flush=True)


class Engine:
    """A process with the loaded model, and the processes that it started."""

    def __init__(self, num_ranks: int, threads: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--work", str(num_ranks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self._answer()

    def ask(self, what: str = "rate") -> Any:
        """Run one turn in the process and return its result."""
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a engine left with status {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--quantization", default="")
    parser.add_argument("--communicator", default="")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--work", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run the benchmark, or one of its worker processes."""
    given = arguments()
    if given.work:
        torch.manual_seed(0)
        return work(given)
    one, several = Engine(1, given.ranks), Engine(given.ranks, 1)
    rates: dict[Engine, list[float]] = {one: [], several: []}
    for number in range(given.rounds + 1):
        order = (one, several) if number % 2 else (several, one)
        for engine in order:
            rate = engine.ask()
            if number:  # the first turns warm up
                rates[engine].append(rate)
    pairs = [second / first for first, second in zip(rates[one], rates[several], strict=True)]
    for name, engine in (("one process", one), (f"{given.ranks} processes", several)):
        some = sorted(rates[engine])
        print(f"{name:14s} {statistics.median(some):7.2f} tokens/s ({some[0]:.2f}-{some[-1]:.2f})")
    ratio = statistics.median(pairs)
    print(
        f"ratio          x{ratio:.3f} (median of {len(pairs)} rounds, {min(pairs):.3f}-"
        f"{max(pairs):.3f})"
    )
    if given.times:
        for name, engine in (("one process", one), (f"{given.ranks} processes", several)):
            told = ", ".join(f"{key} {value:.2f} ms" for key, value in engine.ask("parts").items())
            print(f"{name:14s} {told}")
    for engine in (one, several):
        engine.end()
    return None


if __name__ == "__main__":
    main()
