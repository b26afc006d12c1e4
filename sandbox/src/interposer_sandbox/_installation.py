"""Faults of an installation that keep imports from working, by the name of the file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR, S_ISREG

_ENTRY_POINTS = "entry_points.txt"
_ENDLESS = "it is neither a file nor a folder"
_METADATA = (".dist-info", ".egg-info")


def endless_entry_points() -> list[str]:
    """Return the entry points of what is installed that are a FIFO or a device, with the reason.

    Libraries such as pydantic read the file of each distribution when they are imported, and would
    wait for the other end.
    """
    return [_fault(path, _ENDLESS) for path, is_endless in _kinds() if is_endless]


def unreadable_entry_points() -> list[str]:
    """Return the entry points of what is installed that cannot be read, each with the reason."""
    faults = []
    for path, is_endless in _kinds():
        if is_endless:
            faults.append(_fault(path, _ENDLESS))
            continue
        try:
            path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
            continue  # which libraries take for no entry points
        except (OSError, UnicodeDecodeError) as error:
            faults.append(_fault(path, error))
    return faults


def _fault(path: Path, reason: object) -> str:
    return f"{path.parent}: {path.name}: {reason}"


def _kinds() -> Iterator[tuple[Path, bool]]:
    """Yield the path of each file of entry points, and whether a read of it may never end."""
    for folder in dict.fromkeys(sys.path):
        with suppress(OSError, ValueError):
            for entry in os.scandir(folder or "."):
                if entry.name.endswith(_METADATA):
                    path = Path(entry.path, _ENTRY_POINTS)
                    try:
                        mode = path.stat().st_mode
                    except (FileNotFoundError, NotADirectoryError, PermissionError):
                        continue
                    except OSError:  # such as a link to itself
                        yield path, False
                        continue
                    yield path, not (S_ISREG(mode) or S_ISDIR(mode))


def shadowed(prefix: str) -> list[str]:
    """Return the modules that are imported in place of what distributions installed.

    Args:
        prefix: with which the names of top-level modules and distributions begin.
    """
    from importlib import metadata

    from interposer_sandbox._metadata import editable_folder

    lines = []
    for name in sorted(name for name in sys.modules if name.startswith(prefix) and "." not in name):
        module = sys.modules[name]
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "")
        try:
            found = metadata.distribution(name.replace("_", "-"))
            location = editable_folder(found) or Path(str(found.locate_file("")))
            if not file or Path(file).resolve().is_relative_to(location.resolve()):
                continue
            version = found.version
        except (metadata.PackageNotFoundError, OSError, ValueError, KeyError):
            continue
        lines.append(
            f"{file} is imported as {name!r} in place of {name.replace('_', '-')} {version} "
            f"in {location}"
        )
    return lines
