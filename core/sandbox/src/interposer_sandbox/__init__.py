"""Run functions of foreign code in a guarded fork of an expendable process.

Foreign code may crash, hang, exit or change its process. A ``Sandbox`` starts a fork server and
runs one function at a time in a fork of that server; the outcome is a ``Finding``. ``run_here``
runs the function in this process instead, for code that is known to return. Both pass a
``Reporter`` to the function, to record the progress. ``SideEffects`` lists and undoes the changes
that the code in a block made to the process. A ``Host`` describes the program to be guarded.

``check_import_string`` looks up a name without executing code. ``metadata_text`` and related
functions read an installer's files, even malformed ones. A stored finding is valid for one content
of the code (``digest``, ``file_facts``) and one set of ``surroundings``.

The sandbox protects against code that is broken, careless or built for another machine, but not
against malicious code, which can do harm from a fork as well.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer_sandbox._lazy import lazy_attributes

if TYPE_CHECKING:
    from interposer_sandbox._client import (
        NestedError,
        Sandbox,
        SandboxError,
        UnavailableError,
    )
    from interposer_sandbox._collection import paused_collection
    from interposer_sandbox._content import digest, file_facts, is_altered
    from interposer_sandbox._foreign import (
        described,
        foreign_errors,
        near_names,
        nearest_first,
        traced,
    )
    from interposer_sandbox._host import Guarded, Host
    from interposer_sandbox._import_string import check_import_string, is_loaded
    from interposer_sandbox._installation import (
        endless_entry_points,
        shadowed,
        unreadable_entry_points,
    )
    from interposer_sandbox._lazy import lazy_attributes
    from interposer_sandbox._lock import ForkSafeLock
    from interposer_sandbox._metadata import (
        Metadata,
        altered_files,
        editable_folder,
        entry_points,
        has_module,
        metadata_folder,
        metadata_headers,
        metadata_text,
        recorded_files,
    )
    from interposer_sandbox._once import cached
    from interposer_sandbox._side_effects import SideEffects
    from interposer_sandbox._surroundings import surroundings
    from interposer_sandbox._task import Finding, Function, RefusedError, Reporter, run_here

# fmt: off
__all__ = [
    "Finding", "ForkSafeLock", "Function", "Guarded", "Host", "Metadata", "NestedError",
    "RefusedError", "Reporter", "Sandbox", "SandboxError", "SideEffects", "UnavailableError",
    "altered_files", "cached", "check_import_string", "described", "digest",
    "editable_folder", "endless_entry_points", "entry_points", "file_facts", "foreign_errors",
    "has_module",
    "is_altered", "is_loaded", "lazy_attributes", "metadata_folder", "metadata_headers",
    "metadata_text", "near_names", "nearest_first", "paused_collection",
    "recorded_files", "run_here", "shadowed", "surroundings", "traced",
    "unreadable_entry_points",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_sandbox._client": "NestedError Sandbox SandboxError UnavailableError",
        "interposer_sandbox._collection": "paused_collection",
        "interposer_sandbox._content": "digest file_facts is_altered",
        "interposer_sandbox._foreign": "described foreign_errors near_names nearest_first traced",
        "interposer_sandbox._host": "Guarded Host",
        "interposer_sandbox._import_string": "check_import_string is_loaded",
        "interposer_sandbox._installation": "endless_entry_points shadowed unreadable_entry_points",
        "interposer_sandbox._lock": "ForkSafeLock",
        "interposer_sandbox._metadata": "Metadata altered_files editable_folder entry_points "
        "has_module metadata_folder metadata_headers metadata_text recorded_files",
        "interposer_sandbox._once": "cached",
        "interposer_sandbox._side_effects": "SideEffects",
        "interposer_sandbox._surroundings": "surroundings",
        "interposer_sandbox._task": "Finding Function RefusedError Reporter run_here",
    },
)


def __dir__() -> list[str]:
    return __all__
