"""Compare decode, prefill and batches on a CPU with other engines, on the same random weights.

    python benchmarks/cpu_models.py qwen3-0.6b DIR
    python benchmarks/cpu_decode.py DIR [--peers NAME ...] [--threads 2,1] [--repeat 5]
    python benchmarks/cpu_decode.py DIR --instructions avx2   # as on a processor without AVX-512
    python benchmarks/cpu_decode.py DIR --record "AMD EPYC, AVX2"   # adds runs to results/cpu.json

Engines are compared in groups of equal bits per weight. Every engine has its own process; all
processes of a group exist at the same time, and are suspended by a signal while another one runs.
In every round, each row is run by all engines in a new order. Results are medians over the rounds,
with minimum and maximum in brackets. Ratios are medians of the ratios within a round, to the best
other engine of the row. The output gives the reason for every row that cannot be run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cpu_engines.contract import MAX_BATCH, MAX_CONTEXT, MAX_STEP_TOKENS, Settings
from cpu_peers import (
    ENGINES,
    ENVIRONMENTS,
    INSTRUCTIONS,
    Engine,
    Unavailable,
    add_instructions,
    cache_folder,
    chosen_engines,
    environment_python,
)
from cpu_processes import Worker, available_mib
from cpu_results import Run, add_runs
from interposer_engine import plan
from interposer_engine.roofline import ModelWork

ROOFS = Path(__file__).with_name("cpu_roofs.py")
# Peak memory of the largest engine while loading a model of 0.6 billion parameters.
ROOM_MIB = 4096
OURS = "interposer:"
# Bytes per stored weight; 4-bit formats have a 16-bit scale per 32 values.
MODEL_WEIGHTS = {16: 2.0, 8: 1.0, 4: 0.5625}


@dataclass(frozen=True)
class Row:
    """Measurement of ``batch`` prompts of ``context`` tokens and ``new_tokens`` decode steps."""

    batch: int
    context: int
    new_tokens: int
    shown: tuple[str, ...]

    def command(self, seed: int, vocab_size: int) -> dict[str, int]:
        """Build the command of a worker."""
        sizes = {"batch": self.batch, "context": self.context, "new_tokens": self.new_tokens}
        return {**sizes, "seed": seed, "vocab_size": vocab_size}

    @property
    def labels(self) -> dict[str, str]:
        alone = {"prefill": f"prefill {self.context}", "decode": f"decode, context {self.context}"}
        if self.batch == 1:
            return alone
        return {"decode": f"batch {self.batch}, context {self.context}"}

    def rates(self, seconds: dict[str, float]) -> dict[str, float]:
        """Return tokens per second, summed over requests, by label."""
        tokens = {"prefill": self.context, "decode": self.new_tokens}
        return {
            self.labels[phase]: self.batch * tokens[phase] / seconds[f"{phase}_s"]
            for phase in self.shown
        }


@dataclass
class Group:
    """Measurements of engines with equal bits per weight and equal threads."""

    threads: int
    bits: int
    product_dtype: str
    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    roofs: list[dict[str, Any]] = field(default_factory=list)

    def roof(self, name: str) -> float:
        return statistics.median(float(roof[name]) for roof in self.roofs)


def rows_of(options: argparse.Namespace) -> list[Row]:
    both, alone = ("prefill", "decode"), ("decode",)
    rows = [
        Row(1, context, options.new_tokens, both if context in options.prefill else alone)
        for context in options.contexts
    ]
    rows += [Row(1, n, 0, ("prefill",)) for n in options.prefill if n not in options.contexts]
    if options.batch > 1:
        rows.append(Row(options.batch, min(options.contexts), options.new_tokens, ("decode",)))
    return rows


def measured_group(
    group: Group, engines: list[Engine], rows: list[Row], options: argparse.Namespace
) -> None:
    """Load all engines, then measure them in rounds; the first round is a warm-up."""
    workers: dict[str, Worker] = {}
    try:
        for engine in engines:
            note(f"{group.threads} threads, {engine.name}: loading")
            try:
                workers[engine.name] = loaded(engine, group.threads, options)
                group.memory[engine.name] = dict(workers[engine.name].loaded)
            except Unavailable as error:
                group.failures[engine.name] = str(error)
        for index in range(options.repeat + 1):
            note(f"{group.threads} threads, {group.bits} bits: round {index} of {options.repeat}")
            command = [sys.executable, str(ROOFS), "--threads", str(group.threads)]
            command += ["--read-mib", str(options.read_mib), "--dtype", group.product_dtype]
            # MKL multiplies float32; oneDNN reads memory, and needs all instructions for that.
            limits = INSTRUCTIONS[options.instructions]
            limits = {name: value for name, value in limits.items() if "ONEDNN" not in name}
            variables = {**os.environ, **limits}
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env=variables
            )
            group.roofs.append(json.loads(done.stdout))
            for row in rows:
                run_row(group, workers, row, index, options)
    finally:
        for worker in workers.values():
            worker.end()


def loaded(
    engine: Engine,
    threads: int,
    options: argparse.Namespace,
    folder: Path | None = None,
    settings: Settings | None = None,
) -> Worker:
    """Start the process of an engine, with the model of ``options`` or of another folder.

    Raises: Unavailable: the engine cannot be installed or loaded, or memory is short.
    """
    environment, instructions = ENVIRONMENTS[engine.environment], options.instructions
    python = environment_python(environment, options.environments, instructions)
    if available_mib() < options.room_mib:
        raise Unavailable(f"only {available_mib()} MiB of memory left. Try: fewer engines")
    folder = folder or options.model_dir
    return Worker(engine, python, folder, threads, options.timeout, settings, instructions)


def run_row(
    group: Group, workers: dict[str, Worker], row: Row, index: int, options: argparse.Namespace
) -> None:
    order = list(workers)
    random.Random(f"{index} {row}").shuffle(order)
    for name in order:
        command = row.command(index, options.vocab_size)
        try:
            found = workers[name].run(command)
        except Unavailable as error:
            group.failures[name] = f"{', '.join(row.labels.values())}: {error}"
            workers.pop(name).end()
            group.rates.pop(name, None)
            continue
        group.memory[name] |= {key: found[key] for key in ("peak_rss_mib", "anonymous_mib")}
        if index:
            for label, rate in row.rates(found).items():
                group.rates.setdefault(name, {}).setdefault(label, []).append(rate)


def roofline(group: Group, row: Row, phase: str, work: ModelWork) -> float:
    """Return the tokens per second that the memory bandwidth or the GEMM rate allows."""
    if phase == "prefill":
        return row.context * group.roof("flops_per_s") / work.operations(row.context)
    middle = row.context + row.new_tokens / 2
    step_bytes = decode_bytes(work, group.bits, row.batch, middle)
    return row.batch * group.roof("bytes_per_s") / step_bytes


def decode_bytes(work: ModelWork, bits: int, batch: int, context: float) -> float:
    """Count the bytes that a step reads: every used weight once, and the cache of every request."""
    return work.weights_read(batch) * MODEL_WEIGHTS[bits] + batch * work.context_bytes(context)


def report(group: Group, rows: list[Row], work: ModelWork) -> Iterator[str]:
    """Yield Markdown: a table of rates and ratios, a table of memory, and the failures."""
    bandwidth, peak = group.roof("bytes_per_s"), group.roof("flops_per_s")
    span = [float(roof["bytes_per_s"]) / 1e9 for roof in group.roofs]
    yield (
        f"\n{group.threads} threads, {group.bits} bits: reading {bandwidth / 1e9:.1f} GB/s "
        f"({min(span):.1f}-{max(span):.1f}, by {group.roofs[-1]['read_by']}), "
        f"{group.product_dtype} products {peak / 1e9:.0f} GFLOP/s; tokens per second\n"
    )
    names = [name for name in group.memory if name in group.rates]
    if names:
        yield "| | roofline | " + " | ".join(names) + " |"
        yield "|---" * (len(names) + 2) + "|"
    for row in rows:
        for phase in row.shown:
            label, limit = row.labels[phase], roofline(group, row, phase, work)
            rates = {name: group.rates[name][label] for name in names}
            if names:
                cells = (cell(name, rates, limit) for name in names)
                yield f"| {label} | {limit:.0f} | " + " | ".join(cells) + " |"
    yield ""
    for name in names:
        facts = group.memory[name]
        more = ", ".join(f"{key} {value}" for key, value in facts["facts"].items())
        yield (
            f"- {name}: loaded in {facts['load_s']:.1f} s; MiB: {facts['peak_rss_mib']:.0f} at "
            f"most resident, {facts['load_peak_mib']:.0f} at most anonymous while loading, "
            f"{facts['anonymous_mib']:.0f} in the end; {more}"
        )
    for name, reason in group.failures.items():
        yield f"- {name}: NOT RUN: {reason}"


def cell(name: str, rates: dict[str, list[float]], limit: float) -> str:
    """Format the median with its spread, and for interposer the ratio to the best other engine."""
    share = statistics.median(rates[name]) / limit
    return f"{spread(rates[name])}, {share:.0%}{ratio_text(name, rates)}"


def spread(values: list[float]) -> str:
    """Format the median with minimum and maximum."""
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def ratio_text(name: str, rates: dict[str, list[float]]) -> str:
    """Format interposer's ratio to the best other engine; "" for others."""
    ratio = ratio_to_best(name, rates)
    return f", x{ratio[0]:.2f} {ratio[1]}" if ratio else ""


