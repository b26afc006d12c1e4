"""The options of the subcommands, and their printing."""

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
    "Speculate",
    "TensorParallel",
    "policy",
    "print_facts",
    "wide_terminal",
]

_LEAST_COLUMNS = 120

Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")]
Quantization = Annotated[
    str | None,
    typer.Option(metavar="METHOD", help="Quantize plain weights by it while they load."),
]
Speculate = Annotated[
    str | None,
    typer.Option(
        metavar="ngram|MODEL", help="What guesses tokens: prompt lookup, or a smaller model."
    ),
]
TensorParallel = Annotated[
    int, typer.Option(metavar="N", min=1, help="Processes that compute the model together.")
]
ExpertParallel = Annotated[
    bool, typer.Option("--expert-parallel", help="Each process holds some experts, whole.")
]
PlatformName = Annotated[
    str | None,
    typer.Option(
        "--platform",
        metavar="NAME",
        help="Where to run; +NAME prefers a platform, -NAME forbids one. Commas add rules up.",
    ),
]
Kernels = Annotated[
    list[str] | None,
    typer.Option(
        "--kernel",
        metavar="OP=NAME",
        help="Pin a kernel; OP=+NAME prefers it, OP=-NAME forbids it. May be repeated.",
    ),
]
Locked = Annotated[
    bool, typer.Option("--locked", help="Refuse plugins that interposer.lock does not list.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Printable(Protocol):
    """Facts that print as text and as JSON."""

    def to_json(self) -> str:
        """Return the facts as JSON."""
        ...


def policy(
    kernels: Iterable[str] | None = None, platform: str | None = None, locked: bool = False
) -> Config:
    """Return what options say; what they leave out stays with the other sources.

    Raises: ConfigError: a kernel is not of the form OP=NAME, or a platform has no name.
    """
    from interposer import Config
    from interposer.tooling import parse_rules

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
    """Print JSON, or tables on a terminal that is wide enough for them, or else plain text.

    Args:
        tables: returns what rich prints; None where the facts are too many for the cells of tables.
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
    """Return what prints tables, or None where standard output is no place for any."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    console = Console()
    return console if console.width >= _LEAST_COLUMNS else None
