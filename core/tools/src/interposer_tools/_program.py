"""The command ``interposer``: built-in subcommands, and subcommands of entry points.

Neither this module nor the modules of the commands import torch. Commands import slow modules
when they run, so that ``interposer --help`` is fast.
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

from interposer.errors import (
    ConfigError,
    InterposerError,
    LockError,
    RequestError,
    described,
    foreign_errors,
)
from interposer.tooling import STANDARD, backend_problem, entry_points, import_problem
from interposer_tools._commands.doctor import doctor
from interposer_tools._commands.explain import explain
from interposer_tools._commands.hub_kernels import hub_kernels
from interposer_tools._commands.judge import judge
from interposer_tools._commands.lock import lock
from interposer_tools._commands.new import new
from interposer_tools._commands.ops import ops
from interposer_tools._commands.seams import seams
from interposer_tools._commands.tune import tune
from interposer_tools._commands.verify import verify
from interposer_tools.imports import frozen_imports

GROUP = "interposer.commands"
# Errors of a failed write. If the error names no file, standard output could not be written.
_WRITE_ERRORS = {errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC)}
_CLOSED_PIPE_EXIT = 141  # the shell's status of a program that SIGPIPE ended
_BUILT_IN: dict[str, Callable[..., None]] = {
    "doctor": doctor,
    "explain": explain,
    "hub-kernels": hub_kernels,
    "judge": judge,
    "lock": lock,
    "new": new,
    "ops": ops,
    "seams": seams,
    "tune": tune,
    "verify": verify,
}


def main() -> None:
    """Run the command line; an expected error prints one message and exits with code 1 or 2."""
    warnings.showwarning = _show_warning
    if sys.stderr.isatty():  # show progress to people, but keep it out of the logs of scripts
        logging.basicConfig(format="%(message)s")
        logging.getLogger("interposer").setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal's encoding may lack characters
    try:
        try:
            with frozen_imports():
                application = _application(sys.argv[1:])
            application()
        finally:
            sys.stdout.flush()  # a failure is reported below; at exit it would be a traceback
    except InterposerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_exit_code(error))
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe on purpose
        _drop_output()
        sys.exit(_CLOSED_PIPE_EXIT)
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_ERRORS:
            raise
        print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
        _drop_output()
        sys.exit(1)
    except SystemExit as end:
        # typer ends with 1 on a closed pipe.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _drop_output()
        sys.exit(_CLOSED_PIPE_EXIT)


def _exit_code(error: InterposerError) -> int:
    """Return the exit code of an error: 2 for an unusable option or setting, otherwise 1."""
    is_usage = isinstance(error, (ConfigError, RequestError)) and not isinstance(error, LockError)
    return 2 if is_usage else 1


def _drop_output() -> None:
    """Send all further output to the null device.

    Otherwise the interpreter would fail again when it flushes the output at exit.
    """
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, sys.stdout.fileno())
    os.close(null_device)


def _show_warning(message: Warning | str, *_location: Any, **_options: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _application(arguments: list[str]) -> typer.Typer:
    """Create the command line from built-in subcommands and entry points.

    Of third-party commands, only the requested one is imported: importing may be slow or crash.
    """
    application = typer.Typer(
        name="interposer",
        help="Run language models on any accelerator, and explain how each kernel was selected.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.callback()(_root)
    # Two distributions may claim the same name; the command then only reports this.
    claims = defaultdict(list)
    for point in entry_points(GROUP):
        claims[point.name].append(point)
    requested = next((argument for argument in arguments if not argument.startswith("-")), "")
    for name in sorted(claims.keys() | _BUILT_IN.keys()):
        if name in _BUILT_IN:  # plugins cannot replace these
            application.command(name)(_BUILT_IN[name])
        elif name == requested or all(_provider(point) in STANDARD for point in claims[name]):
            _add_command(application, name, claims[name])
        else:
            application.command(name)(_placeholder(name, claims[name]))
    return application


def _provider(point: importlib_metadata.EntryPoint) -> str:
    return canonicalize_name(point.dist.name) if point.dist is not None else ""


def _placeholder(name: str, points: list[importlib_metadata.EntryPoint]) -> Callable[[], None]:
    """Return a command that only ``--help`` lists, with the names of its distributions."""

    def command() -> None:
        raise AssertionError("a requested command is imported, so this one never runs")

    providers = " and ".join(sorted(map(_provider, points)))
    command.__doc__ = f"Command of {providers}; `interposer {name} --help` describes it."
    return command


def _add_command(
    application: typer.Typer, name: str, points: list[importlib_metadata.EntryPoint]
) -> None:
    """Add the entry point's command, or a command that prints the reason of a failed import.

    The attribute ``context_settings`` of a command holds settings of click, such as
    ``{"ignore_unknown_options": True}``.
    """
    try:
        if len(points) > 1:
            targets = " and by ".join(sorted(point.value for point in points))
            raise InterposerError(f"it is claimed by {targets}")
        command = points[0].load()
    except foreign_errors() as error:
        reason = str(error) if isinstance(error, InterposerError) else described(error)
        if problem := import_problem(error) or backend_problem(error):
            reason += f"; {problem}"
        any_arguments = {"ignore_unknown_options": True, "allow_extra_args": True}
        application.command(name, context_settings=any_arguments)(_unusable(name, reason))
    else:
        settings = getattr(command, "context_settings", None)
        application.command(name, context_settings=settings)(command)


def _print_version(is_requested: bool) -> None:
    if is_requested:
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
        raise InterposerError(
            f"The command {name!r} cannot be loaded: {reason}.\n"
            "Try: interposer doctor, which names each faulty package"
        )

    return command
