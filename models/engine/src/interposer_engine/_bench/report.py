"""The results of a benchmark: rows with rooflines, as text, JSON and llama-bench's table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from html import escape
from typing import Any

import torch
from torch import nn

from interposer.roofline import Timed
from interposer_engine._bench.kinds import Kind, Sample, Session, Step, prepared
from interposer_engine._bench.roofline import ModelWork, Roofs, measured_roofs
from interposer_engine._language_model import LanguageModel
from interposer_ops.layers.linear import Linear

VERSION = 1


@dataclass(frozen=True)
class Row:
    """The results of one benchmark row.

    Attributes:
        name, what, test, beside: the fields of ``Kind``.
        rates: tokens per second of each run.
        seconds: median duration of a run.
        memory_s, arithmetic_s: seconds of a run that only reads memory at the measured bandwidth,
            and of one that only computes at the measured rate; None if the least work is unknown.
        host_s: time of a run outside of the model; None if steps are captured graphs.
        ceiling: roofline in tokens per second, if each step took only the longer of both times.
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
        """Compute the results of a row from the runs of its workload.

        Args:
            profiled: one more run, in which the time within the model was measured.
            steps: the steps of a run, with the least work of each.
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
        """The measured rate as a fraction of the roofline's rate."""
        return None if self.ceiling is None else self.median / self.ceiling

    @property
    def held_by(self) -> str | None:
        """The bottleneck, the part that takes the most time: memory, arithmetic or host."""
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
    """All results of one ``interposer bench`` command.

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
        head = ("", "tokens/s", "", "roofline", "reached", "bound by", "")
        cells = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
        table = []
        for line in cells:
            label, *columns = (text.ljust(width) for text, width in zip(line, widths, strict=True))
            columns[0], columns[2], columns[3] = (
                line[number].rjust(widths[number]) for number in (1, 3, 4)
            )
            table.append("  ".join((label, *columns)).rstrip())
        return "\n".join((*self._head(), "", *table, *self._notes()))

    def llama_bench(self) -> str:
        """Return the rows that llama-bench has too, as a Markdown table with mean and deviation."""
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
            f"rooflines: {self.roofs}",
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


_COLUMNS = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"

# Widths and heights of the SVG in pixels.
_LABEL, _BAR, _NUMBERS, _LINE, _HEAD = 290, 320, 210, 24, 66
_FONT = "Helvetica, Arial, sans-serif"
_INK, _QUIET, _TRACK = "#1c2330", "#5d6675", "#e9ecf1"
_COLORS = {"memory": "#3949ab", "arithmetic": "#2e7d5b", "host": "#c0662b"}
_LEGEND = "fraction of the roofline, colored by bottleneck:"


def bars(benchmark: Benchmark) -> str:
    """Draw a line per row: a bar for the fraction of the roofline, and the tokens per second.

    Rows without a roofline have no bar.
    """
    width = max(len(row.what) for row in benchmark.rows)
    lines = [f"{row.what.ljust(width)}  {_bar(row)}  {_rate_text(row)}" for row in benchmark.rows]
    return "\n".join((f"{' ' * width}  0 % {'of the roofline':^{_COLUMNS - 9}} 100 %", *lines))


def _bar(row: Row) -> str:
    if row.reached is None:
        return " " * (_COLUMNS + 2)
    # Unicode has block characters for eighths of a column.
    eighths = round(8 * _COLUMNS * min(row.reached, 1.0))
    num_full, remainder = divmod(eighths, 8)
    svg_chart = "█" * num_full + (_EIGHTHS[remainder] if remainder else "")
    return f"▕{svg_chart.ljust(_COLUMNS)}▏"


def _rate_text(row: Row) -> str:
    share = "" if row.reached is None else f", {row.reached:.0%}"
    ratio = "" if row.ratio is None else f", x{row.ratio:.2f}"
    return f"{row.median:.1f} tokens/s{share}{ratio}"


def svg_chart(benchmark: Benchmark) -> str:
    """Draw the rows as one SVG document; the color of a bar states its bottleneck."""
    width = _LABEL + _BAR + _NUMBERS
    height = _HEAD + _LINE * len(benchmark.rows) + 14
    title = f"{benchmark.model} on {benchmark.device}"
    marks = [_box(0, 0, width, height, "#ffffff"), _text(14, 24, title, size=16)]
    marks += [*_legend(), *(m for n, row in enumerate(benchmark.rows) for m in _marks(n, row))]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' role="img" aria-label="{escape(title)}" font-family="{_FONT}">'
    )
    return "\n".join([head, *marks, "</svg>", ""])


def _legend() -> Iterator[str]:
    yield _text(14, 46, _LEGEND, _QUIET)
    for number, (name, color) in enumerate(_COLORS.items()):
        x = _LABEL + 96 * number
        yield _box(x, 36, 11, 11, color)
        yield _text(x + 16, 46, name, _QUIET)


def _marks(number: int, row: Row) -> Iterator[str]:
    y = _HEAD + _LINE * number
    yield _text(_LABEL - 8, y + 14, row.what, anchor="end")
    if row.reached is not None:
        yield _box(_LABEL, y + 3, _BAR, _LINE - 8, _TRACK)
        color = _COLORS.get(row.held_by or "", _QUIET)
        yield _box(_LABEL, y + 3, _BAR * min(row.reached, 1.0), _LINE - 8, color)
    yield _text(_LABEL + _BAR + 8, y + 14, _rate_text(row))


def _text(
    x: float, y: float, text: str, color: str = _INK, *, size: int = 12, anchor: str = "start"
) -> str:
    attributes = f'x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"'
    return f"<text {attributes}>{escape(text)}</text>"


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    size = f'width="{width:.1f}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} rx="2" fill="{color}"/>'


Progress = Callable[[str], object]


@dataclass(frozen=True)
class Runs:
    """The runs of one workload: measured runs, and a profiled run that also times the model."""

    samples: list[Sample]
    profiled: Sample


def measured_runs(
    lm: LanguageModel,
    kinds: Sequence[Kind],
    rounds: int,
    adapter: str | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Runs]:
    """Run every workload once per round, after a warm-up round and before a profiling round.

    Args:
        adapter: folder of the LoRA adapter, which is loaded only for kinds that use one.
        progress: called with the round and the row that come next.
    Returns: the runs by the name of the kind.
    """
    session = Session(lm)
    samples_by_kind: dict[str, list[Sample]] = {kind.name: [] for kind in kinds}
    # Rounds take turns among the kinds, so that a machine that slows down slows all rows.
    for number in range(rounds + 2):
        is_profiled = number == rounds + 1
        for kind in kinds:
            progress(f"round {number} of {rounds}: {kind.what}")
            profiling = session.profiled() if is_profiled else nullcontext()
            with prepared(kind, session, adapter), profiling:
                samples_by_kind[kind.name].append(kind.run(session))
                session.end()
    return {name: Runs(samples[1:-1], samples[-1]) for name, samples in samples_by_kind.items()}


def benchmark_rows(
    kinds: Sequence[Kind], runs: Mapping[str, Runs], work: ModelWork, roofs: Roofs
) -> tuple[Row, ...]:
    """Compute each row's results from its runs and the roofline."""
    rows: dict[str, Row] = {}
    for kind in kinds:
        baseline = rows.get(kind.beside or "")
        samples, profiled = runs[kind.name].samples, runs[kind.name].profiled
        steps = kind.least_work(work)
        rows[kind.name] = Row.of(kind, samples, profiled, steps, roofs, baseline)
    return tuple(rows.values())


