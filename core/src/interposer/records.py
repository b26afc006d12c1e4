"""The declarative records that a plugin returns; this module imports no torch."""

from __future__ import annotations

from interposer._contract.records import (
    PROPERTIES,
    AttentionEntry,
    CheckpointEntry,
    CommunicatorEntry,
    DeviceEntry,
    Kernel,
    LayerEntry,
    ModelEntry,
    OpEntry,
    PlatformEntry,
    Record,
    SchemeEntry,
    TuningEntry,
    identity,
    load_target,
    resource_path,
)

# fmt: off
__all__ = [
    "PROPERTIES", "AttentionEntry", "CheckpointEntry", "CommunicatorEntry",
    "DeviceEntry", "Kernel", "LayerEntry", "ModelEntry", "OpEntry", "PlatformEntry", "Record",
    "SchemeEntry", "TuningEntry", "identity", "load_target", "resource_path",
]
# fmt: on
