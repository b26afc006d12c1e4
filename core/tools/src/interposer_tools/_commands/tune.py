"""The subcommand ``interposer tune``, which measures kernels and attention backends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interposer.errors import ConfigError
from interposer_tools.options import (
    AsJson,
    Dtype,
    Locked,
    PlatformName,
    policy,
    wide_terminal,
)

if TYPE_CHECKING:
    from rich.console import Console

    from interposer import Config
    from interposer.tuning import Entry
    from interposer_tools._tuner.table import Table
    from interposer_tools._tuner.tuner import Progress


def tune(
    model_dir: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="Model directory, or name on the hub; needed unless you only import or export.",
        ),
    ] = None,
    tokens: Annotated[
        str,
        typer.Option(
            metavar="N,N", help="Numbers of tokens per step to measure, separated by commas."
        ),
    ] = "1,16,256",
    repeats: Annotated[
        int, typer.Option(metavar="N", help="Timed runs of each kernel; the median counts.")
    ] = 15,
    dtype: Dtype = "auto",
    platform: PlatformName = None,
    locked: Locked = False,
    import_file: Annotated[
        Path | None,
        typer.Option("--import", metavar="FILE", help="Import the measurements in FILE."),
    ] = None,
    export_file: Annotated[
        Path | None,
        typer.Option(
            "--export",
            metavar="FILE",
            help="Write the new measurements to FILE; without a model, all stored ones.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the kernels and attention backends for a model on this machine; keep the results.

    Later loads select the fastest ones.

    Exits with 1 if every candidate for a part of the model failed.
    """
    if model_dir is None and import_file is None and export_file is None:
        raise ConfigError(
            "There is nothing to do. Try: interposer tune MODEL, or --import or --export FILE"
        )
    counts = _numbers(tokens)
    # Check the export first: the measurement can take minutes.
    if export_file is not None and not export_file.absolute().parent.is_dir():
        raise ConfigError(f"--export {export_file}: its folder does not exist. Try: make it first")
    from interposer.tooling import default_store
    from interposer_tools._tuner.table import Table

    config = policy(platform=platform, locked=locked)
    store = default_store()
    facts: dict[str, Any] = {}
    lines = []
    # Before a measurement, whose newer results then replace the imported ones.
    if import_file is not None:
        imported = Table.read(import_file)
        replaced = imported.install(store)
        facts["imported"], facts["replaced"] = len(imported.entries), len(replaced)
        lines.append(f"{_entries(imported)} imported, {len(replaced)} of them replaced older ones")
    table = Table.stored(store) if model_dir is None else None
    if model_dir is not None:
        table = _measure(model_dir, counts, repeats, dtype, config)
        facts |= table.model_dump(mode="json")
        facts["scattered"] = [str(entry.key) for entry in table.entries if _is_scattered(entry)]
    assert table is not None
    if export_file is not None:
        table.write(export_file)
        facts["exported"] = len(table.entries)
        lines.append(f"{_entries(table)} written to {export_file}")
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        if model_dir is not None:
            _print(table)
        print("\n".join(lines), end="\n" if lines else "")
    if model_dir is not None:
        _warn_of_scattered(table)
    failed = [entry for entry in table.entries if not entry.value.candidates]
    # A failed candidate is only reported; a request without any result is an error.
    if model_dir is not None and failed:
        requests = ", ".join(str(entry.key) for entry in failed)
        print(f"error: every candidate failed for {requests}", file=sys.stderr)
        raise typer.Exit(1)


def _measure(model_dir: Path, tokens: list[int], repeats: int, dtype: str, config: Config) -> Table:
    # Imported here, because the tuner imports torch, which `--import` and `--help` do not need.
    from interposer_tools._tuner.tuner import tune as measure

    with _progress() as progress:
        return measure(
            model_dir,
            tokens=tokens,
            repeats=repeats,
            dtype=dtype,
            config=config,
            progress=progress,
        )


@contextmanager
def _progress() -> Iterator[Progress]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)  # the first call of ``advance`` sets the total

        def advance(num_done: int, total: int, subject: str) -> None:
            bar.update(task, completed=num_done, total=total, description=escape(subject))

        yield advance


def _print(table: Table) -> None:
    console = wide_terminal()
    if console is not None:
        _print_table(table, console)
        return
    for entry in table.entries:
        print(entry.key)
        for name, figures in _ranked(entry):
            print(f"  {name}: {figures}")
    for line in _skipped_lines(table):
        print(line)


def _print_table(table: Table, console: Console) -> None:
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid("request", "candidate", "median (quartiles)")
    for entry in table.entries:
        for rank, (name, figures) in enumerate(_ranked(entry)):
            # As Text, because a request's brackets would be read as markup.
            style = "" if rank else "bold"
            grid.add_row(Text("" if rank else str(entry.key)), Text(name, style), Text(figures))
        grid.add_section()
    console.print(grid)
    for line in _skipped_lines(table):
        console.print(Text(line, "dim"))


def _ranked(entry: Entry) -> list[tuple[str, str]]:
    """Return (candidate, timing or reason of the failure), the fastest candidate first."""
    ordered = sorted(entry.value.candidates.items(), key=lambda item: (item[1].seconds, item[0]))
    timed = [(name, str(figures)) for name, figures in ordered]
    failed = [(name, f"failed: {reason}") for name, (_, reason) in entry.value.failed.items()]
    return [*timed, *failed]


def _skipped_lines(table: Table) -> list[str]:
    """Return one line per reason why requests were not measured, or were timed in this process."""
    lines: dict[str, dict[str, None]] = {}
    for head, notes in (
        ("timed in this process", table.in_process),
        ("not measured", table.not_measured),
    ):
        for note in notes:
            lines.setdefault(f"{head}, {note.reason}", {})[note.request] = None
    return [f"{line}: {', '.join(requests)}" for line, requests in lines.items()]


def _warn_of_scattered(table: Table) -> None:
    """Print a warning if noise may hide which candidate of a request is the fastest."""
    scattered = [entry for entry in table.entries if _is_scattered(entry)]
    if not scattered:
        return
    first = scattered[0]
    sys.stdout.flush()  # so that the warning follows the table, also in a file with both
    print(
        f"warning: the times of {len(scattered)} of {_entries(table)} are scattered, so noise may "
        "decide which kernel is selected. Median and quartiles of the fastest candidate, such as "
        f"{first.fastest} of {first.key}: {first.value.candidates[first.fastest]}.\n"
        "Try: tune again while the machine does nothing else",
        file=sys.stderr,
    )


def _is_scattered(entry: Entry) -> bool:
    return bool(entry.fastest) and entry.value.candidates[entry.fastest].is_scattered


def _entries(table: Table) -> str:
    count = len(table.entries)
    return f"{count} measurement{'s' if count != 1 else ''}"


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--tokens {text!r} must be numbers separated by commas, such as 1,16,256"
        ) from None
    for index, number in enumerate(numbers):
        if number < 1:
            raise ConfigError(f"--tokens {text!r}: {number} is too small. Try: 1 or more")
        if number in numbers[:index]:
            raise ConfigError(f"--tokens {text!r}: {number} occurs twice. Try: remove one")
    return numbers
