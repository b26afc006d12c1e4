"""GPUs and driver version from NVML, without initialising CUDA.

NVML creates no context, so a process can be forked after using NVML. NVML ignores
CUDA_VISIBLE_DEVICES.

Source: NVIDIA's NVML API reference: signatures, sizes of buffers and return codes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LIBRARY = "libnvidia-ml.so.1"
_BUFFER_BYTES = 96
_NOT_SUPPORTED, _NOT_FOUND = 3, 6
_FUNCTION_NOT_FOUND = 13


class NVMLError(Exception):
    """A call to NVML failed with return code ``code``; 0 if the library could not be loaded."""

    def __init__(self, call: str, code: int, text: str) -> None:
        self.call = call
        self.code = code
        super().__init__(f"{call}: {text}" if call else text)


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


def inventory(libraries: Iterable[str] = (_LIBRARY,)) -> Inventory:
    """Read driver version and GPUs of this machine, sorted by PCI address.

    Args:
        libraries: names or paths of NVML; the first that loads is used.
    Raises: NVMLError: NVML cannot be loaded, or does not work.
    """
    with _open(libraries) as nvml:
        driver = nvml.text("nvmlSystemGetDriverVersion")
        cuda = nvml.number("nvmlSystemGetCudaDriverVersion_v2")
        gpus, faults = [], []
        for index in range(nvml.number("nvmlDeviceGetCount_v2")):
            # One faulty GPU, such as one fallen off the bus, must not hide the others.
            try:
                gpus.append(_gpu(nvml, nvml.handle("nvmlDeviceGetHandleByIndex_v2", index)))
            except NVMLError as error:
                faults.append(f"GPU {index}: {error}")
    gpus.sort(key=lambda gpu: gpu.bus_id)
    return Inventory(driver, (cuda // 1000, cuda % 1000 // 10), tuple(gpus), tuple(faults))


def _gpu(nvml: _NVML, device: ctypes.c_void_p) -> GPU:
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvml.call("nvmlDeviceGetCudaComputeCapability", device, major, minor)
    pci, memory = _PciInfo(), _Memory()
    nvml.call("nvmlDeviceGetPciInfo_v3", device, pci)
    nvml.call("nvmlDeviceGetMemoryInfo", device, memory)
    mig = _mig_mode(nvml, device)
    return GPU(
        nvml.text("nvmlDeviceGetUUID", device),
        nvml.text("nvmlDeviceGetName", device),
        pci.busId.decode(errors="replace"),
        (major.value, minor.value),
        memory.total,
        mig,
        tuple(_parts(nvml, device)) if mig else (),
    )


def _mig_mode(nvml: _NVML, device: ctypes.c_void_p) -> bool:
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    try:
        nvml.call("nvmlDeviceGetMigMode", device, current, pending)
    except NVMLError as error:
        # GPUs without MIG, and drivers older than MIG.
        if error.code in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND):
            return False
        raise
    return bool(current.value)


def _parts(nvml: _NVML, device: ctypes.c_void_p) -> Iterator[str]:
    for index in range(nvml.number("nvmlDeviceGetMaxMigDeviceCount", device)):
        try:
            part = nvml.handle("nvmlDeviceGetMigDeviceHandleByIndex", device, index)
        except NVMLError as error:
            if error.code == _NOT_FOUND:  # an index without a MIG device
                continue
            raise
        yield nvml.text("nvmlDeviceGetUUID", part)


@contextmanager
def _open(libraries: Iterable[str]) -> Iterator[_NVML]:
    nvml = _NVML(_load_library(libraries))
    nvml.call("nvmlInit_v2")
    try:
        yield nvml
    finally:
        nvml.call("nvmlShutdown")


def _load_library(libraries: Iterable[str]) -> ctypes.CDLL:
    failures = []
    for library in libraries:
        try:
            return ctypes.CDLL(library)
        except OSError as error:
            failures.append(str(error))
    raise NVMLError("", 0, "; ".join(failures) or "no library is named")


class _NVML:
    """Calls into NVML; failures raise ``NVMLError``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, *arguments: object) -> None:
        """Call a function; ctypes structures and numbers are passed by reference, as outputs."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            text = "this driver does not have it"
            raise NVMLError(name, _FUNCTION_NOT_FOUND, text) from None
        code = function(*(_by_reference(argument) for argument in arguments))
        if code:
            describe = self._library.nvmlErrorString
            # The default result type of ctypes, int, would truncate the pointer.
            describe.restype = ctypes.c_char_p
            message = describe(code) or b""
            raise NVMLError(name, code, f"{message.decode(errors='replace')} (code {code})")

    def text(self, name: str, *arguments: object) -> str:
        """Return the text that a function writes into a buffer."""
        buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
        self.call(name, *arguments, buffer, _BUFFER_BYTES)
        return buffer.value.decode(errors="replace")

    def number(self, name: str, *arguments: object) -> int:
        """Return the integer that a function writes."""
        value = ctypes.c_int()
        self.call(name, *arguments, value)
        return value.value

    def handle(self, name: str, *arguments: object) -> ctypes.c_void_p:
        """Return the device handle that a function writes."""
        value = ctypes.c_void_p()
        self.call(name, *arguments, _Reference(value))
        return value


class _Reference:
    """A device handle that a call writes; plain handles are passed by value."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self.handle = handle


def _by_reference(argument: object) -> object:
    match argument:
        case _Reference():
            return ctypes.byref(argument.handle)
        case ctypes.c_int() | ctypes.c_uint() | ctypes.Structure():
            return ctypes.byref(argument)
        case int():
            return ctypes.c_uint(argument)
    return argument
