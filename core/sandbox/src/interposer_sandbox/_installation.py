"""Detection of entry-point files and shadowed modules that make imports fail or hang."""

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
    """Describe the installed entry-point files that are a FIFO or a device.

    Libraries such as pydantic read all entry-point files on import, and would wait forever.
    """
    return [_fault(path, _ENDLESS) for path, is_endless in _entry_point_files() if is_endless]


def unreadable_entry_points() -> list[str]:
    """Describe the installed entry-point files that cannot be read."""
    faults = []
    for path, is_endless in _entry_point_files():
        if is_endless:
            faults.append(_fault(path, _ENDLESS))
            continue
        try:
            path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
            continue  # libraries treat these as files without entry points
        except (OSError, UnicodeDecodeError) as error:
            faults.append(_fault(path, error))
    return faults


def _fault(path: Path, reason: object) -> str:
    return f"{path.parent}: {path.name}: {reason}"


def _entry_point_files() -> Iterator[tuple[Path, bool]]:
    """Yield the path of each entry-point file, and whether a read may never end."""
    for folder in dict.fromkeys(sys.path):
        with suppress(OSError, ValueError):
            for entry in os.scandir(folder or "."):
                if entry.name.endswith(_METADATA):
                    path = Path(entry.path, _ENTRY_POINTS)
                    try:
                        mode = path.stat().st_mode
                    except (FileNotFoundError, NotADirectoryError, PermissionError):
                        continue
                    except OSError:  # for example a link to itself
                        yield path, False
                        continue
                    yield path, not (S_ISREG(mode) or S_ISDIR(mode))


def shadowed(prefix: str) -> list[str]:
    """Describe the imported modules that shadow modules of installed distributions.

    Args:
        prefix: beginning of the names of top-level modules and distributions.
    """
    # Imported here, because only the report of a failed import needs these modules.
    from importlib import metadata

    from interposer_sandbox._metadata import editable_folder

    lines = []
    for name in sorted(name for name in sys.modules if name.startswith(prefix) and "." not in name):
        module = sys.modules[name]
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "")
        try:
            distribution = metadata.distribution(name.replace("_", "-"))
            # Modules of an editable installation are in its source folder, not beside its metadata.
            location = editable_folder(distribution) or Path(str(distribution.locate_file("")))
            if not file or Path(file).resolve().is_relative_to(location.resolve()):
                continue
            version = distribution.version
        except (metadata.PackageNotFoundError, OSError, ValueError, KeyError):
            continue
        lines.append(
            f"{file} is imported as {name!r} in place of {name.replace('_', '-')} {version} "
            f"in {location}"
        )
    return lines
