"""Capability of a device, from its compute capability and the driver's device attributes."""

from __future__ import annotations

from interposer import Capability
from interposer_cuda._hardware.architectures import architecture_of
from interposer_cuda._hardware.driver import CUDADevice
from interposer_ops.devices.architecture import capability


def bandwidth_bytes_per_s(device: CUDADevice) -> float:
    """Return the peak memory bandwidth: two transfers per clock over the full bus width."""
    return 2 * device.memory_khz * 1e3 * device.bus_bits / 8


def capability_of(device: CUDADevice) -> Capability:
    """Return the capability of a device as the driver described it."""
    return capability(
        f"sm_{device.major}{device.minor}",
        architecture_of(device.major, device.minor),
        has_feature={
            "clusters": device.cluster_launch,
            "tma": device.tensor_map_access,
            "host_mapping": device.can_map_host_memory and device.unified_addressing,
            "integrated": device.integrated,
            "p2p": bool(device.peers),
        },
        bandwidth_bytes_per_s=bandwidth_bytes_per_s(device),
        units=device.multiprocessors,
        memory_bytes=device.memory_bytes,
        caches_bytes={
            "l2": device.l2_bytes,
            "shared": device.shared_optin_bytes or device.shared_bytes,
        },
    )