def roofs_of(lm: LanguageModel, dtype: torch.dtype, tokens: int, read_bytes: int | None) -> Roofs:
    """Measure the roofline of a model's device, with the model's largest matmul as one candidate.

    Args:
        tokens: rows of that matmul.
        read_bytes: as in ``measured_roofs``; if given, the plain matmul is kept small as well.
    """
    # A small buffer means a quick run, in tests for example.
    side = None if read_bytes is None else 256
    matmuls = _largest_matmul(lm.engine.model, dtype, tokens, lm.placement.device.torch_device)
    return measured_roofs(
        lm.placement, 5, dtype=dtype, read_bytes=read_bytes, side=side, products=matmuls
    )


def _largest_matmul(
    model: nn.Module, dtype: torch.dtype, tokens: int, device: str
) -> Iterator[Timed]:
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    # Linear layers that were merged into grouped experts have no kernel and no weights.
    callable_layers = [layer for layer in layers if layer.kernel is not None]
    if not callable_layers:
        return
    layer = max(callable_layers, key=lambda layer: layer.in_features * sum(layer.parts.values()))
    outputs = sum(layer.parts.values())
    x = torch.randn(tokens, layer.in_features, device=device).to(dtype)
    name = f"the model's {' + '.join(layer.parts)}"
    yield Timed(name, 2.0 * tokens * layer.in_features * outputs, lambda: layer(x))
