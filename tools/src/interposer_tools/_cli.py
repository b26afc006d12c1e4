"""The entrance of the command line, which says what keeps the rest from being imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import importlib_metadata


def main() -> None:
    """Run the command line.

    pydantic and torch read the entry points of all that is installed when they are imported, and
    fail with those of one distribution, whose name they do not tell.
    """
    try:
        from interposer_tools._program import main as run

        run()
    except (OSError, UnicodeDecodeError):
        faults = [*_unreadable()]
        if not faults:
            raise
        head = "error: The entry points of what is installed cannot be read."
        lines = "\n  ".join([head, *faults])
        print(f"{lines}\nTry: reinstall or uninstall it", file=sys.stderr)
        sys.exit(1)


def _unreadable() -> Iterator[str]:
    """Yield the distributions without readable entry points, each with the reason."""
    for found in importlib_metadata.distributions():
        try:
            found.read_text("entry_points.txt")
        except (OSError, UnicodeDecodeError) as error:
            # Its name may be no better, and the attribute is not public.
            yield f"{getattr(found, '_path', 'somewhere')}: entry_points.txt: {error}"
