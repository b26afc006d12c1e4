"""Tasks of SOL-ExecBench: a folder with ``definition.json`` and ``workload.jsonl``."""

from __future__ import annotations

from pathlib import Path

from interposer_testing._judge.task import Task
from interposer_testing._tasks.flashinfer_trace import read_definition

DEFINITION = "definition.json"


def read_sol_execbench(folder: Path) -> Task:
    """Read the definition and the workloads in a folder.

    Raises: ConfigError: a file is missing or invalid.
    """
    workloads = folder / "workload.jsonl"
    return read_definition(folder / DEFINITION, workloads, folder, "sol-execbench")
