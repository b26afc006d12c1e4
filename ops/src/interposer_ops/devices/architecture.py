"""Properties of a GPU architecture, and the capability of a device that has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from interposer import Capability

__all__ = ["Architecture", "bandwidth_features", "capability"]

# Bandwidth features by threshold in bytes per second; a device has the feature of every threshold
# that its bandwidth reaches.
_BANDWIDTHS = {
    "bandwidth_250g": 250e9,
    "bandwidth_500g": 500e9,
    "bandwidth_1t": 1e12,
    "bandwidth_2t": 2e12,
    "bandwidth_4t": 4e12,
    "bandwidth_7t": 7e12,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties of all devices of one architecture.

    Attributes:
        name: display name, such as ``"Hopper"``.
        features: instructions and units.
        formats: number formats with arithmetic in hardware.
        dtypes: torch names of the dtypes that models may run in, the preferred one first.
        shared_bytes: largest shared memory of one block, which vendors also call LDS or local
            memory of a work-group.
    """

    name: str
    features: frozenset[str]
    formats: frozenset[str]
    dtypes: tuple[str, ...]
    shared_bytes: int


def bandwidth_features(bytes_per_s: float) -> frozenset[str]:
    """Return the bandwidth features whose thresholds the memory bandwidth reaches."""
    return frozenset(name for name, threshold in _BANDWIDTHS.items() if bytes_per_s >= threshold)


def capability(
    name: str,
    architecture: Architecture,
    *,
    has_feature: Mapping[str, bool],
    bandwidth_bytes_per_s: float,
    units: int,
    memory_bytes: int,
    caches_bytes: Mapping[str, int],
) -> Capability:
    """Return the capability of a device as its driver describes it.

    Args:
        name: name of the architecture in the capability.
        has_feature: whether this device has a feature; overrides the features of the architecture.
        bandwidth_bytes_per_s: peak memory bandwidth; 0 if unknown.
        units: number of multiprocessors; counts as at least 1.
    """
    features = architecture.features.difference(has_feature)
    features |= {feature for feature, is_present in has_feature.items() if is_present}
    features |= bandwidth_features(bandwidth_bytes_per_s)
    return Capability(
        name, features, architecture.formats, max(units, 1), memory_bytes, dict(caches_bytes)
    )
