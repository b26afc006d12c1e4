"""vLLM for CPUs with and without interposer-vllm, in alternated rounds, on the same random weights.

    python benchmarks/cpu_models.py qwen3-0.6b DIR [--formats hf compressed]
    python benchmarks/vllm_bridge.py DIR --python PYTHON [--sources hf int8 w4a8 ...] [--threads 2]

Both live in processes of their own, in their own mode of compilation, and one is stopped while the
other runs. Figures are medians of tokens per second over the rounds, with the lowest and the
highest in brackets; the ratio is the median of the ratios within a round. A checkpoint that one of
them refuses or fails with has that reason beside the figures of the other. PYTHON has vLLM and the
plugin: see ``make test-vllm``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

from cpu_decode import Row
from cpu_engines.vllm_bridge import PLUGINS
from cpu_peers import Engine, Unavailable
from cpu_processes import Worker

__all__ = ["Pair", "rows_of"]


def rows_of(new_tokens: int) -> list[Row]:
    """Return the rows that both engines run: decode, a prompt, and a batch with its prompts."""
    return [
        Row(1, 128, new_tokens, ("decode",)),
        Row(1, 1024, new_tokens, ("decode",)),
        Row(1, 512, 0, ("prefill",)),
        Row(8, 128, new_tokens, ("decode",)),
    ]


@dataclass
class Pair:
    """Both on one checkpoint.

    Attributes:
        rates: tokens per second in each round, by label and option.
        loads: seconds until the engine stands, by option; its libraries are imported within.
        failures: why an option is not measured.
        head: names the rows.
    """

    source: str
    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    loads: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    head: str = "tokens/s"

    def add(self, label: str, option: str, rate: float) -> None:
        """Take the rate of a round."""
        self.rates.setdefault(label, {}).setdefault(option, []).append(rate)

    def fail(self, option: str, why: Unavailable) -> None:
        """Drop the rates of an option that ended: medians of fewer rounds say something else."""
        self.failures[option] = str(why)
        for found in self.rates.values():
            found.pop(option, None)

    def table(self) -> str:
        """Return Markdown: a row per label, and the seconds of loading."""
        head = f"| {self.head} | plain | bridge | ratio |"
        lines = [f"{self.source}:", "", head, "|---|---|---|---|"]
        for label, found in self.rates.items():
            cells = [_cell(found.get(option, [])) for option in PLUGINS]
            lines.append(f"| {label} | {' | '.join(cells)} | {_ratio(found)} |")
        loads = [f"{self.loads[o]:.1f} s" if o in self.loads else "-" for o in PLUGINS]
        lines.append(f"| load | {' | '.join(loads)} | |")
        lines += [f"- {option}: NOT RUN: {why}" for option, why in self.failures.items()]
        return "\n".join(lines)


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def _ratio(found: dict[str, list[float]]) -> str:
    if set(found) != set(PLUGINS):
        return "-"
    ratios = [ours / own for own, ours in zip(found["plain"], found["bridge"], strict=True)]
    return f"x{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def measured(source: str, options: argparse.Namespace) -> Pair:
    """Load both, then run every row in every round, of which the first warms up."""
    pair, workers = Pair(source), dict[str, Worker]()
    try:
        for option in PLUGINS:
            engine = Engine(f"vllm:{option}", 16, "vllm_bridge", source, "vllm")
            try:
                worker = Worker(
                    engine, options.python, options.model_dir, options.threads, options.timeout
                )
            except Unavailable as error:
                pair.fail(option, error)
                continue
            workers[option] = worker
            pair.loads[option] = worker.loaded["load_s"]
        for index in range(options.repeat + 1):
            for row in rows_of(options.new_tokens):
                # Who is first changes with the round.
                for option in sorted(workers, reverse=bool(index % 2)):
                    command = row.command(index, options.vocab_size)
                    try:
                        found = workers[option].run(command)
                    except Unavailable as error:
                        pair.fail(option, error)
                        workers.pop(option).end()
                        continue
                    for label, rate in row.rates(found).items() if index else ():
                        pair.add(label, option, rate)
    finally:
        for worker in workers.values():
            worker.end()
    return pair


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--sources", nargs="+", default=["hf"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=200.0)
    parser.add_argument("--vocab-size", type=int, default=32000, help="of the prompts' tokens")
    options = parser.parse_args(arguments)
    print("vllm_bridge:", " ".join(arguments), flush=True)
    for source in options.sources:
        print("\n" + measured(source, options).table(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
