"""The command ``interposer``: core's subcommands, and those of entry points in ``GROUP``.

Neither this module nor the modules of the commands import torch: what is heavy is imported
inside a command when it runs.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any

import importlib_metadata
import typer
from packaging.utils import canonicalize_name

from interposer.errors import InterposerError, described, foreign_errors
from interposer.tooling import STANDARD, entry_points, import_problem
from interposer_tools._commands.doctor import doctor
from interposer_tools._commands.explain import explain
from interposer_tools._commands.hub_kernels import hub_kernels
from interposer_tools._commands.lock import lock
from interposer_tools._commands.new import new
from interposer_tools._commands.ops import ops
from interposer_tools._commands.tune import tune
from interposer_tools._commands.verify import verify

GROUP = "interposer.commands"
# Of a failed write; where the error names no file, it was one to standard output.
_UNWRITTEN = {errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC)}
_OWN: dict[str, Callable[..., None]] = {
    "doctor": doctor,
    "explain": explain,
    "hub-kernels": hub_kernels,
    "lock": lock,
    "new": new,
    "ops": ops,
    "tune": tune,
    "verify": verify,
}


def main() -> None:
    """Run the command line; an expected error ends it with one message and exit code 1."""
    warnings.showwarning = _show_warning
    if sys.stderr.isatty():  # what takes seconds says so, but not in the logs of scripts
        logging.basicConfig(format="%(message)s")
        logging.getLogger("interposer").setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a model's characters
    try:
        try:
            _application(sys.argv[1:])()
        finally:
            sys.stdout.flush()  # what fails here is told below, at exit it would be a traceback
    except InterposerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITTEN | {errno.EPIPE}:
            raise
        if error.errno != errno.EPIPE:  # of which the reader knows
            print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
        _drop_output()
        sys.exit(1)


def _drop_output() -> None:
    """Let what is still to be written go nowhere, or the interpreter fails at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _show_warning(message: Warning | str, *_place: Any, **_more: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _application(arguments: list[str]) -> typer.Typer:
    """Return the command line; of foreign code only the command that is asked for is imported."""
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
    for point in entry_points(GROUP):
        claims[point.name].append(point)
    asked = next((argument for argument in arguments if not argument.startswith("-")), "")
    for name in sorted(claims.keys() | _OWN.keys()):
        if name in _OWN:  # nobody replaces these
            application.command(name)(_OWN[name])
        elif name == asked or all(_provider(point) in STANDARD for point in claims[name]):
            _add_command(application, name, claims[name])
        else:
            application.command(name)(_listed(claims[name]))
    return application


def _provider(point: importlib_metadata.EntryPoint) -> str:
    return canonicalize_name(point.dist.name) if point.dist is not None else ""


def _listed(points: list[importlib_metadata.EntryPoint]) -> Callable[[], None]:
    """Return what stands for commands in the list of all."""

    def command() -> None:
        raise AssertionError("it is imported where it is asked for")

    command.__doc__ = f"(of {' and of '.join(sorted(map(_provider, points)))})"
    return command


def _add_command(
    application: typer.Typer, name: str, points: list[importlib_metadata.EntryPoint]
) -> None:
    """Add the entry point's command, or one that prints the reason why it cannot be used."""
    try:
        if len(points) > 1:
            rivals = " and by ".join(sorted(point.value for point in points))
            raise InterposerError(f"it is claimed by {rivals}")
        command = points[0].load()
    except foreign_errors() as error:
        reason = str(error) if isinstance(error, InterposerError) else described(error)
        if problem := import_problem(error):
            reason += f"; {problem}"
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


def _unusable(name: str, reason: str) -> Callable[[], None]:
    def command() -> None:
        """(cannot be loaded; run it to see why)"""
        raise InterposerError(f"The command {name!r} cannot be loaded: {reason}")

    return command
