"""A program that imports intel-extension-for-pytorch and prints its faults as JSON.

    python extension_inquiry.py

It runs in a process of its own: a release for another torch ends the process that imports it.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module


def fault() -> str:
    """Return why the package cannot be used; empty where it can."""
    try:
        package = import_module("intel_extension_for_pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        return f"cannot be imported: {error}"
    functional = getattr(getattr(package, "llm", None), "functional", None)
    return "" if hasattr(functional, "rms_norm") else "has no llm.functional.rms_norm"


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"fault": fault()}) + "\n")
