"""The subcommand ``interposer vllm-report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="Report of a vLLM worker, which logs the path.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which layers of a vLLM worker run on kernels of interposer, and why others do not."""
    from interposer_vllm._report import Report

    worker_report = Report.read(path)
    print(worker_report.to_json() if as_json else worker_report)
