"""Draw random mutants from the source of all distributions."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

__all__ = ["Mutant", "draw", "find_line", "mutate"]

# The first two need arguments; a decorator is applied at import, whatever its function does later.
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
    occurrence: int  # in the module
    line: int


class _Places(Visitor):  # type: ignore[misc]  # its library has no types
    """Collects each place of a module that one of the operators changes."""

    def __init__(self, *names: str) -> None:
        self._operators = {name: get_operator(name)() for name in names}
        self._counts = dict.fromkeys(names, 0)
        self.places: list[_Place] = []

    def visit(self, node: object) -> object:
        for name, operator in self._operators.items():
            for (line, _), _ in operator.mutation_positions(node):
                self.places.append(_Place(name, self._counts[name], line))
                self._counts[name] += 1
        return node


def _find_annotations(source: str) -> set[int]:
    """Return the lines of annotations, which nothing evaluates."""
    lines = set[int]()
    for node in ast.walk(ast.parse(source)):
        for name in ("annotation", "returns"):
            if isinstance(part := getattr(node, name, None), ast.AST):
                lines |= set(range(part.lineno, part.end_lineno + 1))  # type: ignore[attr-defined]
    return lines


def _find_places(source: str) -> dict[int, list[_Place]]:
    """Return the places that can be changed on each line."""
    visitor = _Places(*(name for name in operator_names() if name not in _LEFT_OUT))
    visitor.walk(get_ast(source))
    annotations, places = _find_annotations(source), defaultdict[int, list[_Place]](list)
    for place in visitor.places:
        if place.line not in annotations:
            places[place.line].append(place)
    return places


def draw(root: Path, number: int, seed: int) -> list[Mutant]:
    """Draw ``number`` mutants, as many from each distribution as from any other.

    A line is drawn first, from all lines of the distribution, and then one change of that line.
    """
    generator = random.Random(seed)
    waiting = dict[str, list[tuple[str, int]]]()
    sources, places = dict[str, list[str]](), dict[str, dict[int, list[_Place]]]()
    for file in sorted(root.glob("**/src/**/*.py")):
        path = file.relative_to(root).as_posix()
        if path.startswith((".", "tests/")):
            continue
        sources[path] = file.read_text(encoding="utf-8").splitlines()
        lines = waiting.setdefault(path.partition("/src/")[0], [])
        lines += [(path, line) for line in range(1, len(sources[path]) + 1)]
    for lines in waiting.values():
        generator.shuffle(lines)
    mutants = list[Mutant]()
    while len(mutants) < number and any(waiting.values()):
        for lines in waiting.values():
            while lines:
                path, line = lines.pop()
                if path not in places:
                    places[path] = _find_places("\n".join(sources[path]) + "\n")
                if there := places[path].get(line):
                    place, text = generator.choice(there), sources[path][line - 1]
                    same = [one for one in there if one.operator == place.operator]
                    rank = sources[path][: line - 1].count(text)
                    occurrence = same.index(place)
                    mutants.append(Mutant(path, place.operator, text, rank, occurrence, line))
                    break
    return mutants[:number]


def find_line(root: Path, mutant: Mutant) -> int | None:
    """Return the mutant's line in ``root``; None if that line is gone."""
    file = root / mutant.path
    if not file.is_file():
        return None
    lines = file.read_text(encoding="utf-8").splitlines()
    found = [number for number, text in enumerate(lines, 1) if text == mutant.text]
    return found[mutant.rank] if mutant.rank < len(found) else None


def mutate(root: Path, mutant: Mutant) -> str | None:
    """Return the changed source of the mutant's module in ``root``; None if its line is gone."""
    line = find_line(root, mutant)
    if line is None:
        return None
    source = (root / mutant.path).read_text(encoding="utf-8")
    visitor = _Places(mutant.operator)
    visitor.walk(get_ast(source))
    place = [place for place in visitor.places if place.line == line][mutant.occurrence]
    changed = mutate_code(source, get_operator(mutant.operator)(), place.occurrence)
    assert isinstance(changed, str)
    assert changed != source
    return changed
