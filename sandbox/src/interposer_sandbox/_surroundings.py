"""The surroundings of foreign code, which a finding on it depends on."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from interposer_sandbox._content import digest

# Lines of /proc/cpuinfo that are the same whenever and on whichever core they are read.
_LASTING = frozenset(
    {"vendor_id", "model name", "flags", "Features", "features", "CPU implementer", "CPU part"}
)


@cache
def surroundings() -> Mapping[str, str]:
    """Return what a finding depends on beside the code: this package, torch, Python, the machine.

    A finding may be kept for as long as all of it is the same.
    """
    spec = importlib.util.find_spec("torch")
    origin = spec.origin if spec is not None else None
    return {
        # What is refused changes with every edit of this code.
        "sandbox": digest(Path(__file__).parent.glob("*.py")),
        # The file of its version: metadata takes longer to find, and may be missing.
        "torch": digest([Path(origin).with_name("version.py")]) if origin else "",
        "python": platform.python_version(),
        "machine": f"{sys.platform} {platform.machine()}",
        "processor": _processor(),
    }


def _processor() -> str:
    """Return what tells processors apart, for caches that several machines share."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    first = text.partition("\n\n")[0].splitlines()
    lasting = [line for line in first if line.partition(":")[0].strip() in _LASTING]
    return hashlib.sha256("\n".join(lasting).encode()).hexdigest()
