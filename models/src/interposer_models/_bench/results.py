"""The results of a benchmark: rows with ceilings, as text, JSON and llama-bench's table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from interposer_models._bench.kinds import Kind, Step
from interposer_models._bench.roofs import Roofs
from interposer_models._bench.session import Sample

VERSION = 1


@dataclass(frozen=True)
class Row:
    """The measurements of one kind.

    Attributes:
        name, what, test, beside: of the kind.
        rates: tokens per second of each run.
        seconds: of a run, the median.
        memory_s, arithmetic_s: time of a run to only read at the measured bandwidth, and to only
            compute at the measured rate; None if the least work is unknown.
        host_s: time of a run outside of the model; None if steps are captured graphs.
        ceiling: tokens per second if each step took the longer of both times and nothing else.
        gap_s: the 95th percentile of seconds between tokens, of running requests.
        ratio: the median of the run-by-run ratios to the row ``beside``.
    """

    name: str
    what: str
    test: str | None
    rates: tuple[float, ...]
    seconds: float
    memory_s: float | None = None
    arithmetic_s: float | None = None
    host_s: float | None = None
    ceiling: float | None = None
    gap_s: float | None = None
    beside: str | None = None
    ratio: float | None = None

    @classmethod
    def of(
        cls,
        kind: Kind,
        samples: Sequence[Sample],
        profiled: Sample,
        steps: Sequence[Step],
        roofs: Roofs,
        baseline: Row | None,
    ) -> Row:
        """Evaluate the runs of a kind.

        Args:
            profiled: one more run, in which the time within the model was measured.
            steps: of a run, with the least work of each.
            baseline: the row to compare with.
        """
        rates = tuple(sample.tokens / sample.seconds for sample in samples)
        seconds = statistics.median(sample.seconds for sample in samples)
        gaps = sorted(gap for sample in samples for gap in sample.gaps)
        host = None
        if profiled.model_s is not None:
            # Profiling waits for the device and slows a run down, so only the fraction is used.
            host = seconds * (1.0 - profiled.model_s / profiled.seconds)
        row = cls(
            kind.name,
            kind.what,
            kind.test,
            rates,
            seconds,
            host_s=host,
            gap_s=gaps[int(0.95 * (len(gaps) - 1))] if gaps else None,
            beside=kind.beside,
            ratio=None if baseline is None else _ratio(rates, baseline.rates),
        )
        if not steps:
            return row
        step_times = [
            (s.times * s.num_bytes / roofs.bytes_per_s, s.times * s.operations / roofs.flops_per_s)
            for s in steps
        ]
        tokens = sum(step.times * step.tokens for step in steps)
        # Requests whose prompt was computed in an earlier step may produce some extra tokens.
        share = statistics.median(sample.tokens for sample in samples) / tokens
        return replace(
            row,
            memory_s=share * sum(memory for memory, _ in step_times),
            arithmetic_s=share * sum(arithmetic for _, arithmetic in step_times),
            # Reading and computing overlap at best, so a step takes at least the longer of both.
            ceiling=tokens / sum(max(both) for both in step_times),
        )

    @property
    def median(self) -> float:
        """Median tokens per second."""
        return statistics.median(self.rates)

    @property
    def reached(self) -> float | None:
        """The fraction of the ceiling that was reached."""
        return None if self.ceiling is None else self.median / self.ceiling

    @property
    def held_by(self) -> str | None:
        """The bottleneck, the largest known part of the time: memory, arithmetic or host."""
        parts = {"memory": self.memory_s, "arithmetic": self.arithmetic_s, "host": self.host_s}
        seconds = {name: value for name, value in parts.items() if value is not None}
        return max(seconds, key=lambda name: seconds[name]) if self.memory_s is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as in the JSON report."""
        rates = self.rates
        return {
            "name": self.name,
            "what": self.what,
            "test": self.test,
            "tokens_per_second": {
                "median": self.median,
                "low": min(rates),
                "high": max(rates),
                "mean": statistics.mean(rates),
                "deviation": statistics.stdev(rates) if len(rates) > 1 else 0.0,
            },
            "p95_between_tokens_s": self.gap_s,
            "ceiling_tokens_per_second": self.ceiling,
            "reached": self.reached,
            "held_by": self.held_by,
            "seconds": {
                "run": self.seconds,
                "memory": self.memory_s,
                "arithmetic": self.arithmetic_s,
                "host": self.host_s,
            },
            "beside": self.beside,
            "ratio": self.ratio,
        }


