"""Program that queries Level Zero for its devices and prints the answer as JSON.

    python -I -S level_zero_inquiry.py LIBRARY

The program runs in a child process: ``zeInit`` loads the driver, starts threads and opens devices,
and forks of a process that called ``zeInit`` cannot use the devices. The program creates no
context, needs the standard library only, and leaves ZE_AFFINITY_MASK and ZE_FLAT_DEVICE_HIERARCHY
to the driver.

Source: oneAPI Level Zero specification 1.11, core API: structures, their numbers (``stype``) and
the extensions "device memory properties", "device IP version".
"""

from __future__ import annotations

import ctypes
import json
import sys
import uuid
from ctypes import c_char, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any

_GPU_ONLY = 1
_INTEGRATED = 1
_KIND_GPU = 1
_BYTES_PER_NANOSECOND = 0


class _DriverCallError(Exception):
    def __init__(self, call: str, code: int, text: str) -> None:
        self.facts = {"call": call, "code": code, "text": text}
        super().__init__(text)


class _Driver(ctypes.Structure):
    _fields_ = (
        ("stype", c_uint32),
        ("next", c_void_p),
        ("uuid", c_uint8 * 16),
        ("version", c_uint32),
    )


class _Ip(ctypes.Structure):
    _fields_ = (("stype", c_uint32), ("next", c_void_p), ("version", c_uint32))


class _Device(ctypes.Structure):
    _fields_ = (
        ("stype", c_uint32),
        ("next", c_void_p),
        ("kind", c_uint32),
        ("vendor", c_uint32),
        ("device", c_uint32),
        ("flags", c_uint32),
        ("part", c_uint32),
        ("clock_mhz", c_uint32),
        ("largest_allocation", c_uint64),
        ("contexts", c_uint32),
        ("priorities", c_uint32),
        ("threads_per_engine", c_uint32),
        ("lanes", c_uint32),
        ("engines_per_core", c_uint32),
        ("cores_per_slice", c_uint32),
        ("slices", c_uint32),
        ("timer", c_uint64),
        ("timer_bits", c_uint32),
        ("kernel_timer_bits", c_uint32),
        ("uuid", c_uint8 * 16),
        ("name", c_char * 256),
    )


class _Compute(ctypes.Structure):
    _fields_ = (
        ("stype", c_uint32),
        ("next", c_void_p),
        ("group", c_uint32),
        ("group_sizes", c_uint32 * 3),
        ("group_counts", c_uint32 * 3),
        ("shared_bytes", c_uint32),
        ("num_sub_group_sizes", c_uint32),
        ("sub_group_sizes", c_uint32 * 8),
    )


class _Module(ctypes.Structure):
    _fields_ = (
        ("stype", c_uint32),
        ("next", c_void_p),
        ("spirv", c_uint32),
        ("flags", c_uint32),
        ("float_flags", c_uint32 * 3),
        ("arguments", c_uint32),
        ("printf", c_uint32),
        ("native", c_uint8 * 16),
    )


class _MemoryKind(ctypes.Structure):
    _fields_ = (
        ("stype", c_uint32),
        ("next", c_void_p),
        ("kind", c_uint32),
        ("physical_bytes", c_uint64),
        ("read_bandwidth", c_uint32),
        ("write_bandwidth", c_uint32),
        ("unit", c_uint32),
    )


class _Memory(ctypes.Structure):
    _fields_ = (
        ("stype", c_uint32),
        ("next", c_void_p),
        ("flags", c_uint32),
        ("clock_mhz", c_uint32),
        ("bus_bits", c_uint32),
        ("total_bytes", c_uint64),
        ("name", c_char * 256),
    )


class _Cache(ctypes.Structure):
    _fields_ = (
        ("stype", c_uint32),
        ("next", c_void_p),
        ("flags", c_uint32),
        ("bytes", c_size_t),
    )


_STYPES: dict[type[ctypes.Structure], int] = {
    _Driver: 0x1,
    _Device: 0x3,
    _Compute: 0x4,
    _Module: 0x5,
    _Memory: 0x7,
    _Cache: 0x9,
    _MemoryKind: 0x1000E,
    _Ip: 0x1000F,
}


def answer(library: str) -> dict[str, Any]:
    """Query Level Zero.

    Returns: ``{"driver": text, "devices": [...]}``, or ``{"call", "code", "text"}`` of the failed
        call.
    """
    try:
        return _query(ctypes.CDLL(library))
    except OSError as error:
        return {"call": "", "code": 0, "text": str(error)}
    except _DriverCallError as failure:
        return failure.facts


