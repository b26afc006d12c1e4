"""Capability of a device, from its architecture and the driver's properties."""

from __future__ import annotations

from interposer import Capability
from interposer_ops.devices.architecture import capability
from interposer_xpu._hardware.architectures import architecture_of
from interposer_xpu._hardware.level_zero import XPUDevice


def capability_of(device: XPUDevice, *, triton: bool = False) -> Capability:
    """Return the capability of a device as the driver described it.

    Args:
        triton: a triton with a backend for these devices is installed.
    """
    architecture = architecture_of(device.ip_version)
    return capability(
        architecture.name,
        architecture,
        has_feature={
            "float64": device.float64,
            "integrated": device.integrated,
            "triton": triton,
            **{f"sub_group_{size}": True for size in device.sub_group_sizes},
        },
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        units=device.xe_cores,
        memory_bytes=device.memory_bytes,
        caches_bytes={
            "l2": device.cache_bytes,
            "shared": device.shared_bytes or architecture.shared_bytes,
        },
    )
