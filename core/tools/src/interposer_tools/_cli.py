"""The entry point of the command ``interposer``, which explains why an import failed.

This module imports only the standard library, so that the command works in a broken installation.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from typing import TextIO

from interposer_tools.imports import frozen_imports

_REQUIRED = ("interposer", "interposer_sandbox")


def main() -> None:
    """Run the command line, and end with a readable message if an import fails."""
    _check_streams()
    try:
        with frozen_imports():
            from interposer_tools._program import main as run

        run()
    except (OSError, UnicodeDecodeError):
        # On import, pydantic and torch read the entry points of every distribution. If one file is
        # unreadable, they raise without the name of its distribution.
        from interposer.tooling import unreadable_entry_points

        if faults := unreadable_entry_points():
            _end(faults, "reinstall or uninstall it")
        raise
    except ImportError as error:
        if hasattr(error, "faults"):  # an InstallationError, whose class may not be importable
            _end(error.faults, getattr(error, "mend", ""))
        if str(error.name).partition(".")[0] not in _REQUIRED:
            from interposer.tooling import import_problem

            if problem := import_problem(error):
                _end([problem], "rename or remove it, or take its folder off PYTHONPATH")
            raise
        files = {name: getattr(sys.modules.get(name), "__file__", None) for name in _REQUIRED}
        places = [f"{name!r} is imported from {file}" for name, file in files.items() if file]
        remedy = "rename the files that hide these packages, or take their folder off PYTHONPATH"
        _end([f"{error}", *places], remedy)
    except RuntimeError as error:
        from interposer.tooling import BACKEND_REMEDY, backend_problem

        if problem := backend_problem(error):
            _end([problem], BACKEND_REMEDY)
        raise


def _check_streams() -> None:
    """Replace closed standard input and error by the null device; end if output is closed.

    Otherwise the next opened file would get the descriptor of the closed stream, and the command
    would print into that file.
    """
    if sys.stdin is None:
        sys.stdin = _null_stream(0, "r")
    if sys.stderr is None:
        sys.stderr = _null_stream(2, "w")
    if sys.stdout is None:
        print("error: standard output is closed.\nTry: > /dev/null", file=sys.stderr)
        sys.exit(1)


def _null_stream(number: int, mode: str) -> TextIO:
    """Open the null device as file descriptor ``number``."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
    stream = io.FileIO(number, mode, closefd=False)
    return io.TextIOWrapper(stream, encoding="utf-8", errors="replace")


def _end(faults: Iterable[str], remedy: str) -> None:
    lines = "\n  ".join(["error: Installed packages cannot be imported.", *faults])
    print(f"{lines}\nTry: {remedy}", file=sys.stderr)
    sys.exit(1)
