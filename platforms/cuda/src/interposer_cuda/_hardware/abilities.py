"""The capability of a device, from its architecture and its driver."""

from __future__ import annotations

from interposer import Capability
from interposer_cuda._hardware.architectures import architecture_of
from interposer_cuda._hardware.driver import CUDADevice

# Classes of bandwidth: a device has those that it reaches, in bytes per second.
_BANDWIDTHS = {
    "bandwidth_250g": 250e9,
    "bandwidth_500g": 500e9,
    "bandwidth_1t": 1e12,
    "bandwidth_2t": 2e12,
    "bandwidth_4t": 4e12,
    "bandwidth_7t": 7e12,
}
# Triton's compiler takes nothing older.
_LEAST_OF_TRITON = (7, 5)


def fixed_features(major: int, minor: int) -> frozenset[str]:
    """Return the features that a compute capability alone decides.

    Tensor cores of the third generation have ``tensor_cores_3`` and those before it as well, so
    that a kernel names the oldest that it runs on.
    """
    known = architecture_of(major, minor)
    cores = {f"tensor_cores_{number}" for number in range(1, known.generation + 1)}
    triton = {"triton"} if (major, minor) >= _LEAST_OF_TRITON else set()
    return frozenset(known.features | cores | triton)


def bandwidth_features(bytes_per_s: float) -> frozenset[str]:
    """Return the classes that a bandwidth of memory reaches."""
    return frozenset(name for name, least in _BANDWIDTHS.items() if bytes_per_s >= least)


def bandwidth_bytes_per_s(device: CUDADevice) -> float:
    """Return what the memory can transfer: two transfers per clock over the whole bus."""
    return 2 * device.memory_khz * 1e3 * device.bus_bits / 8


def capability_of(device: CUDADevice) -> Capability:
    """Return the capability of a device that the driver has described.

    What the driver knows of this very device goes before what its architecture is known for.
    """
    features = set(fixed_features(device.major, device.minor))
    features |= bandwidth_features(bandwidth_bytes_per_s(device))
    for feature, there in (("clusters", device.cluster_launch), ("tma", device.tensor_map_access)):
        (features.add if there else features.discard)(feature)
    told = {
        "host_mapping": device.can_map_host_memory and device.unified_addressing,
        "integrated": device.integrated,
        "p2p": bool(device.peers),
    }
    features |= {feature for feature, there in told.items() if there}
    return Capability(
        f"sm_{device.major}{device.minor}",
        frozenset(features),
        architecture_of(device.major, device.minor).formats,
        max(device.multiprocessors, 1),
        device.memory_bytes,
        {"l2": device.l2_bytes, "shared": device.shared_optin_bytes or device.shared_bytes},
    )
