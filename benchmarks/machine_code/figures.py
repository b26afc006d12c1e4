"""Figures of kernels: cycles and instructions for the work of their main inner loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from machine_code.listing import Loop, loops_of
from machine_code.models import cycles_of
from machine_code.objects import MODELS, listing_of
from machine_code.work import multiply_adds, vector_bytes

__all__ = ["UNIT", "Figure", "figures_of", "main_loops"]

UNIT = 64
"""Multiply-adds or bytes that figures are for."""

# Families that move numbers more than they multiply them.
_OF_BYTES = {"elementwise", "sampling", "rounding"}


@dataclass(frozen=True)
class Figure:
    """Instructions and cycles of the main loops of a function, for work of ``UNIT``."""

    level: str
    family: str
    function: str
    loops: int
    instructions: float
    cycles: dict[str, float]

    @property
    def name(self) -> tuple[str, str, str]:
        """Return level, family and function, which identify this kernel in the architecture."""
        return self.level, self.family, self.function


def main_loops(loops: Iterable[Loop], work: Callable[[Loop], int]) -> list[Loop]:
    """Return the loops that a long row spends its time in.

    They do at least half as much a round as the one that does most, and with at most three times as
    many instructions for the same work as the densest of those. What is left out are ends of rows,
    where numbers are taken one by one.
    """
    known = [(work(loop), loop) for loop in loops]
    most = max((count for count, _ in known), default=0)
    wide = [(count, loop) for count, loop in known if count and 2 * count >= most]
    dense = max((count / len(loop.instructions) for count, loop in wide), default=0.0)
    return [loop for count, loop in wide if 3 * count / len(loop.instructions) >= dense]


def figures_of(architecture: str, objects: Iterable[tuple[str, str, Path]]) -> Iterator[Figure]:
    """Yield a figure for each function with an inner loop that works on vectors.

    Raises: AnalyserError: there is no analyser, or it does not know an instruction.
    """
    for level, family, file in objects:
        work = vector_bytes if family in _OF_BYTES else multiply_adds
        functions = dict[str, list[Loop]]()
        for loop in loops_of(listing_of(architecture, file)):
            functions.setdefault(loop.function, []).append(loop)
        chosen = {name: main_loops(loops, work) for name, loops in functions.items()}
        every = [loop for loops in chosen.values() for loop in loops]
        by_model = {}
        for model in MODELS[architecture][level]:
            cycles = cycles_of(every, architecture, model)
            by_model[model] = dict(zip(map(id, every), cycles, strict=True))
        for name, loops in sorted(chosen.items()):
            if loops:
                share = UNIT / sum(work(loop) for loop in loops)
                instructions = share * sum(len(loop.instructions) for loop in loops)
                cycles_by_model = {
                    model: share * sum(found[id(loop)] for loop in loops)
                    for model, found in by_model.items()
                }
                yield Figure(level, family, name, len(loops), instructions, cycles_by_model)
