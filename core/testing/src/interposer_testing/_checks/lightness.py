"""The check that a plugin module is light: its import must not import torch or numpy."""

from __future__ import annotations

import subprocess
import sys

from interposer_testing._checks.fault import Fault

_PROGRAM = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*sorted({"torch", "numpy", "transformers"} & set(sys.modules)))
"""


def check_lightness(module: str) -> list[Fault]:
    """Import the plugin module in a new process, and report a failed or heavy import."""
    # A new process, because this process has already imported torch.
    command = [sys.executable, "-c", _PROGRAM, module]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    where = f"module {module!r}"
    if process.returncode:
        return [Fault("import", where, "its import fails", traceback=process.stderr)]
    packages = process.stdout.split()
    if packages:
        reason = (
            f"its import loads {', '.join(packages)}; move the code that needs these packages "
            "to another module, and name that module in import strings"
        )
        return [Fault("import", where, reason)]
    return []
