"""Query of Level Zero for the visible devices, in a child process."""

from __future__ import annotations

from dataclasses import dataclass

from interposer import Capability
from interposer_ops.devices.architecture import capability
from interposer_ops.devices.driver_inquiry import QUERY_PROGRAM, DriverInquiry
from interposer_xpu._hardware import level_zero_query
from interposer_xpu._hardware.architectures import architecture_of

LOADER = "libze_loader.so.1"
_LIMIT_SECONDS = 60.0
# Explanations of ze_result_t codes for the reader of a refusal.
_EXPLANATIONS = {
    0x70000001: "the device was lost. Restart the machine, or look at: dmesg | grep -E 'xe|i915'",
    0x70010000: "this user may not use the device. Join the group of /dev/dri/renderD*, usually "
    "render",
    0x70020000: "a library or the kernel's driver that the driver needs is missing",
    0x78000001: "no driver of Level Zero found a device. Install Intel's: apt-get install "
    "libze-intel-gpu1, or intel-level-zero-gpu with older releases",
    0x78000002: "driver and loader are of versions that do not fit together",
}
_INQUIRY = DriverInquiry(
    "Level Zero",
    QUERY_PROGRAM,
    "Look at: dmesg | grep -E 'xe|i915'",
    _EXPLANATIONS,
)


@dataclass(frozen=True, slots=True)
class XPUDevice:
    """Properties of one device, as the driver reports them.

    Attributes:
        device_id: PCI device id.
        ip_version: graphics IP version, which determines the architecture; 0 if not reported.
        integrated: the GPU shares the CPU's memory.
        xe_cores, vector_engines: total numbers; an Xe-core has 8 or 16 vector engines.
        bandwidth_bytes_per_s: memory bandwidth; 0 if not reported.
        shared_bytes: largest local memory of one work-group.
        cache_bytes: size of the last-level cache.
        float64: the GPU computes in double precision.
    """

    name: str
    uuid: str
    device_id: int
    ip_version: int
    integrated: bool
    xe_cores: int
    vector_engines: int
    memory_bytes: int
    bandwidth_bytes_per_s: int
    shared_bytes: int
    cache_bytes: int
    sub_group_sizes: tuple[int, ...]
    float64: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """Level Zero's answer: the driver versions, and the devices in the driver's order."""

    driver: str
    devices: tuple[XPUDevice, ...]


def ask(library: str = LOADER, limit_seconds: float = _LIMIT_SECONDS) -> Answer:
    """Query the devices that Level Zero shows to a child process with the same environment.

    Args:
        library: name or path of the Level Zero loader.
    Raises:
        DriverError: Level Zero cannot be loaded, or returns an error.
        DriverLostError: Level Zero crashes, or does not answer in time.
    """
    answer = _INQUIRY.run(level_zero_query.__file__, library, limit_seconds=limit_seconds)
    devices = [
        XPUDevice(**{**device, "sub_group_sizes": tuple(device["sub_group_sizes"])})
        for device in answer["devices"]
    ]
    return Answer(answer["driver"], tuple(devices))


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
