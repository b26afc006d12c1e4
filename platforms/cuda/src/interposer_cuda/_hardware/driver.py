"""Query of CUDA's driver for the visible devices, in a child process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from interposer import Capability
from interposer_cuda._hardware import driver_query
from interposer_cuda._hardware.architectures import architecture_of
from interposer_ops.devices.architecture import capability
from interposer_ops.devices.driver_inquiry import QUERY_PROGRAM, DriverInquiry

LIBRARY = "libcuda.so.1"
_LIMIT_SECONDS = 60.0
# Advice by CUresult code, where the driver's own text names no action.
_EXPLANATIONS = {
    34: "only the stub of the driver's library is found, which programs can link but not call. "
    "Take the folder of stubs out of LD_LIBRARY_PATH",
    46: "the device is in use by a process that has it for itself",
    100: "no device is visible",
    802: "the fabric of the GPUs is not ready. Start nvidia-fabricmanager",
    803: "the driver's library and the kernel's module are of different versions. Restart, or "
    "make the container's driver that of the host",
    804: "the installed compatibility package of CUDA does not serve this device. Remove "
    "cuda-compat",
    999: "in a container, /dev/nvidia-uvm may be missing; elsewhere, try nvidia-modprobe -u",
}
_INQUIRY = DriverInquiry(
    "CUDA's driver",
    QUERY_PROGRAM,
    "If it takes long to wake, nvidia-persistenced keeps it awake",
    _EXPLANATIONS,
)


@dataclass(frozen=True, slots=True)
class CUDADevice:
    """Attributes of one device, as the driver reports them.

    Attributes:
        shared_bytes, shared_optin_bytes: shared memory of one block, without and with opt-in.
        memory_khz, bus_bits: memory clock and bus width, which give the bandwidth.
        compute_mode: 0 shared, 2 prohibited, 3 exclusive to one process.
        peers: ordinals of the devices whose memory this device can access.
    """

    name: str
    uuid: str
    memory_bytes: int
    peers: tuple[int, ...]
    shared_bytes: int
    integrated: bool
    multiprocessors: int
    can_map_host_memory: bool
    compute_mode: int
    memory_khz: int
    bus_bits: int
    l2_bytes: int
    unified_addressing: bool
    major: int
    minor: int
    shared_optin_bytes: int
    cluster_launch: bool
    tensor_map_access: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """The driver's answer: the newest supported CUDA, and the visible devices in order."""

    cuda: tuple[int, int]
    devices: tuple[CUDADevice, ...]


def ask(libraries: Iterable[str], limit_seconds: float = _LIMIT_SECONDS) -> Answer:
    """Query the devices that CUDA shows to a child process with the same environment.

    Args:
        libraries: names or paths of the driver's library; the first that loads is used.
    Raises:
        DriverError: the driver cannot be loaded, or returns an error.
        DriverLostError: the driver crashes, or does not answer in time.
    """
    answer = _INQUIRY.run(driver_query.__file__, *libraries, limit_seconds=limit_seconds)
    major, minor = answer["cuda"]
    devices = [CUDADevice(**{**d, "peers": tuple(d["peers"])}) for d in answer["devices"]]
    return Answer((major, minor), tuple(devices))


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
