"""``python -m interposer`` is the command ``interposer`` of the package interposer-tools."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec

if __name__ == "__main__":
    if find_spec("interposer_tools") is None:
        sys.exit(
            "error: The command line is in the package interposer-tools, which is not installed.\n"
            "Try: pip install interposer-tools"
        )
    # By name, because the core depends on no other package of the SDK.
    runpy.run_module("interposer_tools", run_name=__name__)
