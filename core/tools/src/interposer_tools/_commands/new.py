"""The subcommand ``interposer new``, which writes a plugin from a template."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from interposer_tools._plugin_template import License, NewPlugin, PluginKind


class _Template(StrEnum):
    PLUGIN = "plugin"


def new(
    what: Annotated[_Template, typer.Argument(metavar="plugin", help="The word plugin.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new distribution.")],
    kind: Annotated[PluginKind, typer.Option(help="Kind of the plugin.")],
    into: Annotated[
        Path, typer.Option(metavar="DIR", help="Parent folder of the new package.")
    ] = Path(),
    license_: Annotated[
        License, typer.Option("--license", help="License of the package.")
    ] = License.APACHE,
    author: Annotated[str, typer.Option(metavar="NAME", help="Author and copyright holder.")] = "",
    native: Annotated[
        bool, typer.Option("--native", help="Write the kernel in C, with --kind kernel.")
    ] = False,
) -> None:
    """Write a new plugin that works, with tests, CI and a README with the next steps."""
    target = NewPlugin(name, kind, license_, author, native).write(into)
    count = sum(path.is_file() for path in target.rglob("*"))
    title = f"native {kind}" if native else kind
    article = "an" if title.startswith("a") else "a"
    print(f"{target}: {article} {title} plugin, {count} files")
    print(f"Try: cd {shlex.quote(str(target))} && python -m pip install -e '.[dev]'")
