"""Read and write ``results/cpu.json``: measured rates of engines on CPUs, one run per entry.

A run is one model shape, one width of weights and one number of threads on one machine. ``rows``
maps each workload, such as "decode, context 128", to the cells of all engines and to ``roofline``,
the tokens per second that the machine's memory bandwidth and GEMM rate allow. A cell has

    rates         tokens per second: median, lowest and highest over the rounds
    of_roofline   the median divided by the roofline
    ratio, peer   median ratio within a round to ``peer``, the fastest other engine

The newest run of a machine is first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["FILE", "Run", "add_runs", "read_runs", "runs_of"]

FILE = Path(__file__).parent / "results" / "cpu.json"

Run = Mapping[str, Any]


def read_runs(file: Path = FILE) -> list[Run]:
    """Return all runs, the newest of each machine first."""
    if not file.is_file():
        return []
    runs: list[Run] = json.loads(file.read_text(encoding="utf-8"))["runs"]
    return runs


def runs_of(
    runs: Sequence[Run], machine: str, shape: str, bits: int, threads: int = 2
) -> Iterator[Run]:
    """Yield the runs of a model shape and a width of weights on a machine."""
    key = (machine, shape, bits, threads)
    for run in runs:
        if (run["machine"], run["shape"], run["bits"], run["threads"]) == key:
            yield run


def add_runs(runs: Sequence[Run], file: Path = FILE) -> None:
    """Write runs before the runs that the file already has."""
    entries = [_entry(run) for run in (*runs, *read_runs(file))]
    text = '{"version": 1, "runs": [\n' + ",\n".join(entries) + "\n]}\n"
    file.write_text(text, encoding="utf-8")


def _entry(run: Run) -> str:
    """Format a run as JSON, with one line per engine and per cell."""
    lines = []
    for name, value in run.items():
        if isinstance(value, Mapping):
            parts = ",\n".join(f"  {json.dumps(key)}: {_nested(v)}" for key, v in value.items())
            lines.append(f" {json.dumps(name)}: {{\n{parts}\n }}")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _nested(value: Any) -> str:
    if not isinstance(value, Mapping) or not any(isinstance(v, Mapping) for v in value.values()):
        return json.dumps(value)
    parts = ",\n".join(f"   {json.dumps(key)}: {json.dumps(v)}" for key, v in value.items())
    return f"{{\n{parts}\n  }}"
