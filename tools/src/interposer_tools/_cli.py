"""The entrance of the command line, which says what keeps the rest from being imported."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from typing import TextIO

_PARTS = ("interposer", "interposer_sandbox")


def main() -> None:
    """Run the command line.

    pydantic and torch read the entry points of all that is installed when they are imported, and
    fail with those of one distribution, whose name they do not tell.
    """
    _check_streams()
    try:
        from interposer_tools._program import main as run

        run()
    except (OSError, UnicodeDecodeError):
        from interposer.tooling import unreadable_entry_points

        if faults := unreadable_entry_points():
            _end(faults, "reinstall or uninstall it")
        raise
    except ImportError as error:
        if hasattr(error, "faults"):  # an InstallationError
            _end(error.faults, getattr(error, "mend", ""))
        if str(error.name).partition(".")[0] not in _PARTS:
            from interposer.tooling import import_problem

            if problem := import_problem(error):
                _end([problem], "rename or remove it, or take its folder off PYTHONPATH")
            raise
        files = {name: getattr(sys.modules.get(name), "__file__", None) for name in _PARTS}
        places = [f"{name!r} is imported from {file}" for name, file in files.items() if file]
        mend = "rename, remove or take off PYTHONPATH what stands in place of these"
        _end([f"{error}", *places], mend)


def _check_streams() -> None:
    """End the command if its output is closed; let input and errors be nothing if theirs are.

    The next file to be opened would get the number of the closed one, and what is printed.
    """
    if sys.stdin is None:
        sys.stdin = _nothing(0, "r")
    if sys.stderr is None:
        sys.stderr = _nothing(2, "w")
    if sys.stdout is None:
        print("error: standard output is closed.\nTry: > /dev/null", file=sys.stderr)
        sys.exit(1)


def _nothing(number: int, mode: str) -> TextIO:
    """Return the null device, open as the descriptor of that number."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
    stream = io.FileIO(number, mode, closefd=False)
    return io.TextIOWrapper(stream, encoding="utf-8", errors="replace")


def _end(faults: Iterable[str], mend: str) -> None:
    """End the command with what is wrong."""
    lines = "\n  ".join(["error: What is installed cannot be imported.", *faults])
    print(f"{lines}\nTry: {mend}", file=sys.stderr)
    sys.exit(1)
