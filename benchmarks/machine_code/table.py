"""The table of figures of an architecture: written, read, and compared with new figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from machine_code.figures import UNIT, Figure

__all__ = ["TOLERANCE", "Comparison", "Table", "TableError", "compare", "read", "write"]

TOLERANCE = 1.05
"""A figure that grows by more than this factor is worse."""

_HEAD = f"""\
# Main inner loops of native kernels: instructions and cycles for {UNIT} multiply-adds, or for
# {UNIT} bytes in elementwise, sampling and rounding. Cycles are those of models of processors.
# To renew: python benchmarks/kernel_cycles.py --write"""


class TableError(Exception):
    """A file holds no table, or another one than is needed."""


@dataclass(frozen=True)
class Table:
    """Figures of one architecture, with the programs that they depend on, by their versions."""

    compiler: str
    analyser: str
    figures: tuple[Figure, ...]


@dataclass
class Comparison:
    """Lines about figures that differ from those of a table."""

    worse: list[str] = field(default_factory=list)
    better: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """Return the lines about figures that a change must mend, or write into the table."""
        return [*self.worse, *self.missing, *self.unknown]


def write(table: Table, file: Path) -> None:
    """Write a table, its levels in the order of its figures."""
    lines = [_HEAD, f"compiler\t{table.compiler}", f"analyser\t{table.analyser}"]
    level = ""
    for figure in table.figures:
        if figure.level != level:
            level = figure.level
            lines += ["", "\t".join(("level", level, "loops", "instructions", *figure.cycles))]
        numbers = (figure.instructions, *figure.cycles.values())
        texts = (f"{number:.4g}" for number in numbers)
        lines.append("\t".join((figure.family, figure.function, str(figure.loops), *texts)))
    file.write_text("\n".join(lines) + "\n")


def read(file: Path) -> Table:
    """Read what ``write`` wrote. Raises: TableError: it is something else."""
    if not file.is_file():
        raise TableError(f"{file}: there is no table. Try: kernel_cycles.py --write")
    programs, figures = dict[str, str](), list[Figure]()
    level, models = "", list[str]()
    for line in file.read_text().splitlines():
        match line.split("\t"):
            case [("compiler" | "analyser") as name, version]:
                programs[name] = version
            case ["level", level, "loops", "instructions", *models]:
                pass
            case [family, function, loops, instructions, *cycles] if len(cycles) == len(models):
                by_model = dict(zip(models, map(float, cycles), strict=True))
                figures.append(
                    Figure(level, family, function, int(loops), float(instructions), by_model)
                )
            case _ if line and not line.startswith("#"):
                raise TableError(f"{file}: no line of a table: {line!r}")
    if programs.keys() != {"compiler", "analyser"} or not figures:
        raise TableError(f"{file}: no table of figures. Try: kernel_cycles.py --write")
    return Table(programs["compiler"], programs["analyser"], tuple(figures))


def compare(old: Sequence[Figure], new: Iterable[Figure]) -> Comparison:
    """Compare figures with those of a table."""
    known, found = {figure.name: figure for figure in old}, Comparison()
    for figure in new:
        if (before := known.pop(figure.name, None)) is None:
            found.unknown.append(f"{_title(figure)}: not in the table")
            continue
        for measure, was, now in _pairs(before, figure):
            line = f"{_title(figure)}: {measure} {was:.4g}, now {now:.4g} (x{now / was:.2f})"
            if now > TOLERANCE * was:
                found.worse.append(line)
            elif was > TOLERANCE * now:
                found.better.append(line)
    found.missing += [f"{_title(figure)}: no longer found" for figure in known.values()]
    return found


def _title(figure: Figure) -> str:
    return f"{figure.family} at {figure.level}, {figure.function}"


def _pairs(old: Figure, new: Figure) -> Iterator[tuple[str, float, float]]:
    """Yield each measure that both figures have, with the old and the new number.

    Instructions alone say nothing where there are cycles, so they are not compared.
    """
    for model, cycles in new.cycles.items():
        if model in old.cycles:
            yield f"cycles on {model}", old.cycles[model], cycles
