"""Query of CUDA's driver for its devices, for a child process.

A child process, because ``cuInit`` cannot be undone: forks of a process that called ``cuInit``
cannot use CUDA. The query creates no context, and leaves CUDA_VISIBLE_DEVICES and
CUDA_DEVICE_ORDER to the driver.

Source: NVIDIA's CUDA driver API reference: signatures and the numbers of ``CUdevice_attribute``.
"""

from __future__ import annotations

import ctypes
import uuid
from ctypes import c_int, c_size_t, c_ubyte
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interposer_ops.devices.driver_inquiry import DriverLibrary

_INVALID_VALUE = 1
# Numbers of ``CUdevice_attribute``.
_COUNTS = {
    "shared_bytes": 8,
    "multiprocessors": 16,
    "compute_mode": 20,
    "memory_khz": 36,
    "bus_bits": 37,
    "l2_bytes": 38,
    "major": 75,
    "minor": 76,
    "shared_optin_bytes": 97,
}
_FLAGS = {
    "integrated": 18,
    "can_map_host_memory": 19,
    "unified_addressing": 41,
    "cluster_launch": 120,
    "tensor_map_access": 127,
}


def query(driver: DriverLibrary) -> dict[str, Any]:
    """Query CUDA's driver; return ``{"cuda": [major, minor], "devices": [...]}``."""
    version = driver.read(c_int(), "cuDriverGetVersion", ...).value
    driver.call("cuInit", 0)
    count = driver.read(c_int(), "cuDeviceGetCount", ...).value
    handles = [driver.read(c_int(), "cuDeviceGet", ..., ordinal) for ordinal in range(count)]
    return {
        # The driver reports CUDA 12.4 as 12040.
        "cuda": [version // 1000, version % 1000 // 10],
        "devices": [_device(driver, handle, handles) for handle in handles],
    }


def error_text(driver: ctypes.CDLL, code: int) -> str:
    """Return the driver's text for an error code."""
    text = ctypes.c_char_p()
    driver.cuGetErrorString(c_int(code), ctypes.byref(text))
    described = (text.value or b"unknown error").decode(errors="replace")
    return f"{described} (code {code})"


def _device(driver: DriverLibrary, handle: c_int, handles: list[c_int]) -> dict[str, Any]:
    name = driver.read(ctypes.create_string_buffer(256), "cuDeviceGetName", ..., 256, handle)
    identity = driver.read((c_ubyte * 16)(), "cuDeviceGetUuid_v2", ..., handle)
    return {
        "name": name.value.decode(errors="replace"),
        "uuid": str(uuid.UUID(bytes=bytes(identity))),
        "memory_bytes": driver.read(c_size_t(), "cuDeviceTotalMem_v2", ..., handle).value,
        "peers": [
            ordinal
            for ordinal, peer in enumerate(handles)
            if peer is not handle
            and driver.read(c_int(), "cuDeviceCanAccessPeer", ..., handle, peer).value
        ],
        **{name: _attribute(driver, number, handle) for name, number in _COUNTS.items()},
        **{name: bool(_attribute(driver, number, handle)) for name, number in _FLAGS.items()},
    }


def _attribute(driver: DriverLibrary, number: int, handle: c_int) -> int:
    """Return the value of a device attribute; 0 if the driver does not know the attribute."""
    arguments = ..., number, handle
    return driver.read(c_int(), "cuDeviceGetAttribute", *arguments, ignored={_INVALID_VALUE}).value
