"""Cycles of the inner loops of native kernels, on processors that need not be there.

    python benchmarks/kernel_cycles.py [--write] [--architectures aarch64 s390x x86_64]
    python benchmarks/kernel_cycles.py --loops FAMILY --architectures aarch64 [--flags FLAGS]

Kernels are compiled for every level, and ``llvm-mca`` asks its models of processors how long a
round of each inner loop takes where the processor alone is waited for: caches always hold what is
loaded, jumps are always foreseen. Figures are compared with the tables in ``results``; ``--write``
renews these. ``--loops`` shows each loop of a family.

On Debian: cmake g++-aarch64-linux-gnu g++-s390x-linux-gnu g++-x86-64-linux-gnu llvm-19.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from machine_code.figures import figures_of
from machine_code.listing import loops_of
from machine_code.models import AnalyserError, analyser, cycles_of, version_of
from machine_code.objects import MODELS, ToolError, compiler_of, listing_of, objects_of
from machine_code.table import Comparison, Table, TableError, compare, read, write
from machine_code.work import multiply_adds

__all__ = ["checked", "current", "path_of"]

RESULTS = Path(__file__).parent / "results"
BUILDS = Path(__file__).parents[1] / ".kernel_cycles_cache"


def path_of(architecture: str) -> Path:
    """Return the file of an architecture's table."""
    return RESULTS / f"kernel_cycles_{architecture}.txt"


def current(architecture: str, build: Path, flags: str = "", family: str = "") -> Table:
    """Return the figures of the sources as they are, of a family or of all.

    Raises: AnalyserError, ToolError: a program is missing or fails.
    """
    objects = list(objects_of(architecture, build, flags, family))
    figures = tuple(figures_of(architecture, objects))
    return Table(version_of(compiler_of(architecture)), version_of(analyser()), figures)


def checked(architecture: str, build: Path) -> Comparison:
    """Compare the sources as they are with the table.

    Raises: AnalyserError, ToolError: a program is missing or fails. TableError: the table is of
        other versions of the programs.
    """
    old = read(path_of(architecture))
    own = version_of(compiler_of(architecture)), version_of(analyser())
    if own != (old.compiler, old.analyser):
        raise TableError(
            f"the table of {architecture} is of g++ {old.compiler} and llvm-mca {old.analyser}, "
            f"here are {own[0]} and {own[1]}, which compare with nothing. Try: those versions, or "
            f"python benchmarks/kernel_cycles.py --write --architectures {architecture}"
        )
    return compare(old.figures, current(architecture, build).figures)


def every_loop(architecture: str, build: Path, family: str, flags: str) -> Iterator[str]:
    """Yield a line for each loop of a family that multiplies and adds."""
    for level, _, file in list(objects_of(architecture, build, flags, family)):
        loops = [loop for loop in loops_of(listing_of(architecture, file)) if multiply_adds(loop)]
        models = MODELS[architecture][level]
        cycles = [cycles_of(loops, architecture, model) for model in models]
        for loop, *of_models in zip(loops, *cycles, strict=True):
            texts = (f"{m} {c:.1f}" for m, c in zip(models, of_models, strict=True))
            size = f"{len(loop.instructions)} instructions, {multiply_adds(loop)} multiply-adds"
            yield f"{level} {loop.function}: {size}; cycles: {', '.join(texts)}"


def main() -> None:
    """Compare, or write, or show loops."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--architectures", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--build", type=Path, default=BUILDS, help="where objects are kept")
    parser.add_argument("--flags", default="", help="for the compiler, behind those of a level")
    parser.add_argument("--loops", metavar="FAMILY", help="show the loops of a family instead")
    parser.add_argument("--write", action="store_true", help="renew the tables")
    given = parser.parse_args()
    failed = False
    for architecture in given.architectures:
        build = given.build / architecture
        try:
            if given.loops:
                print(*every_loop(architecture, build, given.loops, given.flags), sep="\n")
            elif given.write:
                table = current(architecture, build)
                write(table, path_of(architecture))
                print(f"{path_of(architecture)}: {len(table.figures)} figures")
            else:
                found = checked(architecture, build)
                print(architecture, *(found.faults or ["nothing is worse"]), sep="\n  ")
                print(*(f"  better: {line}" for line in found.better), sep="\n")
                failed |= bool(found.faults)
        except (AnalyserError, TableError, ToolError) as error:
            sys.exit(str(error))
    sys.exit(failed)


if __name__ == "__main__":
    main()
