"""The check of an installed wheel: a wheel with native code must have the tag of a platform."""

from __future__ import annotations

import csv
import re
from io import StringIO

import importlib_metadata

from interposer_testing._checks.fault import Fault

_NATIVE = re.compile(r"\.(so(\.\d+)*|pyd|dylib|dll)$", re.IGNORECASE)
_REMEDY = (
    "Try: use a build backend that sets the platform tag, such as scikit-build-core with "
    'wheel.py-api = "py3", as in `interposer new plugin NAME --kind kernel --native`; '
    "or add a hatchling build hook that sets pure_python and tag of the build data"
)


def wheel_metadata(name: str, location: str) -> str:
    """Read the file WHEEL of a distribution in a folder; "" without a readable file."""
    try:
        for distribution in importlib_metadata.distributions(name=name, path=[location]):
            return distribution.read_text("WHEEL") or ""
    except (OSError, ValueError):  # ValueError: not UTF-8
        pass
    return ""


def check_wheel(wheel: str, record: str) -> list[Fault]:
    """Report native code in a wheel with the tag for any machine.

    Args:
        wheel: text of the file WHEEL.
        record: text of the file RECORD.
    """
    # A row of RECORD is path, hash and size of one file.
    paths = [row[0] for row in csv.reader(StringIO(record)) if row]
    native = sorted(path for path in paths if _NATIVE.search(path))
    wrong_lines = [line.strip() for line in wheel.splitlines() if _is_for_any_machine(line)]
    if not native or not wrong_lines:
        return []
    more = f", and so are {len(native) - 1} more" if len(native) > 1 else ""
    lines = " and ".join(map(repr, wrong_lines))
    reason = (
        f"it is native code{more}, but WHEEL says {lines}, so any machine would install it. "
        f"{_REMEDY}"
    )
    return [Fault("wheel", f"file {native[0]!r}", reason)]


def _is_for_any_machine(line: str) -> bool:
    key, _, value = (part.strip().lower() for part in line.partition(":"))
    return (key, value) == ("root-is-purelib", "true") or (key == "tag" and value.endswith("-any"))
