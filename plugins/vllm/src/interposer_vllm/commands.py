"""The subcommand ``interposer vllm-report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    path: Annotated[Path, typer.Argument(help="The file that a worker's log line names.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a worker of vLLM runs on kernels that were chosen here, and why the rest is not."""
    from interposer_vllm._report import Report

    found = Report.read(path)
    print(found.to_json() if as_json else found)
