"""The exceptions that interposer raises, and helpers for error texts."""

from __future__ import annotations

from interposer._contract.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    GraphError,
    InstallationError,
    InterposerError,
    LockError,
    MissingMemberError,
    NoCandidateError,
    PlatformUnavailableError,
    PluginConflictError,
    PluginError,
    RankError,
    RecordError,
    RequestError,
    StorageError,
    UnknownNameError,
    UnsupportedModelError,
    described,
    foreign_errors,
    install_command,
    near_names,
    nearest_first,
)

# fmt: off
__all__ = [
    "CheckpointError", "ConfigError", "ContextLengthError", "GraphError", "InstallationError",
    "InterposerError", "LockError", "MissingMemberError", "NoCandidateError",
    "PlatformUnavailableError",
    "PluginConflictError", "PluginError", "RankError", "RecordError", "RequestError",
    "StorageError", "UnknownNameError", "UnsupportedModelError", "described", "foreign_errors",
    "install_command", "near_names", "nearest_first",
]
# fmt: on
