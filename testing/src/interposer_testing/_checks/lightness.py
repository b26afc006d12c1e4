"""The check that a plugin module is light: importing it must not import torch."""

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
    """Return a fault if importing the plugin module in a clean process fails or is heavy."""
    command = [sys.executable, "-c", _PROGRAM, module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    where = f"module {module!r}"
    if done.returncode:
        return [Fault("import", where, "its import fails", traceback=done.stderr)]
    heavy = done.stdout.split()
    if heavy:
        reason = f"its import loads {', '.join(heavy)}; name what needs them by import string"
        return [Fault("import", where, reason)]
    return []
