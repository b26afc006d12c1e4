"""Facts of machine and software that invalidate a stored finding when they change."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from interposer_sandbox._content import digest

# Lines of /proc/cpuinfo that are the same at any time and on every core.
_CONSTANT_FIELDS = frozenset(
    {"vendor_id", "model name", "flags", "Features", "features", "CPU implementer", "CPU part"}
)


@cache
def surroundings() -> Mapping[str, str]:
    """Return the conditions of a finding other than the code: sandbox, torch, Python, machine.

    A stored finding is valid while every condition is unchanged.
    """
    spec = importlib.util.find_spec("torch")
    origin = spec.origin if spec is not None else None
    return {
        # Any edit of this package may change which code is refused.
        "sandbox": digest(Path(__file__).parent.glob("*.py")),
        # torch's version file, because its metadata takes longer to find and may be missing.
        "torch": digest([Path(origin).with_name("version.py")]) if origin else "",
        "python": platform.python_version(),
        "machine": f"{sys.platform} {platform.machine()}",
        "processor": _processor(),
    }


def _processor() -> str:
    """Identify the processor, for caches that several machines share."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    first_core = text.partition("\n\n")[0].splitlines()
    constant_lines = [
        line for line in first_core if line.partition(":")[0].strip() in _CONSTANT_FIELDS
    ]
    return hashlib.sha256("\n".join(constant_lines).encode()).hexdigest()
