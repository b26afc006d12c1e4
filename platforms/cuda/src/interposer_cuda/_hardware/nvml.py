"""GPUs and driver version from NVML, without initialising CUDA.

NVML creates no context, so a process can be forked after using NVML. NVML ignores
CUDA_VISIBLE_DEVICES.

Source: NVIDIA's NVML API reference: signatures, sizes of buffers and return codes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from ctypes import byref, c_int, c_void_p
from dataclasses import dataclass

from interposer_ops.devices.driver_inquiry import DriverError, DriverLibrary

LIBRARY = "libnvidia-ml.so.1"
_BUFFER_BYTES = 96
_LIBRARY_LACKS_IT, _NOT_SUPPORTED, _NOT_FOUND, _FUNCTION_NOT_FOUND = 0, 3, 6, 13


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU of the machine, visible to CUDA or not.

    Attributes:
        uuid: such as ``"GPU-8f4a..."``.
        bus_id: PCI address; GPUs are sorted by address.
        architecture: compute capability as major and minor version.
        mig: MIG is enabled, so CUDA uses the MIG devices instead of the GPU.
        parts: uuids of the MIG devices, such as ``"MIG-1c0e..."``.
    """

    uuid: str
    name: str
    bus_id: str
    architecture: tuple[int, int]
    memory_bytes: int
    mig: bool = False
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """The driver and the GPUs of the machine, as NVML reports them.

    Attributes:
        driver: driver version, such as ``"570.86.15"``.
        cuda: newest CUDA that the driver supports, as major and minor version.
        faults: NVML's errors for GPUs that cannot be used.
    """

    driver: str
    cuda: tuple[int, int]
    gpus: tuple[GPU, ...]
    faults: tuple[str, ...] = ()


# Layout of nvmlPciInfo_t, version 3.
class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    )


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def inventory(libraries: Iterable[str]) -> Inventory:
    """Read driver version and GPUs of this machine, sorted by PCI address.

    Args:
        libraries: names or paths of NVML; the first that loads is used.
    Raises: DriverError: NVML cannot be loaded, or does not work.
    """
    nvml = DriverLibrary(libraries, _error_text)
    nvml.call("nvmlInit_v2")
    try:
        driver = _text(nvml, "nvmlSystemGetDriverVersion")
        cuda = nvml.read(c_int(), "nvmlSystemGetCudaDriverVersion_v2", ...).value
        gpus, faults = [], []
        for index in range(nvml.read(c_int(), "nvmlDeviceGetCount_v2", ...).value):
            # One faulty GPU, such as one fallen off the bus, must not hide the others.
            try:
                gpus.append(
                    _gpu(nvml, nvml.read(c_void_p(), "nvmlDeviceGetHandleByIndex_v2", index, ...))
                )
            except DriverError as error:
                faults.append(f"GPU {index}: {error}")
    finally:
        nvml.call("nvmlShutdown")
    gpus.sort(key=lambda gpu: gpu.bus_id)
    return Inventory(driver, (cuda // 1000, cuda % 1000 // 10), tuple(gpus), tuple(faults))


def _gpu(nvml: DriverLibrary, device: c_void_p) -> GPU:
    minor = c_int()
    major = nvml.read(c_int(), "nvmlDeviceGetCudaComputeCapability", device, ..., byref(minor))
    pci = nvml.read(_PciInfo(), "nvmlDeviceGetPciInfo_v3", device, ...)
    memory = nvml.read(_Memory(), "nvmlDeviceGetMemoryInfo", device, ...)
    mig = _is_in_mig_mode(nvml, device)
    return GPU(
        _text(nvml, "nvmlDeviceGetUUID", device),
        _text(nvml, "nvmlDeviceGetName", device),
        pci.busId.decode(errors="replace"),
        (major.value, minor.value),
        memory.total,
        mig,
        tuple(_parts(nvml, device)) if mig else (),
    )


def _is_in_mig_mode(nvml: DriverLibrary, device: c_void_p) -> bool:
    try:
        mode = nvml.read(c_int(), "nvmlDeviceGetMigMode", device, ..., byref(c_int()))
    except DriverError as error:
        # GPUs without MIG, and drivers older than MIG.
        if error.code in (_LIBRARY_LACKS_IT, _NOT_SUPPORTED, _FUNCTION_NOT_FOUND):
            return False
        raise
    return bool(mode.value)


def _parts(nvml: DriverLibrary, device: c_void_p) -> Iterator[str]:
    count = nvml.read(c_int(), "nvmlDeviceGetMaxMigDeviceCount", device, ...).value
    for index in range(count):
        part = nvml.read(
            *(c_void_p(), "nvmlDeviceGetMigDeviceHandleByIndex", device, index, ...),
            ignored={_NOT_FOUND},
        )
        if part:  # not every index has a MIG device
            yield _text(nvml, "nvmlDeviceGetUUID", part)


def _text(nvml: DriverLibrary, name: str, *arguments: object) -> str:
    """Return the text that an NVML function writes into a buffer."""
    buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
    return nvml.read(buffer, name, *arguments, ..., _BUFFER_BYTES).value.decode(errors="replace")


def _error_text(library: ctypes.CDLL, code: int) -> str:
    describe = library.nvmlErrorString
    # The default result type of ctypes, int, would truncate the pointer.
    describe.restype = ctypes.c_char_p
    return f"{(describe(code) or b'').decode(errors='replace')} (code {code})"
