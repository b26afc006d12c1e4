"""The check of an installed wheel: native code must be tagged for the machines that it runs on."""

from __future__ import annotations

import csv
import re
from io import StringIO

import importlib_metadata

from interposer_testing._checks.fault import Fault

_NATIVE = re.compile(r"\.(so(\.\d+)*|pyd|dylib|dll)$", re.IGNORECASE)
_MEND = (
    "Try: build it with a backend that tags it, such as scikit-build-core with "
    'wheel.py-api = "py3", as `interposer new plugin NAME --kind kernel --native` writes it; '
    "or, with hatchling, a build hook that sets pure_python and tag of the build data"
)


def wheel_metadata(name: str, location: str) -> str:
    """Return the text of WHEEL of a distribution in a folder, empty without a readable one."""
    try:
        for found in importlib_metadata.distributions(name=name, path=[location]):
            return found.read_text("WHEEL") or ""
    except (OSError, ValueError):  # not readable, or not UTF-8
        pass
    return ""


def check_wheel(wheel: str, record: str) -> list[Fault]:
    """Return a fault if native code is in a wheel that says it runs on any machine.

    Args:
        wheel: text of its WHEEL.
        record: text of its RECORD.
    """
    paths = [row[0] for row in csv.reader(StringIO(record)) if row]
    native = sorted(path for path in paths if _NATIVE.search(path))
    wrong = [line.strip() for line in wheel.splitlines() if _is_for_any_machine(line)]
    if not native or not wrong:
        return []
    more = f", and so are {len(native) - 1} more" if len(native) > 1 else ""
    said = " and ".join(map(repr, wrong))
    reason = (
        f"it is native code{more}, but WHEEL says {said}, so that any machine would install it. "
        f"{_MEND}"
    )
    return [Fault("wheel", f"file {native[0]!r}", reason)]


def _is_for_any_machine(line: str) -> bool:
    key, _, value = (part.strip().lower() for part in line.partition(":"))
    return (key, value) == ("root-is-purelib", "true") or (key == "tag" and value.endswith("-any"))
