"""The subcommand ``interposer seams``, which compares a plugin with versions of its host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interposer_tools.options import AsJson

if TYPE_CHECKING:
    from interposer_tools._seams.source_tree import SourceTree


def seams(
    host: Annotated[
        str,
        typer.Argument(
            metavar="HOST", help="Package of the host, such as vllm, sglang or transformers."
        ),
    ],
    versions: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VERSION...",
            help="Versions of the host: wheels, sdists or folders. Without any, the installed one.",
        ),
    ] = None,
    plugin: Annotated[
        str,
        typer.Option(
            "--of",
            metavar="DIST",
            help="The plugin: an installed distribution, a wheel, an sdist or a folder.",
        ),
    ] = "",
    works_with: Annotated[
        str | None,
        typer.Option(
            "--works-with",
            metavar="VERSION",
            help="Version of the host that the plugin works with. Default: the installed one.",
        ),
    ] = None,
    with_uses: Annotated[
        bool, typer.Option("--uses", help="Also list each use of a name of the host.")
    ] = False,
    as_json: AsJson = False,
    file: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the report as JSON.")
    ] = None,
) -> None:
    """Find the uses of a host in a plugin that other versions of the host break.

    Only source code is read: nothing is imported, installed or downloaded. Exits with 1 if a
    version breaks a use.
    """
    from interposer.errors import ConfigError
    from interposer.tooling import write_text
    from interposer_tools._seams.comparison import compare_versions
    from interposer_tools._seams.source_tree import SourceTree

    if not plugin:
        raise ConfigError(
            "--of is missing. Try: --of with the name of your plugin's distribution, or with the "
            "path of its wheel, sdist or folder"
        )
    trees = [SourceTree.open(version) for version in versions or ()]
    known = SourceTree.open(works_with) if works_with is not None else None
    # Looking for an installed host reads the metadata of all distributions.
    installed = _installed(host) if known is None or not trees else None
    if not trees:
        if installed is None:
            raise ConfigError(
                f"No version of {host} is given, and none is installed. Try: pip download "
                f"--no-deps --dest wheels {host}==VERSION, then interposer seams {host} "
                f"wheels/*.whl --of {plugin}"
            )
        trees = [installed]
    if known is None and versions:
        known = installed
    report = compare_versions(host, SourceTree.open(plugin), known, trees)
    if file is not None:
        write_text(file, report.to_json(with_uses))
    if as_json:
        print(report.to_json(with_uses))
    else:
        print(report)
        if with_uses:
            print(report.uses_text())
    if report.breakages:
        raise typer.Exit(1)


def _installed(host: str) -> SourceTree | None:
    """Return the installed distribution that has the package ``host``, or None."""
    from importlib.util import find_spec

    import importlib_metadata

    from interposer_tools._seams.source_tree import SourceTree

    if find_spec(host) is None:  # of a top-level name, which imports nothing
        return None
    names = importlib_metadata.packages_distributions().get(host)
    return SourceTree.installed(names[0]) if names else None
