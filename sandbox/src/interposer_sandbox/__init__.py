"""Functions of foreign code, run in a guarded fork of a process that can be lost.

Foreign code may crash, hang, exit or change the process that it runs in. A ``Sandbox`` runs one
function at a time in a fork of a process of its own and tells what became of it as a ``Finding``;
``run_here`` does the same in this process, for code that comes back. Both hand the function a
``Reporter``, which notes how far it has come. ``SideEffects`` lists what the code in a block did
to the process around it, and puts it back. A ``Host`` tells both what is to be guarded.

``check_import_string`` looks for a name without running anything. What a finding depends on, for
whoever keeps it, are the content of the code (``digest``, ``file_facts``) and ``surroundings``.

It protects against code that is broken, careless or built for another machine, and not against
code that means harm: that can do it from a fork as well.

Every name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interposer_sandbox._client import (
        NestedError,
        Sandbox,
        SandboxError,
        UnavailableError,
    )
    from interposer_sandbox._content import digest, file_facts, is_altered
    from interposer_sandbox._foreign import described, foreign_errors, nearest_first
    from interposer_sandbox._host import Host
    from interposer_sandbox._import_string import check_import_string, is_loaded
    from interposer_sandbox._lock import ForkSafeLock
    from interposer_sandbox._side_effects import SideEffects
    from interposer_sandbox._surroundings import surroundings
    from interposer_sandbox._task import Finding, Function, RefusedError, Reporter, run_here

# fmt: off
__all__ = [
    "Finding", "ForkSafeLock", "Function", "Host", "NestedError", "RefusedError", "Reporter",
    "Sandbox", "SandboxError", "SideEffects", "UnavailableError", "check_import_string",
    "described", "digest", "file_facts", "foreign_errors", "is_altered", "is_loaded",
    "nearest_first", "run_here", "surroundings",
]
# fmt: on

_HOMES = {
    "_client": "NestedError Sandbox SandboxError UnavailableError",
    "_content": "digest file_facts is_altered",
    "_foreign": "described foreign_errors nearest_first",
    "_host": "Host",
    "_import_string": "check_import_string is_loaded",
    "_lock": "ForkSafeLock",
    "_side_effects": "SideEffects",
    "_surroundings": "surroundings",
    "_task": "Finding Function RefusedError Reporter run_here",
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
