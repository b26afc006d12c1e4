"""Measure decode, batches and prefill of the CPU platform as fractions of the roofline.

    python benchmarks/cpu_models.py qwen3-0.6b DIR --formats hf
    python benchmarks/cpu_fractions.py DIR [--methods bf16 int8 w4a8-g32] [--threads 2,1]

A limit is the bytes or operations that `cpu_decode.py` counts, at a rate measured immediately
before and after each round: the memory speed of a virtual machine changes within minutes. A
fraction is the median over the rounds, with the quartiles. Prompts have two limits: the speed of a
large bfloat16 GEMM, and the throughput of the instructions of the matmuls, timed on registers, plus
those of attention in bfloat16.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cpu_decode import decode_bytes
from cpu_engines.contract import Settings
from cpu_engines.interposer_engine import Engine
from interposer import Config, place
from interposer_engine import plan
from interposer_engine.roofline import ModelWork, measured_roofs

SOURCE = Path(__file__).with_name("instruction_rates.c")
BITS = {"bf16": 16, "int8": 8, "w4a8": 4, "int4": 4}
# Matmul instructions of a method, and the operations of one loop iteration.
LOOPS = {"bf16": ("pairs", 1024), "int8": ("bytes", 2048), "w4a8-g32": ("grouped_bytes", 2048)}
GOALS = {
    "decode 128": {16: 0.95, 8: 0.90, 4: 0.85},
    "decode 1024": {16: 0.90, 8: 0.85, 4: 0.80},
    "batch 8": {16: 0.85, 8: 0.85, 4: 0.65},
    "prefill 512": {16: 0.97},
    "prefill 1024": {16: 0.97},
}
LIMIT_GOAL = 0.85


@dataclass
class Row:
    """Rates of a row per round, in tokens per second, and the limits of each round by name."""

    label: str
    method: str
    threads: int
    rates: list[float] = field(default_factory=list)
    ceilings: dict[str, list[float]] = field(default_factory=dict)

    def add(self, rate: float, ceilings: dict[str, float]) -> None:
        self.rates.append(rate)
        for name, ceiling in ceilings.items():
            self.ceilings.setdefault(name, []).append(ceiling)

    def fractions(self, name: str) -> tuple[float, float, float]:
        """Compute the median and the quartiles of the fractions of a limit."""
        pairs = zip(self.rates, self.ceilings[name], strict=True)
        found = [rate / ceiling for rate, ceiling in pairs]
        low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
        return middle, low, high


class Rates:
    """Measurement of the current speed of memory and processor; buffers are reused."""

    def __init__(self, read_bytes: int, side: int, loops: ctypes.CDLL | None) -> None:
        calls: list[Callable[[], object]] = []
        measured_roofs(
            place(Config(platform="cpu")),
            read_bytes=read_bytes,
            side=side,
            seconds=lambda given: calls.extend(given) or [1.0],  # type: ignore[func-returns-value]
        )
        *reads, self.product = calls
        self.read_bytes, self.operations, self.loops = read_bytes, 2.0 * side**3, loops
        # The two fastest methods: which one is faster depends on the number of threads.
        self.reads = sorted(reads, key=lambda call: min(self._seconds(call) for _ in range(4)))[:2]

    @staticmethod
    def _seconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def bandwidth(self) -> float:
        """Measure the read bandwidth in bytes per second, by the fastest method."""
        return self.read_bytes / min(self._seconds(call) for call in self.reads)

    def products(self) -> float:
        """Measure the operations per second of a large GEMM."""
        return self.operations / self._seconds(self.product)

    def instructions(self, name: str, operations: int, times: int = 100_000) -> float:
        """Measure the operations per second of an instruction loop on all threads at once."""
        assert self.loops is not None
        threads = torch.get_num_threads()
        loop = getattr(self.loops, name)
        loop.argtypes = [ctypes.c_int64]
        with ThreadPoolExecutor(threads) as pool:
            taken = list(pool.map(lambda _: self._seconds(lambda: loop(times)), range(threads)))
        return sum(operations * times / seconds for seconds in taken)


def compiled_loops(folder: Path) -> ctypes.CDLL | None:
    """Compile loops of the processor's matmul instructions; None if not possible."""
    compiler, target = shutil.which("cc"), folder / "rates.so"
    if compiler is None:
        return None
    command = [compiler, "-O2", "-march=native", "-shared", "-fPIC", str(SOURCE), "-o", str(target)]
    subprocess.run(command, check=True)
    loops = ctypes.CDLL(str(target))
    return loops if hasattr(loops, "bytes") else None


def between(measure: Callable[[], float], run: Callable[[], float]) -> tuple[float, float]:
    """Return the result of ``run``, and the mean of the measurements before and after it."""
    before = measure()
    found = run()
    return found, (before + measure()) / 2


