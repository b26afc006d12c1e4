"""Write the figure, the tables and the losses of README.md and docs/performance.md.

    python benchmarks/plot_results.py [--check]

The source is results/cpu.json. The figure is plain SVG, the same bytes for the same results. The
tables and the losses stand between comments of the pages. ``--check`` writes nothing, and fails if
a file differs from the results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cpu_results import Run, read_runs, runs_of

__all__ = ["Bar", "Cell", "Figure", "figures", "losses", "summary", "table"]

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"

MACHINES = (
    "AMD EPYC, AVX-512 BF16",
    "AMD EPYC, AVX2",
    "Intel Xeon, AMX",
    "Intel Xeon, AVX-512 VNNI",
)
SHAPE = "qwen3-0.6b"
# An engine, by the width of its weights, and its columns in the tables. Of several columns the
# fastest is drawn.
ENGINES: Mapping[int, Mapping[str, tuple[str, ...]]] = {
    16: {
        "interposer": ("interposer:bf16",),
        "llama.cpp": ("llama_cpp:bf16", "llama_cpp:f16"),
        "OpenVINO": ("openvino:fp16",),
        "vLLM": ("vllm:bf16",),
        "transformers": ("transformers:compiled", "transformers:eager"),
    },
    8: {
        "interposer": ("interposer:int8",),
        "llama.cpp": ("llama_cpp:q8_0",),
        "OpenVINO": ("openvino:int8",),
    },
    4: {
        "interposer, groups of 32": ("interposer:w4a8-g32",),
        "interposer, groups of 128": ("interposer:w4a8-g128",),
        "llama.cpp": ("llama_cpp:q4_0",),
        "OpenVINO": ("openvino:int4", "openvino:int4-all"),
    },
}
WEIGHTS = {
    16: "bfloat16 or float16 weights",
    8: "8-bit weights, quantized activations",
    4: "4-bit weights, quantized activations",
}

# Columns of the page's table and of the losses, by the width of the weights.
COLUMNS = {
    16: {"bfloat16": "interposer:bf16"},
    8: {"int8": "interposer:int8"},
    4: {
        "W4A8, groups of 32": "interposer:w4a8-g32",
        "W4A8, groups of 128": "interposer:w4a8-g128",
    },
}
SHOWN = ("decode, context 128", "prefill 512", "batch 8, context 128")
ROWS = (*SHOWN, "decode, context 1024", "prefill 1024")
# Other shapes on the first machine, in 16 and in 4 bits.
SHAPES = {
    "Gemma 3 1B": "gemma-3-1b",
    "DeepSeek-V2-Lite with fewer experts": "deepseek-v2-lite-cut",
    "Qwen3 MoE": "qwen3-moe-16e",
    "Qwen3-Next with 8 layers": "qwen3-next-cut",
}
PEERS = {"llama_cpp": "llama.cpp", "openvino": "OpenVINO", "vllm": "vLLM"}
# Why another engine is faster: every loss needs its sentence.
REASONS = {
    ("Intel Xeon, AMX", "bfloat16", "prefill 1024"): (
        "The GEMM loads its AMX tiles from the L2 cache, and attention is slower than the GEMMs."
    ),
    ("Gemma 3 1B", "bfloat16", "decode, context 1024"): (
        "Both engines read weights at nine tenths of the memory bandwidth."
    ),
}

PANEL, LABEL, GAP = 350, 172, 14
LINE, HEAD = 20, 62
FONT = "Helvetica, Arial, sans-serif"
INK, QUIET, OURS, OTHERS = "#1c2330", "#5d6675", "#3949ab", "#a4adba"


@dataclass(frozen=True)
class Bar:
    """Tokens per second of one engine: the median of the rounds, the lowest and the highest."""

    engine: str
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Cell:
    """Tokens per second of one column, and the ratio to the fastest other engine of the row."""

    median: float
    ratio: float
    peer: str

    @property
    def shown(self) -> str:
        """The cell as the page shows it; a loss is bold."""
        ratio = f"x{self.ratio:.2f}"
        return f"{self.median:.0f}, {f'**{ratio}**' if self.ratio < 1 else ratio}"


@dataclass(frozen=True)
class Figure:
    """One row of the tables, for all machines and widths of weights."""

    name: str
    row: str
    title: str


FIGURES_DRAWN = (
    Figure("decode", "decode, context 128", "Decode: tokens per second, one request, context 128"),
)


def bars(runs: Sequence[Run], row: str, bits: int, machine: str) -> list[Bar]:
    """Return the engines of a machine, each from the newest run that has it."""
    found = []
    for engine, columns in ENGINES[bits].items():
        for run in runs_of(runs, machine, SHAPE, bits):
            cells = run["rows"].get(row, {})
            rates = [cells[name]["rates"] for name in columns if name in cells]
            if rates:
                found.append(Bar(engine, *max(rates)))
                break
    return found


def cell(
    runs: Sequence[Run], machine: str, shape: str, bits: int, row: str, column: str
) -> Cell | None:
    """Return the newest cell of a column, None if no run has it."""
    for run in runs_of(runs, machine, shape, bits):
        if found := run["rows"].get(row, {}).get(column):
            library = found["peer"].partition(":")[0]
            return Cell(found["rates"][0], found["ratio"], PEERS[library])
    return None


def table(runs: Sequence[Run]) -> str:
    """Return the table of the page: machines and weights by row."""
    lines = [
        "| machine | weights | decode | prefill of 512 | batch of 8 |",
        "|---|---|---|---|---|",
    ]
    for machine in MACHINES:
        label = machine
        for bits, columns in COLUMNS.items():
            for weights, column in columns.items():
                cells = [cell(runs, machine, SHAPE, bits, row, column) for row in SHOWN]
                shown = " | ".join(each.shown if each else "" for each in cells)
                lines.append(f"| {label} | {weights} | {shown} |")
                label = ""
    return "\n".join(lines)


def losses(runs: Sequence[Run]) -> str:
    """Return a line for each cell in which another engine is faster, with the reason."""
    subjects = [(machine, machine, SHAPE, bits) for machine in MACHINES for bits in COLUMNS]
    subjects += [
        (title, MACHINES[0], shape, bits) for title, shape in SHAPES.items() for bits in (16, 4)
    ]
    lines = []
    for subject, machine, shape, bits in subjects:
        for weights, column in COLUMNS[bits].items():
            for row in ROWS:
                result = cell(runs, machine, shape, bits, row, column)
                if result and result.ratio < 1:
                    place = f"{subject}, {weights}, {row}"
                    reason = REASONS[subject, weights, row]
                    lines.append(f"- {place}: x{result.ratio:.2f} of {result.peer}. {reason}")
    return "\n".join(lines)


def summary(runs: Sequence[Run]) -> str:
    """Return the table of the README: decoding by one request, machines by row."""
    weights = {name: bits for bits, columns in COLUMNS.items() for name in columns}
    lines = [f"| decode, one request | {' | '.join(weights)} |", "|---" * (1 + len(weights)) + "|"]
    for machine in MACHINES:
        cells = [
            cell(runs, machine, SHAPE, bits, SHOWN[0], COLUMNS[bits][name])
            for name, bits in weights.items()
        ]
        lines.append(f"| {machine} | {' | '.join(each.shown if each else '' for each in cells)} |")
    return "\n".join(lines)


def insert(file: Path, parts: Mapping[str, str]) -> str:
    """Return the text of a page with each part between the comments of its name."""
    written = file.read_text(encoding="utf-8")
    for name, part in parts.items():
        start, end = f"<!-- {name}: plot_results.py -->\n", f"<!-- end of {name} -->"
        before, _, rest = written.partition(start)
        _, found, after = rest.partition(end)
        assert found, f"{file.name} has no place for the {name}"
        written = f"{before}{start}\n{part}\n\n{end}{after}"
    return written


def text(x: float, y: float, said: str, color: str = INK, *, size: int = 12, **more: str) -> str:
    """Return a line of text whose baseline begins, or ends, at a point."""
    options = {"x": f"{x:g}", "y": f"{y:g}", "font-size": str(size), "fill": color, **more}
    stated = " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in options.items())
    return f"<text {stated}>{escape(said)}</text>"


def box(x: float, y: float, width: float, height: float, color: str) -> str:
    """Return a filled rectangle."""
    size = f'width="{width:.1f}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} rx="2" fill="{color}"/>'


def panel(left: float, machine: str, groups: Mapping[int, list[Bar]]) -> Iterator[str]:
    """Yield the marks of one machine: a group of bars for each width of weights."""
    yield text(left, HEAD - 12, machine, size=13, font_weight="bold")
    most = max(bar.high for group in groups.values() for bar in group)
    scale = (PANEL - LABEL - 52) / most
    y = HEAD
    for bits, weights in WEIGHTS.items():
        yield text(left, y + 14, weights, QUIET)
        y += LINE
        for engine in ENGINES[bits]:
            bar = next((bar for bar in groups[bits] if bar.engine == engine), None)
            yield text(left + LABEL - 6, y + 14, engine, text_anchor="end")
            if bar is None:
                yield text(left + LABEL, y + 14, "not in the results", QUIET, size=11)
            else:
                color = OURS if engine.startswith("interposer") else OTHERS
                yield box(left + LABEL, y + 3, bar.median * scale, LINE - 6, color)
                start, end = (left + LABEL + edge * scale for edge in (bar.low, bar.high))
                yield f'<path d="M{start:.1f} {y + 10}H{end:.1f}" stroke="{INK}" opacity="0.6"/>'
                edge = left + LABEL + max(bar.median, bar.high) * scale
                yield text(round(edge + 5, 1), y + 14, f"{bar.median:.0f}", size=11)
            y += LINE
        y += 8


def draw(figure: Figure, runs: Sequence[Run]) -> str:
    """Return a figure as SVG."""
    width = len(MACHINES) * (PANEL + GAP) + GAP
    height = HEAD + sum(8 + LINE * (1 + len(engines)) for engines in ENGINES.values()) + 6
    marks = [box(0, 0, width, height, "#ffffff"), text(GAP, 24, figure.title, size=16)]
    for number, machine in enumerate(MACHINES):
        groups = {bits: bars(runs, figure.row, bits, machine) for bits in ENGINES}
        marks.extend(panel(GAP + number * (PANEL + GAP), machine, groups))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' role="img" aria-label="{escape(figure.title)}" font-family="{FONT}">'
    )
    return "\n".join([head, *marks, "</svg>", ""])


def figures() -> dict[Path, str]:
    """Return the text of every figure, and of the pages with tables, by its file."""
    runs = read_runs()
    drawn = {FIGURES / f"{figure.name}.svg": draw(figure, runs) for figure in FIGURES_DRAWN}
    return drawn | {
        PAGE: insert(PAGE, {"table": table(runs), "losses": losses(runs)}),
        README: insert(README, {"summary": summary(runs)}),
    }


def main() -> None:
    """Write the figure and the pages, or compare them with the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    stale = []
    for file, drawn in figures().items():
        if not check:
            file.write_text(drawn, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != drawn:
            stale.append(file.name)
    if stale:
        sys.exit(f"{', '.join(stale)}: differ from benchmarks/results. Try: python {sys.argv[0]}")


if __name__ == "__main__":
    main()
