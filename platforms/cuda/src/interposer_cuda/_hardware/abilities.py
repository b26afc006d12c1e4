"""Capability of a device, from its compute capability and the driver's device attributes."""

from __future__ import annotations

from interposer import Capability
from interposer_cuda._hardware.architectures import architecture_of
from interposer_cuda._hardware.driver import CUDADevice

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
# Oldest compute capability that Triton's compiler supports.
_OLDEST_FOR_TRITON = (7, 5)


def fixed_features(major: int, minor: int) -> frozenset[str]:
    """Return the features that follow from a compute capability alone.

    A device with third-generation tensor cores has ``tensor_cores_1`` to ``tensor_cores_3``, so a
    kernel requires the oldest generation with its instructions.
    """
    architecture = architecture_of(major, minor)
    cores = {f"tensor_cores_{number}" for number in range(1, architecture.generation + 1)}
    triton = {"triton"} if (major, minor) >= _OLDEST_FOR_TRITON else set()
    return frozenset(architecture.features | cores | triton)


def bandwidth_features(bytes_per_s: float) -> frozenset[str]:
    """Return the bandwidth features that a memory bandwidth reaches."""
    return frozenset(name for name, threshold in _BANDWIDTHS.items() if bytes_per_s >= threshold)


def bandwidth_bytes_per_s(device: CUDADevice) -> float:
    """Return the peak memory bandwidth: two transfers per clock over the full bus width."""
    return 2 * device.memory_khz * 1e3 * device.bus_bits / 8


def capability_of(device: CUDADevice) -> Capability:
    """Return the capability of a device as the driver described it.

    The driver's attributes of this device override the table of architectures.
    """
    features = set(fixed_features(device.major, device.minor))
    features |= bandwidth_features(bandwidth_bytes_per_s(device))
    for feature, is_present in (
        ("clusters", device.cluster_launch),
        ("tma", device.tensor_map_access),
    ):
        (features.add if is_present else features.discard)(feature)
    is_present_by_feature = {
        "host_mapping": device.can_map_host_memory and device.unified_addressing,
        "integrated": device.integrated,
        "p2p": bool(device.peers),
    }
    features |= {feature for feature, is_present in is_present_by_feature.items() if is_present}
    return Capability(
        f"sm_{device.major}{device.minor}",
        frozenset(features),
        architecture_of(device.major, device.minor).formats,
        max(device.multiprocessors, 1),
        device.memory_bytes,
        {"l2": device.l2_bytes, "shared": device.shared_optin_bytes or device.shared_bytes},
    )
