"""The results of a benchmark: rows with their ceilings, as text, JSON and llama-bench's table."""

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
    """The runs of one kind.

    Attributes:
        name, what, test, beside: of the kind.
        rates: tokens per second of each run.
        seconds: of a run, the median.
        memory_s, arithmetic_s: that reading at the measured bandwidth, and computing at the
            measured rate, take of a run; None where the least work is not known.
        host_s: of a run outside of the model; None where steps are graphs.
        ceiling: tokens per second where each step takes the longer of both and nothing else.
        gap_s: the 95th percentile of seconds between tokens, of running requests.
        ratio: the median of ratios to ``beside``, run by run.
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
        watched: Sample,
        least: Sequence[Step],
        roofs: Roofs,
        beside: Row | None,
    ) -> Row:
        """Judge the runs of a kind.

        Args:
            watched: a further run, of which the seconds within the model are known.
            least: what a run takes.
            beside: the row that it is compared with.
        """
        rates = tuple(sample.tokens / sample.seconds for sample in samples)
        seconds = statistics.median(sample.seconds for sample in samples)
        gaps = sorted(gap for sample in samples for gap in sample.gaps)
        host = None
        if watched.model_s is not None:
            host = seconds * (1.0 - watched.model_s / watched.seconds)
        row = cls(
            kind.name,
            kind.what,
            kind.test,
            rates,
            seconds,
            host_s=host,
            gap_s=gaps[int(0.95 * (len(gaps) - 1))] if gaps else None,
            beside=kind.beside,
            ratio=None if beside is None else _ratio(rates, beside.rates),
        )
        if not least:
            return row
        parts = [
            (s.times * s.num_bytes / roofs.bytes_per_s, s.times * s.operations / roofs.flops_per_s)
            for s in least
        ]
        tokens = sum(step.times * step.tokens for step in least)
        # Requests that are ahead of others may give some tokens more in a run.
        share = statistics.median(sample.tokens for sample in samples) / tokens
        return replace(
            row,
            memory_s=share * sum(memory for memory, _ in parts),
            arithmetic_s=share * sum(arithmetic for _, arithmetic in parts),
            ceiling=tokens / sum(max(both) for both in parts),
        )

    @property
    def median(self) -> float:
        """Tokens per second."""
        return statistics.median(self.rates)

    @property
    def reached(self) -> float | None:
        """The share of the ceiling."""
        return None if self.ceiling is None else self.median / self.ceiling

    @property
    def held_by(self) -> str | None:
        """The largest part of the time that is known: memory, arithmetic or host."""
        known = {"memory": self.memory_s, "arithmetic": self.arithmetic_s, "host": self.host_s}
        stated = {name: value for name, value in known.items() if value is not None}
        return max(stated, key=lambda name: stated[name]) if self.memory_s is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Return what the JSON has of it."""
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
    """All that one command measured.

    Attributes:
        weights: how many there are.
        weight_bytes: of a decode step of one request, as they are held.
        peak_memory_bytes: None where the platform does not tell.
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
        """Return the facts as JSON."""
        facts = {"version": VERSION, **asdict(self)}
        facts["rows"] = [row.to_dict() for row in self.rows]
        return json.dumps(facts, indent=2)

    def __str__(self) -> str:
        """Return the table."""
        head = ("", "tokens/s", "", "ceiling", "reached", "held by", "")
        cells = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
        table = []
        for line in cells:
            first, *rest = (text.ljust(width) for text, width in zip(line, widths, strict=True))
            # Numbers end below each other.
            rest[0], rest[2], rest[3] = (line[number].rjust(widths[number]) for number in (1, 3, 4))
            table.append("  ".join((first, *rest)).rstrip())
        return "\n".join((*self._head(), "", *table, *self._notes()))

    def llama_bench(self) -> str:
        """Return the rows that llama-bench has, in the columns of its Markdown: mean and spread."""
        size = f"{self.weight_bytes / 2**30:.2f} GiB"
        weights, threads = f"{self.weights / 1e6:.2f} M", str(self.roofs.threads)
        fixed = (self.model, size, weights, self.platform, threads)
        lines = ["| model | size | params | backend | threads | test | t/s |"]
        lines.append("|---|---:|---:|---|---:|---:|---:|")
        for row in (row for row in self.rows if row.test is not None):
            told = row.to_dict()["tokens_per_second"]
            rate = f"{told['mean']:.2f} ± {told['deviation']:.2f}"
            lines.append("| " + " | ".join((*fixed, str(row.test), rate)) + " |")
        return "\n".join(lines)

    def _head(self) -> list[str]:
        form = self.dtype if self.quantization is None else f"{self.quantization}, {self.dtype}"
        peak = self.peak_memory_bytes
        memory = "" if peak is None else f", peak memory {peak / 2**20:.0f} MiB"
        return [
            f"{self.model}: {self.weights / 1e6:.1f} million weights, {form}; {self.platform} "
            f"({self.device}), {self.roofs.threads} threads",
            f"loaded in {self.load_s:.2f} s{memory}; a step of one request reads "
            f"{self.weight_bytes / 2**20:.0f} MiB of weights",
            f"roofs: {self.roofs}",
        ]

    def _notes(self) -> list[str]:
        return ["", *(f"note: {note}" for note in self.notes)] if self.notes else []


def _cells(row: Row) -> tuple[str, ...]:
    more = []
    if row.gap_s is not None:
        more.append(f"95 % of gaps within {row.gap_s * 1e3:.1f} ms")
    if row.name.startswith("prefix"):
        more.append(f"{row.seconds * 1e3:.1f} ms")
    if row.ratio is not None:
        more.append(f"x{row.ratio:.2f}")
    return (
        row.what,
        f"{row.median:.1f}",
        f"({min(row.rates):.1f}-{max(row.rates):.1f})",
        "" if row.ceiling is None else f"{row.ceiling:.0f}",
        "" if row.reached is None else f"{row.reached:.0%}",
        row.held_by or "",
        ", ".join(more),
    )


def _ratio(own: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(own, other, strict=True))
