"""Program that queries CUDA's driver for its devices and prints the answer as JSON.

    python -I -S driver_inquiry.py LIBRARY...

The program runs in a child process because ``cuInit`` cannot be undone: forks of a process that
called ``cuInit`` cannot use CUDA. The program creates no context, needs the standard library only,
and leaves CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER to the driver.

Source: NVIDIA's CUDA driver API reference: signatures and the numbers of ``CUdevice_attribute``.
"""

from __future__ import annotations

import ctypes
import json
import sys
import uuid
from typing import Any

# Numbers of ``CUdevice_attribute``.
_ATTRIBUTES = {
    "shared_bytes": 8,
    "integrated": 18,
    "multiprocessors": 16,
    "can_map_host_memory": 19,
    "compute_mode": 20,
    "memory_khz": 36,
    "bus_bits": 37,
    "l2_bytes": 38,
    "unified_addressing": 41,
    "major": 75,
    "minor": 76,
    "shared_optin_bytes": 97,
    "cluster_launch": 120,
    "tensor_map_access": 127,
}


class _DriverCallError(Exception):
    def __init__(self, call: str, code: int, text: str) -> None:
        self.facts = {"call": call, "code": code, "text": text}
        super().__init__(text)


def answer(libraries: list[str]) -> dict[str, Any]:
    """Query the driver.

    Returns: ``{"cuda": [major, minor], "devices": [...]}``, or ``{"call", "code", "text"}`` of the
        call that failed.
    """
    try:
        return _query(_load_library(libraries))
    except _DriverCallError as failure:
        return failure.facts


def _load_library(libraries: list[str]) -> ctypes.CDLL:
    failures = []
    for library in libraries:
        try:
            return ctypes.CDLL(library)
        except OSError as error:
            failures.append(str(error))
    raise _DriverCallError("", 0, "; ".join(failures))


def _query(driver: ctypes.CDLL) -> dict[str, Any]:
    version = ctypes.c_int()
    _call(driver, "cuDriverGetVersion", ctypes.byref(version))
    _call(driver, "cuInit", ctypes.c_uint(0))
    count = ctypes.c_int()
    _call(driver, "cuDeviceGetCount", ctypes.byref(count))
    handles = []
    for ordinal in range(count.value):
        handle = ctypes.c_int()
        _call(driver, "cuDeviceGet", ctypes.byref(handle), ctypes.c_int(ordinal))
        handles.append(handle)
    return {
        # The driver reports CUDA 12.4 as 12040.
        "cuda": [version.value // 1000, version.value % 1000 // 10],
        "devices": [_device(driver, handle, handles) for handle in handles],
    }


def _device(
    driver: ctypes.CDLL, handle: ctypes.c_int, handles: list[ctypes.c_int]
) -> dict[str, Any]:
    name = ctypes.create_string_buffer(256)
    _call(driver, "cuDeviceGetName", name, ctypes.c_int(len(name)), handle)
    identity = (ctypes.c_ubyte * 16)()
    _call(driver, "cuDeviceGetUuid_v2", identity, handle)
    total = ctypes.c_size_t()
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(total), handle)
    peers = []
    for ordinal, peer_handle in enumerate(handles):
        has_access = ctypes.c_int()
        if peer_handle is not handle:
            _call(driver, "cuDeviceCanAccessPeer", ctypes.byref(has_access), handle, peer_handle)
        if has_access.value:
            peers.append(ordinal)
    return {
        "name": name.value.decode(errors="replace"),
        "uuid": str(uuid.UUID(bytes=bytes(identity))),
        "memory_bytes": total.value,
        "peers": peers,
        **{key: _attribute(driver, number, handle) for key, number in _ATTRIBUTES.items()},
    }


def _attribute(driver: ctypes.CDLL, number: int, handle: ctypes.c_int) -> int:
    """Return the attribute's value; 0 if the driver is older than the attribute."""
    value = ctypes.c_int()
    code = driver.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(number), handle)
    if code == 1:  # CUDA_ERROR_INVALID_VALUE
        return 0
    if code:
        raise _DriverCallError("cuDeviceGetAttribute", code, _error_text(driver, code))
    return value.value


def _call(driver: ctypes.CDLL, name: str, *arguments: Any) -> None:
    try:
        function = getattr(driver, name)
    except AttributeError:
        raise _DriverCallError(name, 0, "this driver does not have it") from None
    code = function(*arguments)
    if code:
        raise _DriverCallError(name, code, _error_text(driver, code))


def _error_text(driver: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
    described = (text.value or b"unknown error").decode(errors="replace")
    return f"{described} (code {code})"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer(sys.argv[1:])) + "\n")