def ratio_to_best(name: str, rates: dict[str, list[float]]) -> tuple[float, str] | None:
    """Return interposer's median ratio to the best other engine over rounds; None for others."""
    peers = {peer: found for peer, found in rates.items() if not peer.startswith(OURS)}
    if not name.startswith(OURS) or not peers:
        return None
    best = max(peers, key=lambda peer: statistics.median(peers[peer]))
    pairs = zip(rates[name], peers[best], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs), best


def run_of(group: Group, rows: list[Row], work: ModelWork, machine: str, shape: str) -> Run:
    """Return a group as a run of results/cpu.json, whose module describes the fields."""
    bandwidths = sorted(float(roof["bytes_per_s"]) / 1e9 for roof in group.roofs)
    names = [name for name in group.memory if name in group.rates]
    return {
        "machine": machine,
        "shape": shape,
        "threads": group.threads,
        "bits": group.bits,
        "date": datetime.now(UTC).date().isoformat(),
        "read_gb_per_s": [
            round(rate, 1)
            for rate in (statistics.median(bandwidths), bandwidths[0], bandwidths[-1])
        ],
        "gemm_gflop_per_s": round(group.roof("flops_per_s") / 1e9),
        "engines": {name: _facts(group.memory[name]) for name in names},
        "not_run": group.failures,
        "rows": {
            row.labels[phase]: _cells(group, row.labels[phase], roofline(group, row, phase, work))
            for row in rows
            for phase in row.shown
        },
    }


