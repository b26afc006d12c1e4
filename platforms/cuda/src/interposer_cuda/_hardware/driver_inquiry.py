"""A program that asks CUDA's driver for its devices and prints the answer as JSON.

    python -I -S driver_inquiry.py LIBRARY...

It runs in a process of its own, because ``cuInit`` cannot be undone: a process that called it can
no longer be forked into ones that use CUDA. It creates no context. It uses the standard library
alone, and applies CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER by leaving them to the driver.

Source: NVIDIA's CUDA driver API reference: signatures and the numbers of ``CUdevice_attribute``.
"""

from __future__ import annotations

import ctypes
import json
import sys
import uuid
from typing import Any

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


class _Failed(Exception):
    def __init__(self, call: str, code: int, text: str) -> None:
        self.facts = {"call": call, "code": code, "text": text}
        super().__init__(text)


def answer(libraries: list[str]) -> dict[str, Any]:
    """Return ``{"cuda": [major, minor], "devices": [...]}``, or ``{"call", "code", "text"}``."""
    try:
        return _asked(_loaded(libraries))
    except _Failed as failure:
        return failure.facts


def _loaded(libraries: list[str]) -> ctypes.CDLL:
    failures = []
    for library in libraries:
        try:
            return ctypes.CDLL(library)
        except OSError as error:
            failures.append(str(error))
    raise _Failed("", 0, "; ".join(failures))


def _asked(driver: ctypes.CDLL) -> dict[str, Any]:
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
    for ordinal, other in enumerate(handles):
        reaches = ctypes.c_int()
        if other is not handle:
            _call(driver, "cuDeviceCanAccessPeer", ctypes.byref(reaches), handle, other)
        if reaches.value:
            peers.append(ordinal)
    return {
        "name": name.value.decode(errors="replace"),
        "uuid": str(uuid.UUID(bytes=bytes(identity))),
        "memory_bytes": total.value,
        "peers": peers,
        **{key: _attribute(driver, number, handle) for key, number in _ATTRIBUTES.items()},
    }


def _attribute(driver: ctypes.CDLL, number: int, handle: ctypes.c_int) -> int:
    """Return the value; 0 where the driver is older than the attribute."""
    value = ctypes.c_int()
    code = driver.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(number), handle)
    if code == 1:  # CUDA_ERROR_INVALID_VALUE
        return 0
    if code:
        raise _Failed("cuDeviceGetAttribute", code, _described(driver, code))
    return value.value


def _call(driver: ctypes.CDLL, name: str, *arguments: Any) -> None:
    try:
        function = getattr(driver, name)
    except AttributeError:
        raise _Failed(name, 0, "this driver does not have it") from None
    code = function(*arguments)
    if code:
        raise _Failed(name, code, _described(driver, code))


def _described(driver: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
    return (text.value or b"unknown error").decode(errors="replace")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer(sys.argv[1:])) + "\n")
