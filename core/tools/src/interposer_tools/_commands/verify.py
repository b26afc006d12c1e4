"""The subcommand ``interposer verify``, which tests the records of a plugin distribution."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interposer.errors import ConfigError, InterposerError
from interposer_tools.options import wide_terminal

if TYPE_CHECKING:
    from interposer_testing import Progress, Report


def verify(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="DIST", help="Distribution to verify; with --merge, JSON report files."
        ),
    ],
    op: Annotated[str, typer.Option(metavar="OP", help="Test only the kernels of OP.")] = "",
    platform: Annotated[str, typer.Option(metavar="NAME", help="Platform to run on.")] = "",
    case: Annotated[
        str, typer.Option(metavar="LABEL", help="Run only the test case with this label.")
    ] = "",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Run fewer test cases per op; each tested size, layout and special value "
            "still occurs.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed of the test cases.")] = 0,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", metavar="N", help="Run in N child processes at a time."),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Test kernels inside the layers of this engine, such as vllm."
        ),
    ] = "",
    merge: Annotated[
        bool, typer.Option("--merge", help="Run nothing; combine the reports of several devices.")
    ] = False,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Run no kernel; check the records on all described devices."),
    ] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as JSON.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as JUnit XML.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as HTML.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as Markdown.")
    ] = None,
) -> None:
    """Test what a plugin distribution provides: its kernels against the references of the ops.

    Exits with 1 if anything is wrong, and with 2 if the verification could not run.
    """
    try:
        if merge and (json is not None or junit is not None):
            raise ConfigError("--merge writes a page. Try: --markdown FILE or --html FILE")
        if plan:
            # ``--op``, ``--seed`` and ``--json`` are the only options that work with --plan.
            is_set = {
                "--platform": platform,
                "--case": case,
                "--quick": quick,
                "--jobs": jobs is not None,
                "--host": host,
                "--merge": merge,
                "--junit": junit,
                "--html": html,
                "--markdown": markdown,
            }
            useless_options = [name for name, value in is_set.items() if value]
            is_sound = _plan(targets, op, useless_options, json)
            raise typer.Exit(0 if is_sound else 1)
        # Merged reports are only read, so no kernel runs.
        if merge:
            reports = [_read(file) for file in targets]
        else:
            reports = [
                _verify(
                    targets,
                    op,
                    platform,
                    case,
                    quick,
                    seed,
                    jobs,
                    host,
                )
            ]
        _write(reports, json, junit, html, markdown)
    except InterposerError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error  # exit code 1 means that a record is wrong
    if any(report.state == "wrong" for report in reports):
        raise typer.Exit(1)


def _plan(targets: list[str], op: str, useless_options: list[str], json: Path | None) -> bool:
    """Print the result of the checks that run no kernel, and return whether all passed."""
    _check_one(targets)
    if useless_options:
        options = ", ".join(useless_options)
        raise ConfigError(f"--plan runs nothing, so {options} has no effect. Try: remove it")
    from interposer import current_registry
    from interposer.tooling import write_text
    from interposer_testing import plan

    report = plan(targets[0], current_registry(), op)
    print(report)
    if json is not None:
        write_text(json, report.to_json())
    return report.sound


def _check_one(targets: list[str]) -> None:
    if len(targets) > 1:
        raise ConfigError(
            f"verify takes one distribution, got {', '.join(targets)}. Try: one after the other, "
            "and --merge with their --json files"
        )


def _read(file: str) -> Report:
    from interposer_testing import Report

    return Report.read(Path(file))


def _verify(
    targets: list[str],
    op: str,
    platform: str,
    case: str,
    quick: bool,
    seed: int,
    jobs: int | None,
    host: str,
) -> Report:
    _check_one(targets)
    from interposer_testing import Isolation, side_by_side
    from interposer_testing import verify as run_verification
    from interposer_tools._report_tables import report_tables

    with _progress() as progress:
        report = run_verification(
            targets[0],
            op=op,
            case=case,
            platform=platform,
            seed=seed,
            quick=quick,
            progress=progress,
            host=host,
            run=side_by_side(platform) if jobs is None else Isolation(platform, jobs),
        )
    console = wide_terminal()
    if console is None:
        print(report)
    else:
        console.print(*report_tables(report))
    return report


def _write(
    reports: list[Report],
    json: Path | None,
    junit: Path | None,
    html: Path | None,
    markdown: Path | None,
) -> None:
    from interposer.tooling import write_text
    from interposer_testing import html as to_html
    from interposer_testing import junit as to_junit
    from interposer_testing import markdown as to_markdown

    if json is not None:
        reports[0].write(json)
    if junit is not None:
        write_text(junit, to_junit(reports[0]))
    if html is not None:
        write_text(html, to_html(reports))
    if markdown is not None:
        write_text(markdown, to_markdown(reports))
    # A merged report that goes to no file would otherwise be lost.
    elif len(reports) > 1 and html is None:
        print(to_markdown(reports), end="")


@contextmanager
def _progress() -> Iterator[Progress | None]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.completed} trials"), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.description}"), console=console, transient=True
    ) as bar:
        task = bar.add_task("", total=None)  # trials are generated, so their number is unknown

        def advance(num_trials: int, name: str) -> None:
            bar.update(task, completed=num_trials, description=escape(name))

        yield advance
