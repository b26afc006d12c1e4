"""The subcommand ``interposer new``."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from interposer_tools._plugin_template import License, NewPlugin, PluginKind


class _What(StrEnum):
    PLUGIN = "plugin"


def new(
    what: Annotated[_What, typer.Argument(metavar="plugin", help="What to write.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of its distribution.")],
    kind: Annotated[PluginKind, typer.Option(help="What it provides.")],
    into: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder in which its folder is made.")
    ] = Path(),
    license_: Annotated[License, typer.Option("--license", help="Its license.")] = License.APACHE,
    author: Annotated[str, typer.Option(metavar="NAME", help="Who holds the copyright.")] = "",
    native: Annotated[
        bool, typer.Option("--native", help="Compile its kernels, with --kind kernel.")
    ] = False,
) -> None:
    """Write a package that works: a plugin with tests, CI and a README with the next steps."""
    target = NewPlugin(name, kind, license_, author, native).write(into)
    count = sum(path.is_file() for path in target.rglob("*"))
    written = f"native {kind}" if native else kind
    article = "an" if written.startswith("a") else "a"
    print(f"{target}: {article} {written} plugin, {count} files")
    print(f"Try: cd {shlex.quote(str(target))} && python -m pip install -e . --group dev")