def _facts(memory: dict[str, Any]) -> dict[str, Any]:
    sizes = {key: round(memory[key]) for key in ("peak_rss_mib", "load_peak_mib", "anonymous_mib")}
    # Which kernels were chosen is a list, and `explain` shows the reasons too.
    facts = {key: value for key, value in memory["facts"].items() if key != "chosen"}
    text = ", ".join(f"{key} {value}" for key, value in facts.items())
    return {"load_s": round(memory["load_s"], 1), **sizes, "facts": text}


def _cells(group: Group, label: str, limit: float) -> dict[str, Any]:
    rates = {name: found[label] for name, found in group.rates.items()}
    cells: dict[str, Any] = {"roofline": round(limit, 1)}
    for name, values in rates.items():
        median = statistics.median(values)
        shown = [round(value, 1) for value in (median, min(values), max(values))]
        cells[name] = {"rates": shown, "of_roofline": round(median / limit, 2)}
        if ratio := ratio_to_best(name, rates):
            cells[name] |= {"ratio": round(ratio[0], 2), "peer": ratio[1]}
    return cells


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parsed() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model_dir", type=Path, help="what cpu_models.py wrote")
    parser.add_argument(
        "--peers",
        nargs="+",
        default=list(ENGINES),
        help=f"engines, or libraries for all of theirs: {', '.join(ENGINES)}; "
        "interposer:METHOD takes any method, interposer:METHOD-gN one with a group size",
    )
    parser.add_argument("--bits", type=numbers, default=[16, 8, 4])
    parser.add_argument("--threads", type=numbers, default=[2, 1])
    parser.add_argument("--contexts", type=numbers, default=[128, 1024])
    parser.add_argument("--prefill", type=numbers, default=[512, 1024])
    parser.add_argument("--batch", type=int, default=8, help="at the shortest context; 1: none")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5)
    add_instructions(parser)
    parser.add_argument("--environments", type=Path, default=cache_folder())
    parser.add_argument("--timeout", type=float, default=1200, help="seconds to load or for a row")
    parser.add_argument("--room-mib", type=int, default=ROOM_MIB, help="free memory for a start")
    parser.add_argument("--read-mib", type=int, default=512, help="to measure the bandwidth with")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument(
        "--record",
        metavar="MACHINE",
        help="add the results to results/cpu.json, with the name of DIR as the shape",
    )
    options = parser.parse_args()
    options.model_dir = options.model_dir.absolute()
    options.environments = options.environments.absolute()
    longest = max(*options.contexts, *options.prefill) + options.new_tokens + 2
    together = options.batch * (min(options.contexts) + options.new_tokens + 2)
    if longest > MAX_CONTEXT or together > MAX_STEP_TOKENS or options.batch > MAX_BATCH:
        parser.error(
            f"engines keep room for {MAX_BATCH} requests of {MAX_STEP_TOKENS} tokens together "
            f"and {MAX_CONTEXT} each, which cpu_engines/contract.py says"
        )
    return options


def main() -> None:
    options = parsed()
    planned = plan(options.model_dir / "hf", platform="cpu")
    options.work, options.vocab_size = ModelWork.of(planned.model), planned.decoder.vocab_size
    engines, rows = chosen_engines(options.peers), rows_of(options)
    groups = []
    for threads in options.threads:
        for bits in options.bits:
            # Older instructions multiply bfloat16 as float32.
            group = Group(threads, bits, "float32" if options.instructions else "bfloat16")
            chosen = [engine for engine in engines if engine.bits == bits]
            if not chosen:
                continue
            measured_group(group, chosen, rows, options)
            groups.append(group)
            for line in report(group, rows, options.work):
                print(line, flush=True)
            if options.json:
                options.json.write_text(json.dumps([vars(g) for g in groups], indent=1))
            if options.record:
                shape = options.model_dir.name
                add_runs([run_of(group, rows, options.work, options.record, shape)])


if __name__ == "__main__":
    main()