@dataclass(frozen=True)
class Benchmark:
    """Everything that one command measured.

    Attributes:
        weights: number of weights.
        weight_bytes: bytes of weights that a decode step of one request reads, in their stored
            form.
        peak_memory_bytes: None if the platform does not report memory.
    """

    model: str
    platform: str
    device: str
    dtype: str
    quantization: str | None
    rounds: int
    weights: int
    weight_bytes: float
    load_s: float
    peak_memory_bytes: int | None
    roofs: Roofs
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> str:
        """Return the report as JSON."""
        facts = {"version": VERSION, **asdict(self)}
        facts["rows"] = [row.to_dict() for row in self.rows]
        return json.dumps(facts, indent=2)

    def __str__(self) -> str:
        """Return the report as a table."""
        head = ("", "tokens/s", "", "ceiling", "reached", "held by", "")
        cells = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
        table = []
        for line in cells:
            label, *columns = (text.ljust(width) for text, width in zip(line, widths, strict=True))
            # Right-align the columns of numbers.
            columns[0], columns[2], columns[3] = (
                line[number].rjust(widths[number]) for number in (1, 3, 4)
            )
            table.append("  ".join((label, *columns)).rstrip())
        return "\n".join((*self._head(), "", *table, *self._notes()))

    def llama_bench(self) -> str:
        """Return the rows that llama-bench has, as a Markdown table with mean and deviation."""
        size = f"{self.weight_bytes / 2**30:.2f} GiB"
        weights, threads = f"{self.weights / 1e6:.2f} M", str(self.roofs.threads)
        common_cells = (self.model, size, weights, self.platform, threads)
        lines = ["| model | size | params | backend | threads | test | t/s |"]
        lines.append("|---|---:|---:|---|---:|---:|---:|")
        for row in (row for row in self.rows if row.test is not None):
            rates = row.to_dict()["tokens_per_second"]
            rate = f"{rates['mean']:.2f} ± {rates['deviation']:.2f}"
            lines.append("| " + " | ".join((*common_cells, str(row.test), rate)) + " |")
        return "\n".join(lines)

    def _head(self) -> list[str]:
        storage = self.dtype if self.quantization is None else f"{self.quantization}, {self.dtype}"
        peak = self.peak_memory_bytes
        memory = "" if peak is None else f", peak memory {peak / 2**20:.0f} MiB"
        return [
            f"{self.model}: {self.weights / 1e6:.1f} million weights, {storage}; {self.platform} "
            f"({self.device}), {self.roofs.threads} threads",
            f"loaded in {self.load_s:.2f} s{memory}; a step of one request reads "
            f"{self.weight_bytes / 2**20:.0f} MiB of weights",
            f"roofs: {self.roofs}",
        ]

    def _notes(self) -> list[str]:
        return ["", *(f"note: {note}" for note in self.notes)] if self.notes else []


def _cells(row: Row) -> tuple[str, ...]:
    remarks = []
    if row.gap_s is not None:
        remarks.append(f"95 % of gaps within {row.gap_s * 1e3:.1f} ms")
    if row.name.startswith("prefix"):
        remarks.append(f"{row.seconds * 1e3:.1f} ms")
    if row.ratio is not None:
        remarks.append(f"x{row.ratio:.2f}")
    return (
        row.what,
        f"{row.median:.1f}",
        f"({min(row.rates):.1f}-{max(row.rates):.1f})",
        "" if row.ceiling is None else f"{row.ceiling:.0f}",
        "" if row.reached is None else f"{row.reached:.0%}",
        row.held_by or "",
        ", ".join(remarks),
    )


def _ratio(rates: Sequence[float], baseline_rates: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(rates, baseline_rates, strict=True))
