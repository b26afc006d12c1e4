"""Run the command ``interposer`` of the package interposer-tools, for ``python -m interposer``."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec

from interposer.errors import install_command

if __name__ == "__main__":
    if find_spec("interposer_tools") is None:
        sys.exit(
            "error: The command line is in the package interposer-tools, which is not installed.\n"
            f"Try: {install_command('interposer-tools')}"
        )
    # By name, because the core depends on no other package of the SDK.
    runpy.run_module("interposer_tools", run_name=__name__)
