"""Count instructions of the inner loops of attention on ARM, and cycles that LLVM gives them.

    python benchmarks/arm_loops.py [--cores neoverse-n2,neoverse-v1] [--source FOLDER]

Needs no such processor: ``native/attention/level.cpp`` is compiled by a cross compiler, and
``llvm-mca`` asks its model of a core how long each innermost loop with products takes, where the
core alone is waited for. Loops follow each other as they lie in the object file; that of a function
which was compiled into another one has the other one's name.

On Debian: g++-aarch64-linux-gnu llvm-19. Models of Neoverse V1 and V2 are in LLVM 17 and later.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Loop", "cycles_of", "loops_of"]

NATIVE = Path(__file__).parents[1] / "platforms" / "cpu" / "native"
TOOLS = "aarch64-linux-gnu-"
FLAGS = [
    *("-std=gnu++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
    *("-march=armv8.2-a+dotprod+bf16+i8mm", "-DINTERPOSER_LEVEL=bf16_i8mm"),
]
PRODUCTS = {"bfdot", "bfmmla", "sdot", "smmla"}
ITERATIONS = 200
_JUMP = re.compile(r"(?:b|b\.\w+|cbn?z\s+\w+,|tbn?z\s+.*,)\s+([0-9a-f]+)\b")


@dataclass(frozen=True)
class Loop:
    """An innermost loop of a function, as the text of its instructions."""

    function: str
    instructions: tuple[str, ...]

    @property
    def products(self) -> Counter[str]:
        """Return how many products there are of each kind."""
        names = (text.split()[0] for text in self.instructions)
        return Counter(name for name in names if name in PRODUCTS)


def loops_of(listing: str) -> Iterator[Loop]:
    """Yield the innermost loops with products of what ``objdump -d --no-show-raw-insn`` printed."""
    for part in re.split(r"\n\s*\n", listing):
        head = re.match(r"\s*[0-9a-f]+ <(.*)>:", part)
        if head is None:
            continue
        found = re.findall(r"^\s*([0-9a-f]+):\s+(.*?)\s*(?://.*)?$", part, re.MULTILINE)
        index = {int(address, 16): at for at, (address, _) in enumerate(found)}
        texts = tuple(text for _, text in found)
        spans = []
        for end, text in enumerate(texts):
            jump = _JUMP.match(text)
            begin = index.get(int(jump.group(1), 16)) if jump else None
            if begin is not None and begin <= end:
                spans.append((begin, end))
        function = head.group(1).replace("(anonymous namespace)::", "").partition("(")[0]
        for begin, end in spans:
            holds_another = any(
                begin <= b and e <= end and (b, e) != (begin, end) for b, e in spans
            )
            loop = Loop(function, texts[begin : end + 1])
            if not holds_another and loop.products:
                yield loop


def cycles_of(loop: Loop, core: str, analyser: str) -> float:
    """Return the cycles of one round, the jump aside, which no model of LLVM predicts."""
    body = [text for text in loop.instructions if not _JUMP.match(text)]
    command = [analyser, "-mtriple=aarch64", f"-mcpu={core}", f"-iterations={ITERATIONS}"]
    source = ".arch armv8.6-a\n" + "\n".join(body) + "\n"
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    found = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert found is not None, done.stdout
    return int(found.group(1)) / ITERATIONS


def listing_of(source: Path) -> str:
    """Return the code of attention, compiled from the native ``source``, as text."""
    with tempfile.TemporaryDirectory() as folder:
        binary = f"{folder}/level.o"
        compiled = source / "attention" / "level.cpp"
        subprocess.run([f"{TOOLS}g++", *FLAGS, "-c", compiled, "-o", binary], check=True)
        command = [f"{TOOLS}objdump", "-d", "-C", "--no-show-raw-insn", binary]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print a line for each loop."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cores", default="neoverse-n2,neoverse-v1,neoverse-v2")
    parser.add_argument("--source", type=Path, default=NATIVE, help="another native folder")
    given = parser.parse_args()
    analyser = shutil.which("llvm-mca-19") or shutil.which("llvm-mca")
    if analyser is None:
        parser.error("llvm-mca is not installed. On Debian: apt-get install llvm-19")
    cores = given.cores.split(",")
    for loop in loops_of(listing_of(given.source)):
        cycles = (f"{core} {cycles_of(loop, core, analyser):.1f}" for core in cores)
        products = ", ".join(f"{count} {name}" for name, count in loop.products.items())
        size = len(loop.instructions)
        print(f"{loop.function}: {size} instructions, {products}; cycles:", *cycles)


if __name__ == "__main__":
    main()
