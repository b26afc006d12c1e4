"""The command ``interposer``. Subcommands come from the entry points ``interposer.commands``.

Neither this module nor the modules of the commands import torch: what is heavy is imported
inside a command when it runs.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import importlib_metadata
import typer

from interposer.errors import InterposerError

__all__ = ["main"]

GROUP = "interposer.commands"


def main() -> None:
    """Run the command line; an expected error ends it with one message and exit code 1."""
    try:
        _application()()
    except InterposerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _application() -> typer.Typer:
    application = typer.Typer(
        name="interposer",
        help="Route any model to any accelerator, and say why each route was taken.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.callback()(_root)
    application.command("plugins")(_plugins)
    points = importlib_metadata.entry_points(group=GROUP)
    for point in sorted(points, key=lambda p: p.name):
        try:
            command = point.load()
        except Exception as error:
            command = _broken(point.value, error)
        application.command(point.name)(command)
    return application


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"interposer {importlib_metadata.version('interposer')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def _plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the installed plugins: what each provides, which failed and why. Exit code 1 if any failed."""
    import warnings

    from interposer.plugins import PluginWarning
    from interposer.registry import current_registry

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # the failures are printed below
        found = current_registry().plugins
    facts: dict[str, Any] = {
        "plugins": [
            {
                "name": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "records": plugin.summary(),
            }
            for plugin in found.loaded
        ],
        "disabled": [{"name": name, "distribution": dist} for name, dist in found.skipped],
        "failed": [
            {
                "name": failure.name,
                "distribution": failure.distribution,
                "version": failure.version,
                "error": str(failure.error),
                "traceback": failure.traceback,
            }
            for failure in found.failed
        ],
    }
    print(json.dumps(facts, indent=2) if as_json else _plugins_text(facts))
    if found.failed:
        raise typer.Exit(1)


def _plugins_text(facts: dict[str, Any]) -> str:
    lines = []
    for plugin in facts["plugins"]:
        provided = ", ".join(f"{count} {kind}" for kind, count in plugin["records"].items())
        lines.append(f"{plugin['name']} ({plugin['distribution']} {plugin['version']}): {provided or 'nothing'}")
    lines += [f"{p['name']} ({p['distribution']}): disabled" for p in facts["disabled"]]
    for failure in facts["failed"]:
        lines.append(f"FAILED {failure['error']}")
        lines += [f"    {line}" for line in failure["traceback"].splitlines()]
    return "\n".join(lines) or "No plugins are installed. Try: pip install interposer-cpu"


def _broken(target: str, error: Exception) -> Any:
    def command() -> None:
        raise InterposerError(f"The command {target} cannot be loaded: {error!r}") from error

    command.__doc__ = f"(cannot be loaded: {error!r})"
    return command
