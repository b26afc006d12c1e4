"""Capability of a device, from its architecture and the driver's properties."""

from __future__ import annotations

from interposer import Capability
from interposer_xpu._hardware.architectures import architecture_of
from interposer_xpu._hardware.level_zero import XPUDevice

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


def bandwidth_features(bytes_per_s: float) -> frozenset[str]:
    """Return the bandwidth features that a memory bandwidth reaches."""
    return frozenset(name for name, threshold in _BANDWIDTHS.items() if bytes_per_s >= threshold)


def sub_group_features(sizes: tuple[int, ...]) -> frozenset[str]:
    """Return one feature per sub-group size, such as ``sub_group_16``."""
    return frozenset(f"sub_group_{size}" for size in sizes)


def capability_of(device: XPUDevice, *, triton: bool = False) -> Capability:
    """Return the capability of a device as the driver described it.

    Args:
        triton: a triton with a backend for these devices is installed.
    """
    architecture = architecture_of(device.ip_version)
    features = architecture.features | sub_group_features(device.sub_group_sizes)
    features |= bandwidth_features(device.bandwidth_bytes_per_s)
    is_present_by_feature = {
        "float64": device.float64,
        "integrated": device.integrated,
        "triton": triton,
    }
    # The driver's properties of this device override the table of architectures.
    features = features.difference(is_present_by_feature) | {
        name for name, is_present in is_present_by_feature.items() if is_present
    }
    return Capability(
        architecture.name,
        features,
        architecture.formats,
        max(device.xe_cores, 1),
        device.memory_bytes,
        {"l2": device.cache_bytes, "shared": device.shared_bytes or architecture.shared_bytes},
    )
