"""Draw the rows of a benchmark as bars: as text for a terminal, and as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from interposer_models._bench.results import Benchmark, Row

_COLUMNS = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"

# Widths and heights of the SVG in pixels.
_LABEL, _BAR, _NUMBERS, _LINE, _HEAD = 290, 320, 210, 24, 66
_FONT = "Helvetica, Arial, sans-serif"
_INK, _QUIET, _TRACK = "#1c2330", "#5d6675", "#e9ecf1"
_COLORS = {"memory": "#3949ab", "arithmetic": "#2e7d5b", "host": "#c0662b"}
_LEGEND = "share of the ceiling, by what holds it:"


def bars(benchmark: Benchmark) -> str:
    """Draw a line per row: a bar for the share of the ceiling, and the tokens per second.

    Rows without a ceiling have no bar.
    """
    width = max(len(row.what) for row in benchmark.rows)
    lines = [f"{row.what.ljust(width)}  {_bar(row)}  {_rate_text(row)}" for row in benchmark.rows]
    return "\n".join((f"{' ' * width}  0 % {'of the ceiling':^{_COLUMNS - 9}} 100 %", *lines))


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
