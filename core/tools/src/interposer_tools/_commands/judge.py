"""The subcommand ``interposer judge``, which tests and times an untrusted kernel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interposer.errors import InterposerError
from interposer_tools.options import AsJson

if TYPE_CHECKING:
    from collections.abc import Callable


def judge(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="Name of an op, or file of a definition (FlashInfer-Trace, SOL-ExecBench) or of a "
            "problem (KernelBench).",
        ),
    ],
    solution: Annotated[
        str,
        typer.Argument(
            metavar="SOLUTION",
            help="FILE.py or FILE.py:FUNCTION, a C++ file, a wheel, a folder of hub kernels, or a "
            "solution of FlashInfer-Trace.",
        ),
    ],
    device: Annotated[
        str,
        typer.Option(metavar="cpu|cuda", help="Device of the kernel; cuda has never run on a GPU."),
    ] = "cpu",
    quick: Annotated[
        bool, typer.Option("--quick", help="Judge in a few seconds, with fewer cases and calls.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Repeat a verdict with its seed. By default, the seed is secret until the end.",
        ),
    ] = None,
    backward: Annotated[
        bool,
        typer.Option(
            "--backward",
            help="Judge the gradients too, if the op declares them. Takes several times as long.",
        ),
    ] = False,
    warm_caches: Annotated[
        bool,
        typer.Option(
            "--warm-caches", help="Time calls whose arguments lie in the caches, not in memory."
        ),
    ] = False,
    as_json: AsJson = False,
    file: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the verdict as JSON.")
    ] = None,
) -> None:
    """Judge a kernel that you do not trust: test its results, and measure its speed.

    The kernel runs in a process of its own. Exits with 0 if the kernel is accepted, with 1 if it is
    refused or its time is impossible, and with 2 if it could not be judged.
    """
    try:
        # Imported here, because these modules import torch, which `--help` need not wait for.
        from interposer.tooling import write_text
        from interposer_testing import judge as run_judge
        from interposer_testing import read_solution, read_task

        the_task = read_task(task)
        the_solution = read_solution(solution, the_task, device)
        with _progress() as progress:
            verdict = run_judge(
                the_task,
                the_solution,
                device=device,
                seed=seed,
                quick=quick,
                backward=backward,
                caches="warm" if warm_caches else "cold",
                progress=progress,
            )
        print(verdict.to_json() if as_json else verdict)
        if file is not None:
            write_text(file, verdict.to_json() + "\n")
    except InterposerError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    if verdict.state != "accepted":
        raise typer.Exit(1)


@contextmanager
def _progress() -> Iterator[Callable[[str], None] | None]:
    from rich.console import Console

    console = Console(stderr=True)
    # Without a terminal, each state would become a line of the log.
    if not console.is_terminal:
        yield None
        return
    with console.status("") as status:
        yield status.update
