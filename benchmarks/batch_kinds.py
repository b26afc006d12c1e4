"""Kinds of batch beside llama.cpp and vLLM's build for CPUs, on the same weights.

    python benchmarks/cpu_models.py qwen3-0.6b DIR --formats hf gguf adapters
    python benchmarks/cpu_models.py stdlib-lm TEXT_DIR --formats hf gguf
    python benchmarks/batch_kinds.py DIR TEXT_DIR [--suites batches prefixes ...]

Suites: `batches` has prefill, decode, a batch and a prompt that extends another; `prefixes` 2,000
tokens that two prompts share; `mixed` prompts that join requests which decode; `large` the same of
batches of 32 and 64, whose contexts differ; `adapters` a batch
of eight without any, with one of rank 16 for all, and with four; `guesses` text by prompt lookup of
four tokens and without: greedy text that repeats itself, and text that is drawn at temperature 1,
on the shipped model, since random weights repeat themselves in no way that says anything; `idle`
decoding with a prefix cache of which nothing is used, beside none.

Engines live in processes of their own, of which one runs at a time. Every round draws its
prompts anew and runs each row by all of them in a new order; figures are medians, with the lowest
and the highest in brackets; ratios are medians of those within a round, to the peer that is best in
the row. What a library does not do, or what cannot be run, stands in the output with its reason.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cpu_decode import ROOM_MIB, loaded, note, ratio_text, spread
from cpu_engines.contract import Settings
from cpu_models import SHIPPED
from cpu_peers import Engine, Unavailable, add_instructions, cache_folder, chosen_engines
from cpu_processes import Worker

SUITES = ("batches", "prefixes", "mixed", "large", "adapters", "guesses", "idle")
PEERS = ("interposer:bf16", "llama_cpp:bf16", "vllm:bf16")
LINES = "".join(
    f"    parser.add_argument('--option{n}', type=int, default={n})\n" for n in range(12)
)
TEXTS = {"greedy, repeats itself": (LINES, 0.0), "drawn": ("def main():\n", 1.0)}
CONTEXT = 2048
# Milliseconds, of which fewer are better.
GAP = "gap_ms"


@dataclass(frozen=True)
class Row:
    """One workload.

    Attributes:
        command: what ``cpu_engines/kinds.py`` reads.
        labels: of the figures that are shown, by their names there.
        variant: of the settings of the suite.
    """

    command: dict[str, Any]
    labels: dict[str, str]
    variant: str = ""


@dataclass(frozen=True)
class Suite:
    """Rows that share processes.

    Attributes:
        folder: of the model.
        variants: settings by name; each has a process for every engine.
        pairs: of labels: with something, and without it.
    """

    folder: Path
    variants: dict[str, Settings]
    rows: tuple[Row, ...]
    pairs: tuple[tuple[str, str], ...] = ()


@dataclass
class Figures:
    """The measurements of the engines of a suite.

    Attributes:
        rates: of each round, by label and engine.
        reasons: of rows that are not run, by label and engine; of all rows by engine alone.
    """

    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def suites_of(options: argparse.Namespace) -> dict[str, Suite]:
    """Return the suites by name."""
    new, scale = options.new_tokens, options.scale
    prompt, short, common = 512 // scale, 128 // scale, 2000 // scale
    size = {"batch": 1, "new_tokens": new}
    eight = {"kind": "decode", "batch": 8, "context": short, "new_tokens": new}
    adapters = tuple(str(options.model_dir / "adapters" / str(n)) for n in range(4))
    four = f"of 8, context {short}"
    return {
        "batches": Suite(
            options.model_dir,
            {"": Settings(CONTEXT, prefixes=True)},
            (
                Row(
                    {**size, "kind": "decode", "context": prompt},
                    {"prefill": f"prefill {prompt}", "decode": f"decode, context {prompt}"},
                ),
                Row(eight, {"decode": f"batch {four}"}),
                Row(
                    {"kind": "extend", "context": 2 * prompt, "new_tokens": prompt},
                    {
                        "new": f"prefill {2 * prompt}",
                        "known": f"prefill {prompt} behind {2 * prompt} in the cache",
                    },
                ),
            ),
        ),
        "prefixes": Suite(
            options.model_dir,
            {"": Settings(CONTEXT, prefixes=True)},
            (
                Row(
                    {"kind": "shared", "context": common},
                    {
                        "new": f"first token of {common} + 20, new",
                        "known": f"the same, {common} in the cache",
                    },
                ),
            ),
            ((f"the same, {common} in the cache", f"first token of {common} + 20, new"),),
        ),
        "mixed": Suite(
            options.model_dir,
            {"": Settings(CONTEXT, prefixes=True)},
            (joined(4, short, new, prompt),),
        ),
        "large": Suite(
            options.model_dir,
            {"": Settings(640, prefixes=True, requests=80)},
            (
                *(
                    Row(
                        {**eight, "batch": batch, "context": prompt, "mixed_lengths": True},
                        {
                            "decode": f"decode of {batch}, contexts of {short} to {prompt}",
                            GAP: f"decode of {batch}, 95 % of gaps within, ms",
                        },
                    )
                    for batch in (32, 64)
                ),
                joined(32, short, new, prompt),
            ),
        ),
        "adapters": Suite(
            options.model_dir,
            {"": Settings(CONTEXT, adapters=adapters)},
            (
                Row({**eight, "adapters": [None] * 8}, {"decode": f"batch {four}, no adapter"}),
                Row({**eight, "adapters": [0] * 8}, {"decode": f"batch {four}, one adapter"}),
                Row({**eight, "adapters": [0, 1, 2, 3] * 2}, {"decode": f"batch {four}, four"}),
            ),
            (
                (f"batch {four}, one adapter", f"batch {four}, no adapter"),
                (f"batch {four}, four", f"batch {four}, no adapter"),
            ),
        ),
        "guesses": Suite(
            options.text_dir,
            {"plain": Settings(1024), "prompt lookup": Settings(1024, guesses=True)},
            guessed_rows(options),
            tuple((f"{what}, prompt lookup", f"{what}, plain") for what in TEXTS),
        ),
        "idle": Suite(
            options.model_dir,
            {"plain": Settings(CONTEXT), "cached": Settings(CONTEXT, prefixes=True)},
            tuple(
                Row(
                    {**size, "kind": "decode", "context": prompt},
                    {"decode": f"decode, {variant}"},
                    variant,
                )
                for variant in ("plain", "cached")
            ),
            (("decode, cached", "decode, plain"),),
        ),
    }


def joined(batch: int, context: int, new: int, prompt: int) -> Row:
    """Return the row of requests that prompts join while they decode."""
    what = f"decode of {batch}, prompts of {prompt} join"
    return Row(
        {
            **{"kind": "mixed", "batch": batch, "context": context},
            **{"new_tokens": new, "joining": prompt},
        },
        {"tokens": what, GAP: f"{what}, 95 % of gaps within, ms"},
    )


def guessed_rows(options: argparse.Namespace) -> tuple[Row, ...]:
    """Return rows of text that repeats itself, greedy, and of text that is drawn and seldom does.

    Prompts are tokens of the shipped model.
    """
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    rows: list[Row] = []
    for what, (text, temperature) in TEXTS.items():
        prompt = tokenizer.encode(text).ids[: 512 // options.scale]
        command: dict[str, Any] = {"kind": "guesses", "prompt": prompt, "temperature": temperature}
        command["new_tokens"] = 4 * options.new_tokens
        rows += [
            Row(command, {"tokens": f"{what}, {variant}"}, variant)
            for variant in ("plain", "prompt lookup")
        ]
    return tuple(rows)


def measured_suite(suite: Suite, engines: list[Engine], options: argparse.Namespace) -> Figures:
    """Load all engines, then measure them in rounds, the first of which warms up."""
    figures = Figures()
    workers: dict[tuple[str, str], Worker] = {}
    try:
        for engine in engines:
            for variant, settings in suite.variants.items():
                note(f"{engine.name} {variant}: loading")
                where = f"{engine.name} {variant}".rstrip()
                try:
                    workers[engine.name, variant] = loaded(
                        engine, options.threads, options, suite.folder, settings
                    )
                except Unavailable as error:
                    figures.reasons[where] = str(error)
        for index in range(options.repeat + 1):
            note(f"round {index} of {options.repeat}")
            for row in suite.rows:
                run_row(figures, row, index, workers, options)
    finally:
        for worker in workers.values():
            worker.end()
    return figures


def run_row(
    figures: Figures,
    row: Row,
    index: int,
    workers: dict[tuple[str, str], Worker],
    options: argparse.Namespace,
) -> None:
    """Run a row by every engine that is left, in an order of its own."""
    shown = ", ".join(row.labels.values())
    names = [name for name, variant in workers if variant == row.variant]
    random.Random(f"{index} {shown}").shuffle(names)
    sizes = {"seed": index, "vocab_size": options.vocab_size}
    for name in names:
        where = f"{name}: {shown}"
        if where in figures.reasons:
            continue
        try:
            found = workers[name, row.variant].run({**sizes, **row.command})
        except Unavailable as error:
            figures.reasons[where] = str(error)
            workers.pop((name, row.variant)).end()
            for label in row.labels.values():
                figures.rates.get(label, {}).pop(name, None)
            continue
        if "unsupported" in found:
            figures.reasons[where] = found["unsupported"]
        elif index:
            for key, label in row.labels.items():
                figures.rates.setdefault(label, {}).setdefault(name, []).append(found[key])


def report(name: str, suite: Suite, figures: Figures, options: argparse.Namespace) -> Iterator[str]:
    """Yield Markdown: rates with our ratios, then ratios of pairs, then reasons."""
    yield f"\n{name}: {options.threads} threads, tokens per second\n"
    names = [name for name in options.peers if any(name in r for r in figures.rates.values())]
    yield "| | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for row in suite.rows:
        for key, label in row.labels.items():
            rates = figures.rates.get(label, {})
            # A ratio says how much better ours is, of milliseconds as well.
            better = rates if key != GAP else {n: [1 / v for v in rates[n]] for n in rates}
            cells = (
                f"{spread(rates[name])}{ratio_text(name, better)}" if name in rates else "-"
                for name in names
            )
            yield f"| {label} | " + " | ".join(cells) + " |"
    for first, second in suite.pairs:
        ratios = (pair_ratio(figures, first, second, name) for name in names)
        yield f"| {first} / {second} | " + " | ".join(ratios) + " |"
    yield ""
    for where, reason in figures.reasons.items():
        yield f"- {where}: NOT RUN: {reason}"


def pair_ratio(figures: Figures, first: str, second: str, name: str) -> str:
    """Return the median of ratios of two rows of an engine, round by round."""
    both = [figures.rates.get(label, {}).get(name, []) for label in (first, second)]
    if not all(both):
        return "-"
    return f"x{statistics.median(a / b for a, b in zip(*both, strict=True)):.2f}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model_dir", type=Path, help="what cpu_models.py wrote")
    parser.add_argument("text_dir", type=Path, help="the same of stdlib-lm")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--peers", nargs="+", default=list(PEERS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scale", type=int, default=1, help="divides prompts, for rehearsals")
    add_instructions(parser)
    parser.add_argument("--environments", type=Path, default=cache_folder())
    parser.add_argument("--timeout", type=float, default=600, help="seconds to load or for a row")
    parser.add_argument("--room-mib", type=int, default=ROOM_MIB, help="free memory for a start")
    parser.add_argument("--json", type=Path, help="write every single figure there")
    options = parser.parse_args()
    for name in ("model_dir", "text_dir", "environments"):
        setattr(options, name, getattr(options, name).absolute())
    return options


def main() -> None:
    options = parsed()
    found, suites = {}, suites_of(options)
    engines = chosen_engines(options.peers)
    for name in options.suites:
        suite = suites[name]
        config = json.loads((suite.folder / "hf" / "config.json").read_text(encoding="utf-8"))
        options.vocab_size = config["vocab_size"]
        figures = measured_suite(suite, engines, options)
        found[name] = vars(figures)
        for line in report(name, suite, figures, options):
            print(line, flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
