"""The subcommand ``interposer doctor``, which checks the installation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interposer_tools.options import AsJson, Locked, PlatformName, policy, print_facts

if TYPE_CHECKING:
    from interposer import Config


def doctor(
    describe: Annotated[
        str | None,
        typer.Option(
            "--describe",
            metavar="FILE",
            help="Write a description of this machine's device to FILE (- prints it) and stop. "
            "`explain --on FILE` reads it.",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Examine all plugins again instead of using stored verdicts."),
    ] = False,
    platform: PlatformName = None,
    locked: Locked = False,
    as_json: AsJson = False,
) -> None:
    """List installed platforms and plugins, and report failures with the way to fix each one.

    Exits with 1 if anything failed.
    """
    config = policy(platform=platform, locked=locked)
    # A description needs no examination, which would start a process for each plugin.
    if describe is not None:
        _describe(describe, config)
        return
    from interposer_tools._doctor.doctor import doctor as examine
    from interposer_tools._doctor.tables import health_tables

    health = examine(config, fresh=fresh)
    print_facts(health, as_json, health_tables)
    if not health.healthy:
        raise typer.Exit(1)


def _describe(file: str, config: Config) -> None:
    from interposer import place
    from interposer.tooling import write_text
    from interposer_testing.described import DeviceDescription

    description = DeviceDescription.of(place(config))
    if file == "-":
        print(description.to_json(), end="")
    else:
        write_text(Path(file), description.to_json())
        print(f"{file}: {description.name}")
