"""Cycles that models of processors give to loops, by ``llvm-mca``."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence

from machine_code.listing import Loop, is_jump

__all__ = ["AnalyserError", "analyser", "cycles_of", "version_of"]

# A short loop needs more rounds before its start and its end no longer count.
_SHORT, _ROUNDS = 100, {True: 100, False: 20}
# What an assembler has to be told to know all instructions, by architecture.
_BEFORE = {"aarch64": ".arch armv8.6-a+sve2\n", "s390x": "", "x86_64": ""}


class AnalyserError(Exception):
    """A loop cannot be analysed, or nothing that could is installed."""


def analyser() -> str:
    """Return the path of ``llvm-mca``. Raises: AnalyserError: there is none."""
    found = shutil.which("llvm-mca-19") or shutil.which("llvm-mca")
    if found is None:
        raise AnalyserError("llvm-mca is not installed. On Debian: apt-get install llvm-19")
    return found


def version_of(program: str) -> str:
    """Return the version of a compiler or of ``llvm-mca``, as ``12.2.0``."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    versions = re.findall(r"\b\d+\.\d+\.\d+\b", done.stdout.replace("deb", " "))
    return versions[-1] if versions else "unknown"


def cycles_of(loops: Sequence[Loop], architecture: str, model: str) -> list[float]:
    """Return the cycles of a round of each loop, where the processor alone is waited for.

    Jumps are left out: no model of LLVM predicts them.

    Raises: AnalyserError: a model does not know an instruction.
    """
    results = [0.0] * len(loops)
    for short, rounds in _ROUNDS.items():
        chosen = [at for at, loop in enumerate(loops) if _is_short(loop) is short]
        if not chosen:
            continue
        for at, region in zip(chosen, _analysed(chosen, loops, architecture, model, rounds),
                              strict=True):  # fmt: skip
            results[at] = region["SummaryView"]["TotalCycles"] / rounds
    return results


def _is_short(loop: Loop) -> bool:
    return len(loop.instructions) < _SHORT


def _analysed(
    chosen: Sequence[int], loops: Sequence[Loop], architecture: str, model: str, rounds: int
) -> list[dict[str, dict[str, int]]]:
    parts = [_BEFORE[architecture]]
    for at in chosen:
        body = [_plain(text) for text in loops[at].instructions if not is_jump(text)]
        parts += [f"# LLVM-MCA-BEGIN {at}", *body, f"# LLVM-MCA-END {at}"]
    source = "\n".join(parts) + "\n"
    command = [analyser(), f"-mtriple={architecture}", f"-mcpu={model}", f"-iterations={rounds}"]
    done = subprocess.run(
        [*command, "--json"], input=source, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise AnalyserError(f"{' '.join(command)} failed:\n{done.stderr[:2000]}")
    regions: list[dict[str, dict[str, int]]] = json.loads(done.stdout)["CodeRegions"]
    return regions


def _plain(text: str) -> str:
    """Return an instruction as an assembler reads it, with addresses marked as hexadecimal."""
    plain = re.sub(r" <[^>]*>.*$", "", text)
    return re.sub(r"^((?:larl|adrp) \S+?, ?)([0-9a-f]+)$", r"\g<1>0x\2", plain)
