"""The subcommand ``interposer verify``."""

from __future__ import annotations

import faulthandler
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
        typer.Argument(metavar="DIST", help="The distribution; with --merge, files of reports."),
    ],
    op: Annotated[str, typer.Option(help="Only what is declared for this op.")] = "",
    platform: Annotated[str, typer.Option(metavar="NAME", help="Where to run.")] = "",
    case: Annotated[str, typer.Option(metavar="LABEL", help="Only cases of this label.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Few cases of each op, for every value of every axis.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the cases.")] = 0,
    isolate: Annotated[
        bool,
        typer.Option("--isolate", help="Run in another process, whose crash is a fault like any."),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", metavar="N", help="As --isolate, in so many processes."),
    ] = None,
    host: Annotated[
        str,
        typer.Option(metavar="NAME", help="Try kernels in the layers of this engine."),
    ] = "",
    merge: Annotated[
        bool, typer.Option("--merge", help="Run nothing: put reports of several devices together.")
    ] = False,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Run nothing: look at what is declared, for all devices."),
    ] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as JSON.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it as JUnit XML.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it as a page in HTML.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it as a page in Markdown.")
    ] = None,
) -> None:
    """Check everything that a distribution declares against the definitions of its ops.

    Exits with 1 if anything is wrong, and with 2 if it could not be found out.
    """
    try:
        if merge and (json is not None or junit is not None):
            raise ConfigError("--merge writes a page. Try: --markdown FILE or --html FILE")
        if plan:
            others = {
                "--platform": platform,
                "--case": case,
                "--quick": quick,
                "--isolate": isolate,
                "--jobs": jobs is not None,
                "--host": host,
                "--merge": merge,
                "--junit": junit,
                "--html": html,
                "--markdown": markdown,
            }
            sound = _planned(targets, op, [name for name, given in others.items() if given], json)
            raise typer.Exit(0 if sound else 1)
        if merge:
            reports = [_read(file) for file in targets]
        else:
            reports = [
                _verified(
                    targets,
                    op,
                    platform,
                    case,
                    quick,
                    seed,
                    1 if isolate and jobs is None else jobs,
                    host,
                )
            ]
        _write(reports, json, junit, html, markdown)
    except InterposerError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error  # as 1 says that something is wrong
    if any(report.state == "wrong" for report in reports):
        raise typer.Exit(1)


def _planned(targets: list[str], op: str, others: list[str], json: Path | None) -> bool:
    """Print what can be said without running anything, and return whether it is sound."""
    _check_one(targets)
    if others:
        raise ConfigError(
            f"--plan runs nothing, so that {', '.join(others)} would do nothing. Try: without"
        )
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


def _verified(
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
    from interposer_testing import verify as verified
    from interposer_tools._report_tables import report_tables

    if not faulthandler.is_enabled():
        faulthandler.enable()  # its frames name the trial that was running
    with _progress() as progress:
        report = verified(
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
    from interposer_testing import html as in_html
    from interposer_testing import junit as in_junit
    from interposer_testing import markdown as in_markdown

    if json is not None:
        reports[0].write(json)
    if junit is not None:
        write_text(junit, in_junit(reports[0]))
    if html is not None:
        write_text(html, in_html(reports))
    if markdown is not None:
        write_text(markdown, in_markdown(reports))
    elif len(reports) > 1 and html is None:
        print(in_markdown(reports), end="")


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """Show what is running where there is a terminal."""
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
        task = bar.add_task("", total=None)

        def advance(done: int, name: str) -> None:
            bar.update(task, completed=done, description=escape(name))

        yield advance
