"""The capability of a device, from its architecture and its driver."""

from __future__ import annotations

from interposer import Capability
from interposer_xpu._hardware.architectures import architecture_of
from interposer_xpu._hardware.level_zero import XPUDevice

# Classes of bandwidth: a device has those that it reaches, in bytes per second.
_BANDWIDTHS = {
    "bandwidth_250g": 250e9,
    "bandwidth_500g": 500e9,
    "bandwidth_1t": 1e12,
    "bandwidth_2t": 2e12,
    "bandwidth_4t": 4e12,
    "bandwidth_7t": 7e12,
}


def bandwidth_features(bytes_per_s: float) -> frozenset[str]:
    """Return the classes that a bandwidth of memory reaches."""
    return frozenset(name for name, least in _BANDWIDTHS.items() if bytes_per_s >= least)


def sub_group_features(sizes: tuple[int, ...]) -> frozenset[str]:
    """Return ``sub_group_16`` and the like."""
    return frozenset(f"sub_group_{size}" for size in sizes)


def capability_of(device: XPUDevice, *, triton: bool = False) -> Capability:
    """Return the capability of a device that the driver has described.

    Args:
        triton: there is a triton that compiles for such devices.
    """
    known = architecture_of(device.ip_version)
    features = known.features | sub_group_features(device.sub_group_sizes)
    features |= bandwidth_features(device.bandwidth_bytes_per_s)
    told = {"float64": device.float64, "integrated": device.integrated, "triton": triton}
    # What the driver says of this very device goes before what its architecture is known for.
    features = features.difference(told) | {name for name, there in told.items() if there}
    return Capability(
        known.name,
        features,
        known.formats,
        max(device.xe_cores, 1),
        device.memory_bytes,
        {"l2": device.cache_bytes, "shared": device.shared_bytes or known.shared_bytes},
    )
