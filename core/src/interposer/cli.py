"""The command ``interposer``. Subcommands come from the entry points ``interposer.commands``.

Neither this module nor the modules of the commands import torch: what is heavy is imported
inside a command when it runs.
"""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any

import importlib_metadata
import typer

from interposer.errors import FOREIGN_ERRORS, InterposerError

__all__ = ["main"]

GROUP = "interposer.commands"


def main() -> None:
    """Run the command line; an expected error ends it with one message and exit code 1."""
    warnings.showwarning = _show_warning
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a model's characters
    try:
        _application()()
    except InterposerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _show_warning(message: Warning | str, *_place: Any, **_more: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


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
    claims = defaultdict(list)
    for point in importlib_metadata.entry_points(group=GROUP):
        claims[point.name].append(point)
    for name in sorted(claims):
        _add_command(application, name, claims[name])
    application.command("plugins")(_plugins)  # last, so that none of the others replaces it
    return application


def _add_command(
    application: typer.Typer, name: str, points: list[importlib_metadata.EntryPoint]
) -> None:
    """Add what the entry point names or, where it is not usable, a command that says why."""
    try:
        if len(points) > 1:
            rivals = " and by ".join(sorted(point.value for point in points))
            raise InterposerError(f"it is claimed by {rivals}")
        command = points[0].load()
    except FOREIGN_ERRORS as error:
        reason = str(error) if isinstance(error, InterposerError) else repr(error)
        anything = {"ignore_unknown_options": True, "allow_extra_args": True}
        application.command(name, context_settings=anything)(_unusable(name, reason))
    else:
        application.command(name)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"interposer {importlib_metadata.version('interposer')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def _plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the installed plugins and what failed, which makes the exit code 1."""
    from interposer.registry import current_registry

    with warnings.catch_warnings(record=True) as caught:
        found = current_registry().plugins
    told = {str(failure.error) for failure in found.failed}  # printed with their tracebacks below
    for warning in caught:
        if str(warning.message) not in told:
            _show_warning(str(warning.message))
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
        origin = f"{plugin['distribution']} {plugin['version']}"
        lines.append(f"{plugin['name']} ({origin}): {provided or 'nothing'}")
    lines += [f"{p['name']} ({p['distribution']}): disabled" for p in facts["disabled"]]
    for failure in facts["failed"]:
        lines.append(f"FAILED {failure['error']}")
        lines += [f"    {line}" for line in failure["traceback"].splitlines()]
    return "\n".join(lines) or "No plugins are installed. Try: pip install interposer-cpu"


def _unusable(name: str, reason: str) -> Callable[[], None]:
    def command() -> None:
        """(cannot be loaded; run it to see why)"""
        raise InterposerError(f"The command {name!r} cannot be loaded: {reason}")

    return command