def _query(loader: ctypes.CDLL) -> dict[str, Any]:
    _call(loader, "zeInit", c_uint32(_GPU_ONLY))
    versions, devices = [], []
    for driver in _read_handles(loader, "zeDriverGet"):
        properties = _new_structure(_Driver)
        _call(loader, "zeDriverGetProperties", driver, ctypes.byref(properties))
        devices_of_driver = [
            _device(loader, handle) for handle in _read_handles(loader, "zeDeviceGet", driver)
        ]
        gpus = [device for device in devices_of_driver if device.pop("kind") == _KIND_GPU]
        if gpus:
            versions.append(_version(properties.version))
        devices += gpus
    return {"driver": ", ".join(dict.fromkeys(versions)), "devices": devices}


def _version(number: int) -> str:
    """Format a driver version such as ``"1.6.33578"``, packed in 8, 8 and 16 bits."""
    return f"{number >> 24}.{number >> 16 & 0xFF}.{number & 0xFFFF}"


def _device(loader: ctypes.CDLL, handle: c_void_p) -> dict[str, Any]:
    ip = _new_structure(_Ip)
    device = _new_structure(_Device)
    # The driver fills structures that are chained through "next".
    device.next = ctypes.cast(ctypes.byref(ip), c_void_p).value
    _call(loader, "zeDeviceGetProperties", handle, ctypes.byref(device))
    compute, module = _new_structure(_Compute), _new_structure(_Module)
    _call(loader, "zeDeviceGetComputeProperties", handle, ctypes.byref(compute))
    _call(loader, "zeDeviceGetModuleProperties", handle, ctypes.byref(module))
    caches = _read_list(loader, "zeDeviceGetCacheProperties", handle, _Cache)
    memories = _memories(loader, handle)
    return {
        "kind": device.kind,
        "name": device.name.decode(errors="replace"),
        "uuid": str(uuid.UUID(bytes=bytes(device.uuid))),
        "device_id": device.device,
        "ip_version": ip.version,
        "integrated": bool(device.flags & _INTEGRATED),
        "xe_cores": device.slices * device.cores_per_slice,
        "vector_engines": device.slices * device.cores_per_slice * device.engines_per_core,
        "memory_bytes": sum(memory.total_bytes for memory, _ in memories),
        "bandwidth_bytes_per_s": max((_bandwidth(kind) for _, kind in memories), default=0),
        "shared_bytes": compute.shared_bytes,
        "cache_bytes": max((cache.bytes for cache in caches), default=0),
        "sub_group_sizes": list(compute.sub_group_sizes[: compute.num_sub_group_sizes]),
        # ZE_DEVICE_MODULE_FLAG_FP64
        "float64": bool(module.flags & 2),
    }


def _memories(loader: ctypes.CDLL, handle: c_void_p) -> list[tuple[_Memory, _MemoryKind]]:
    count = c_uint32()
    _call(loader, "zeDeviceGetMemoryProperties", handle, ctypes.byref(count), None)
    kinds = [_new_structure(_MemoryKind) for _ in range(count.value)]
    memories = (_Memory * count.value)()
    # Each memory structure is chained to an extension structure that receives the bandwidth.
    for memory, kind in zip(memories, kinds, strict=True):
        memory.stype = _STYPES[_Memory]
        memory.next = ctypes.cast(ctypes.byref(kind), c_void_p).value
    _call(loader, "zeDeviceGetMemoryProperties", handle, ctypes.byref(count), memories)
    return list(zip(memories, kinds, strict=True))


def _bandwidth(kind: _MemoryKind) -> int:
    """Return the read bandwidth in bytes per second; 0 if the driver does not report it."""
    is_known = kind.physical_bytes and kind.unit == _BYTES_PER_NANOSECOND
    return int(kind.read_bandwidth) * 10**9 if is_known else 0


def _read_list(loader: ctypes.CDLL, name: str, handle: c_void_p, structure_type: Any) -> Any:
    # Level Zero's list functions are called twice: without an array for the count, then with one.
    count = c_uint32()
    _call(loader, name, handle, ctypes.byref(count), None)
    entries = (structure_type * count.value)()
    for entry in entries:
        entry.stype = _STYPES[structure_type]
    _call(loader, name, handle, ctypes.byref(count), entries)
    return entries


def _read_handles(loader: ctypes.CDLL, name: str, *driver: c_void_p) -> list[c_void_p]:
    count = c_uint32()
    _call(loader, name, *driver, ctypes.byref(count), None)
    handles = (c_void_p * count.value)()
    _call(loader, name, *driver, ctypes.byref(count), handles)
    return [c_void_p(handle) for handle in handles[: count.value]]


def _new_structure(structure_type: Any) -> Any:
    structure = structure_type()
    structure.stype = _STYPES[structure_type]
    return structure


def _call(loader: ctypes.CDLL, name: str, *arguments: Any) -> None:
    try:
        function = getattr(loader, name)
    except AttributeError:
        raise _DriverCallError(name, 0, "this loader does not have it") from None
    function.restype = c_uint32
    code = function(*arguments)
    if code:
        raise _DriverCallError(name, code, f"error {code:#x}")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer(sys.argv[1])) + "\n")
