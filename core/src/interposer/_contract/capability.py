"""The abilities of a device as plain data: probed on a machine or written in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Capability:
    """Architecture, features, number formats, memory and rates of one device.

    Attributes:
        architecture: the vendor's architecture string, such as ``"x86_64"``.
        features: instruction sets and hardware units, lower case, such as ``"avx512_bf16"``.
        formats: number formats with hardware arithmetic, such as ``"bfloat16"``.
        units: cores or multiprocessors that run in parallel.
        memory_bytes: memory that the device can address.
        caches_bytes: cache sizes by level name, such as ``{"l2": 1048576}``.
        rates: declared speeds for estimates, in SI units: ``memory_bytes_per_s``, ``flops_per_s``
            of 16-bit matmuls, ``link_bytes_per_s`` to another device of the node in one direction,
            ``link_seconds`` of the smallest collective in the node, and ``network_bytes_per_s`` and
            ``network_seconds`` between nodes.
    """

    architecture: str
    features: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    units: int = 1
    memory_bytes: int = 0
    caches_bytes: dict[str, int] = field(default_factory=dict, hash=False)
    rates: dict[str, float] = field(default_factory=dict, hash=False)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for another process; sets become sorted lists."""
        # Each predicate is judged with these values, and ``asdict`` takes 20 times as long.
        return {
            "architecture": self.architecture,
            "features": sorted(self.features),
            "formats": sorted(self.formats),
            "units": self.units,
            "memory_bytes": self.memory_bytes,
            "caches_bytes": dict(self.caches_bytes),
            "rates": dict(self.rates),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Capability:
        """Restore a capability from the values of ``to_json``."""
        feature_sets = {name: frozenset(value[name]) for name in ("features", "formats")}
        return cls(**{**value, **feature_sets})


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a platform; ``torch_device`` is torch's name for the device."""

    platform: str
    torch_device: str
    name: str
    capability: Capability


@dataclass(frozen=True, slots=True)
class Memory:
    """Total and free memory of a device in bytes, at the time of the query."""

    total_bytes: int
    free_bytes: int
