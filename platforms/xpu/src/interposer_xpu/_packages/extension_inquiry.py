"""Program that imports intel-extension-for-pytorch and prints the fault, if any, as JSON.

    python extension_inquiry.py

The program runs in a child process: a release for another torch version crashes at import.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module


def fault() -> str:
    """Return the reason that the package cannot be used; "" if it can."""
    try:
        package = import_module("intel_extension_for_pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        return f"cannot be imported: {error}"
    functional = getattr(getattr(package, "llm", None), "functional", None)
    return "" if hasattr(functional, "rms_norm") else "has no llm.functional.rms_norm"


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"fault": fault()}) + "\n")
