"""Draw random mutants from the lines that tests execute."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

__all__ = ["Mutant", "draw", "mutated"]

# The first two need arguments; a decorator is applied at import, which no single test executes.
_LEFT_OUT = ("core/VariableReplacer", "core/VariableInserter", "core/RemoveDecorator")


@dataclass(frozen=True)
class Mutant:
    """One change of one line of a source file.

    The line's text and its rank among equal lines name the place, so that a mutant stays itself
    when lines are added above it.
    """

    path: str
    operator: str
    text: str
    rank: int
    occurrence: int  # among the places on this line that the operator changes
    line: int  # when it was drawn


@dataclass(frozen=True)
class _Place:
    operator: str
    occurrence: int
    line: int


class _Places(Visitor):  # type: ignore[misc]  # its library has no types
    """Collects each place of a module that an operator changes."""

    def __init__(self, operator: str) -> None:
        self._name, self._operator = operator, get_operator(operator)()
        self.places: list[_Place] = []

    def visit(self, node: object) -> object:
        for (line, _), _ in self._operator.mutation_positions(node):
            self.places.append(_Place(self._name, len(self.places), line))
        return node


def _annotation_lines(source: str) -> set[int]:
    """Return the lines of annotations, which nothing evaluates."""
    lines = set[int]()
    for node in ast.walk(ast.parse(source)):
        for name in ("annotation", "returns"):
            if isinstance(part := getattr(node, name, None), ast.AST):
                lines |= set(range(part.lineno, part.end_lineno + 1))  # type: ignore[attr-defined]
    return lines


def _places(source: str) -> Iterator[_Place]:
    tree = get_ast(source)
    for name in operator_names():
        if name not in _LEFT_OUT:
            visitor = _Places(name)
            visitor.walk(tree)
            yield from visitor.places


def _rank(lines: list[str], line: int) -> int:
    return lines[: line - 1].count(lines[line - 1])


def draw(
    root: Path, executed: Mapping[str, Mapping[int, object]], number: int, seed: int
) -> list[Mutant]:
    """Draw ``number`` mutants, as many from each distribution as from any other.

    A line is drawn first, from all lines that tests execute, and then one change of that line.
    """
    generator = random.Random(seed)
    folders = sorted({path.partition("/src/")[0] for path in executed})
    sources, candidates = dict[str, str](), dict[str, dict[int, list[_Place]]]()
    mutants = list[Mutant]()
    waiting = {
        folder: [
            (path, line)
            for path in sorted(executed)
            if path.partition("/src/")[0] == folder
            for line in sorted(executed[path])
        ]
        for folder in folders
    }
    for lines in waiting.values():
        generator.shuffle(lines)
    while len(mutants) < number and any(waiting.values()):
        for folder in folders:
            while waiting[folder]:
                path, line = waiting[folder].pop()
                if path not in sources:
                    sources[path] = source = (root / path).read_text(encoding="utf-8")
                    left_out, by_line = _annotation_lines(source), dict[int, list[_Place]]()
                    for place in _places(source):
                        if place.line not in left_out:
                            by_line.setdefault(place.line, []).append(place)
                    candidates[path] = by_line
                if places := candidates[path].get(line):
                    place = generator.choice(places)
                    lines_of_file = sources[path].splitlines()
                    same = [one for one in places if one.operator == place.operator]
                    mutants.append(
                        Mutant(
                            path,
                            place.operator,
                            lines_of_file[line - 1],
                            _rank(lines_of_file, line),
                            same.index(place),
                            line,
                        )
                    )
                    break
    return mutants[:number]


def mutated(root: Path, mutant: Mutant) -> tuple[int, str] | None:
    """Return the mutant's line in ``root`` and the changed module; None if that line is gone."""
    source = (root / mutant.path).read_text(encoding="utf-8")
    lines = source.splitlines()
    found = [number for number, text in enumerate(lines, 1) if text == mutant.text]
    if mutant.rank >= len(found):
        return None
    line = found[mutant.rank]
    visitor = _Places(mutant.operator)
    visitor.walk(get_ast(source))
    place = [place for place in visitor.places if place.line == line][mutant.occurrence]
    changed = mutate_code(source, get_operator(mutant.operator)(), place.occurrence)
    assert isinstance(changed, str)
    assert changed != source
    return line, changed