def decode(
    row: Row, engine: Engine, work: ModelWork, rates: Rates, prompts: list[list[int]], rounds: int
) -> None:
    """Measure rounds of eight decode steps after one prefill."""
    steps, batch, context = 8, len(prompts), len(prompts[0])
    engine.prefill(prompts, (rounds + 1) * steps + 1)
    bits = BITS[row.method.partition("-")[0]]
    for index in range(rounds + 1):

        def run() -> float:
            start = time.perf_counter()
            for _ in range(steps):
                engine.step()
            return batch * steps / (time.perf_counter() - start)

        rate, bandwidth = between(rates.bandwidth, run)
        middle = context + (index + 0.5) * steps
        if index:
            ceiling = batch * bandwidth / decode_bytes(work, bits, batch, middle)
            row.add(rate, {"memory": ceiling})
    engine.end()


def prefill(
    row: Row, engine: Engine, work: ModelWork, rates: Rates, prompt: list[int], rounds: int
) -> None:
    """Measure the prefill of complete prompts, one after another."""
    tokens = len(prompt)
    whole = work.operations(tokens)
    mixed = 2.0 * sum(layer.mixed(tokens) for layer in work.layers)

    def run() -> float:
        start = time.perf_counter()
        engine.prefill([prompt], 1)
        seconds = time.perf_counter() - start
        engine.end()
        return tokens / seconds

    def instructions() -> float:
        """Compute the tokens per second at the instruction throughput."""
        linear = rates.instructions(*LOOPS[row.method])
        attention = rates.instructions(*LOOPS["bf16"])
        return tokens / ((whole - mixed) / linear + mixed / attention)

    for index in range(rounds + 1):
        rate, products = between(rates.products, run)
        ceilings = {"products": tokens * products / whole}
        if rates.loops is not None and row.method in LOOPS:
            ceilings["instructions"] = instructions()
        if index:
            row.add(rate, ceilings)


def measured(options: argparse.Namespace, loops: ctypes.CDLL | None) -> Iterator[Row]:
    """Measure row by row, and yield every row."""
    generator = torch.Generator().manual_seed(0)
    for method in options.methods:
        engine = Engine(options.model_dir / "hf", method, max(options.threads), Settings())
        work = ModelWork.of(engine.lm.engine.model)
        vocab_size = plan(options.model_dir / "hf", platform="cpu").decoder.vocab_size

        def tokens(count: int, size: int = vocab_size) -> list[int]:
            return torch.randint(size, (count,), generator=generator).tolist()

        for threads in options.threads:
            torch.set_num_threads(threads)
            rates = Rates(options.read_mib << 20, options.side, loops)
            for label in options.rows:
                kind, number = label.split()
                row = Row(label, method, threads)
                if kind == "prefill":
                    prefill(row, engine, work, rates, tokens(int(number)), options.prompts)
                else:
                    batch = int(number) if kind == "batch" else 1
                    context = 128 if kind == "batch" else int(number)
                    prompts = [tokens(context) for _ in range(batch)]
                    decode(row, engine, work, rates, prompts, options.rounds)
                yield row
            del rates
        del engine


def line(row: Row) -> str:
    """Format a row of the table, with the goals of its fractions."""
    bits = BITS[row.method.partition("-")[0]]
    goals = {"instructions": LIMIT_GOAL} | dict.fromkeys(
        ("memory", "products"), GOALS.get(row.label, {}).get(bits)
    )
    cells = []
    for name in row.ceilings:
        middle, low, high = row.fractions(name)
        ceiling, goal = statistics.median(row.ceilings[name]), goals[name]
        of = f" (goal {goal:.0%})" if goal else ""
        cells.append(f"{middle:.0%} of {name} {ceiling:.1f} [{low:.0%} {high:.0%}]{of}")
    rate = statistics.median(row.rates)
    return f"| {row.threads} | {row.method} | {row.label} | {rate:.1f} | {'; '.join(cells)} |"


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model_dir", type=Path, help="what cpu_models.py wrote")
    parser.add_argument("--methods", nargs="+", default=["bf16", "int8", "w4a8-g32"])
    parser.add_argument("--threads", type=numbers, default=[2, 1])
    parser.add_argument("--rows", nargs="+", default=list(GOALS), help=f"of: {', '.join(GOALS)}")
    parser.add_argument("--rounds", type=int, default=9, help="of eight decode steps")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--read-mib", type=int, default=256, help="to measure the bandwidth with")
    parser.add_argument("--side", type=int, default=2048, help="of the matrices")
    parser.add_argument("--json", type=Path, help="write every single figure there")
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed()
    rows = []
    print("| threads | weights | row | tokens/s | of the ceiling, in tokens/s [quartiles] |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for row in measured(options, compiled_loops(Path(folder))):
            rows.append(row)
            print(line(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps([vars(each) for each in rows], indent=1))


if __name__ == "__main__":
    main()
