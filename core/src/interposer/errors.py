"""The exceptions that interposer raises, and what reading and writing their texts takes."""

from __future__ import annotations

from interposer._contract.errors import (
    FOREIGN_ERRORS,
    CheckpointError,
    ConfigError,
    GraphError,
    InterposerError,
    LockError,
    MissingMemberError,
    NoCandidateError,
    PlatformUnavailableError,
    PluginConflictError,
    PluginError,
    RecordError,
    RequestError,
    StorageError,
    UnknownNameError,
    UnsupportedModelError,
    described,
    nearest_first,
)

# fmt: off
__all__ = [
    "FOREIGN_ERRORS", "CheckpointError", "ConfigError", "GraphError", "InterposerError",
    "LockError", "MissingMemberError", "NoCandidateError", "PlatformUnavailableError",
    "PluginConflictError", "PluginError", "RecordError", "RequestError", "StorageError",
    "UnknownNameError", "UnsupportedModelError", "described", "nearest_first",
]
# fmt: on
