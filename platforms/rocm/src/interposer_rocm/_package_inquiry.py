"""Program that imports a kernel package and prints the outcome as JSON.

    python _package_inquiry.py PATHS FUNCTION...

The program runs in a child process: importing AITER initialises HIP, changes ``sys.path``, may
compile for minutes, and crashes if AITER was built for other GPUs. ``PATHS`` is ``sys.path`` as
JSON, a ``FUNCTION`` is ``module:name``.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import traceback
from typing import Any

_IMPORT_FAILURES = (Exception, SystemExit)


def answer(functions: list[str]) -> dict[str, Any]:
    """Import the package and read the parameters of its functions.

    Returns: ``{"parameters": {function: [names]}}`` without an entry for a missing function, or
        ``{"kind", "text", "missing", "trace"}`` of the error.
    """
    try:
        return {
            "parameters": {
                name: parameters for name in functions if (parameters := _parameter_names(name))
            }
        }
    except _IMPORT_FAILURES as error:
        return {
            "kind": [error_type.__name__ for error_type in type(error).__mro__],
            "text": str(error).strip() or type(error).__name__,
            "missing": (error.name or "") if isinstance(error, ModuleNotFoundError) else "",
            "trace": traceback.format_exc(),
        }


def _parameter_names(function: str) -> list[str]:
    module, _, name = function.partition(":")
    importlib.import_module(module.partition(".")[0])
    try:
        function_object = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name == module:
            return []
        raise
    if not callable(function_object):
        return []
    return [*inspect.signature(function_object).parameters]


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    # The import may print. Send such output to stderr and keep stdout for the answer.
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    stdout.write("\n" + json.dumps(answer(sys.argv[2:])) + "\n")
    stdout.flush()
    # Skip exit handlers of the libraries, which may hang or crash.
    os._exit(0)
