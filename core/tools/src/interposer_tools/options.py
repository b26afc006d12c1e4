"""Options that several subcommands share, and the printing of results as text, tables or JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from interposer import Config

__all__ = [
    "AsJson",
    "Dtype",
    "ExpertParallel",
    "Kernels",
    "Locked",
    "PlatformName",
    "Printable",
    "Quantization",
    "TensorParallel",
    "policy",
    "print_facts",
    "wide_terminal",
]

_MIN_TABLE_COLUMNS = 120

Dtype = Annotated[
    str, typer.Option(help="Dtype of activations: float32, bfloat16, float16 or auto.")
]
Quantization = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD", help="Quantize plain weights while loading, with a method such as int8."
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="Split the model over N processes (tensor parallelism)."),
]
ExpertParallel = Annotated[
    bool,
    typer.Option(
        "--expert-parallel", help="Give each process complete experts (expert parallelism)."
    ),
]
PlatformName = Annotated[
    str | None,
    typer.Option(
        "--platform",
        metavar="NAME",
        help="Platform to run on; +NAME prefers it, -NAME forbids it. Separate rules by commas.",
    ),
]
Kernels = Annotated[
    list[str] | None,
    typer.Option(
        "--kernel",
        metavar="OP=NAME",
        help="Use this kernel for OP; OP=+NAME prefers it, OP=-NAME forbids it. Repeatable.",
    ),
]
Locked = Annotated[
    bool, typer.Option("--locked", help="Refuse plugins that are not in interposer.lock.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Printable(Protocol):
    """A report that prints as text and as JSON."""

    def to_json(self) -> str:
        """Return the report as JSON text."""
        ...


def policy(
    kernels: Iterable[str] | None = None, platform: str | None = None, locked: bool = False
) -> Config:
    """Create the configuration from command-line options; omitted options set no field.

    Raises: ConfigError: a kernel is not of the form OP=NAME, or a platform has no name.
    """
    from interposer import Config
    from interposer.tooling import parse_rules

    # Only fields that are set override files and environment variables.
    fields: dict[str, Any] = {}
    if kernels:
        fields["kernels"] = parse_rules([*kernels], "--kernel")
    if platform is not None:
        rules = [f"platform={item}" for item in platform.split(",")]
        fields["platform"] = parse_rules(rules, "--platform")["platform"]
    if locked:
        fields["locked"] = True
    return Config(**fields)


F = TypeVar("F", bound=Printable)


def print_facts(
    facts: F, as_json: bool, tables: Callable[[F], Iterable[Any]] | None = None
) -> None:
    """Print ``facts`` as JSON, as tables if the terminal is wide enough, or as plain text.

    Args:
        tables: converts ``facts`` to objects for rich; None if tables would not fit the content.
    """
    if as_json:
        print(facts.to_json())
        return
    console = None if tables is None else wide_terminal()
    if console is None or tables is None:
        print(facts)
    else:
        console.print(*tables(facts))


def wide_terminal() -> Console | None:
    """Return a console for tables, or None if standard output is no terminal or too narrow."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    console = Console()
    return console if console.width >= _MIN_TABLE_COLUMNS else None
