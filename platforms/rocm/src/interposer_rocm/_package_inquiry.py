"""A program that imports a package of kernels and prints the outcome as JSON.

    python package_inquiry.py PATHS FUNCTION...

It runs in a process of its own: AITER's import initialises HIP, changes ``sys.path``, may compile
for minutes, and ends the process where it was built for other GPUs. ``PATHS`` is ``sys.path`` as
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

_ANY = (Exception, SystemExit)


def answer(functions: list[str]) -> dict[str, Any]:
    """Return ``{"parameters": {function: [names]}}``, or ``{"kind", "text", "missing", "trace"}``.

    A function that is not there has no entry.
    """
    try:
        return {"parameters": {name: found for name in functions if (found := _names(name))}}
    except _ANY as error:
        return {
            "kind": [kind.__name__ for kind in type(error).__mro__],
            "text": str(error).strip() or type(error).__name__,
            "missing": (error.name or "") if isinstance(error, ModuleNotFoundError) else "",
            "trace": traceback.format_exc(),
        }


def _names(function: str) -> list[str]:
    module, _, name = function.partition(":")
    importlib.import_module(module.partition(".")[0])
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name == module:
            return []
        raise
    return [*inspect.signature(found).parameters] if callable(found) else []


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    # What is printed while it compiles is not the answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers.write("\n" + json.dumps(answer(sys.argv[2:])) + "\n")
    answers.flush()
    # Past what the libraries want to do at the end.
    os._exit(0)
