"""Query of Level Zero for its devices, for a child process.

A child process, because ``zeInit`` loads the driver, starts threads and opens devices, and forks of
a process that called ``zeInit`` cannot use the devices. The query creates no context, and leaves
ZE_AFFINITY_MASK and ZE_FLAT_DEVICE_HIERARCHY to the driver.

Source: oneAPI Level Zero specification 1.11, core API: structures, their numbers (``stype``) and
the extensions "device memory properties", "device IP version".
"""

from __future__ import annotations

import ctypes
import uuid
from ctypes import c_char, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interposer_ops.devices.driver_inquiry import DriverLibrary

_GPU_ONLY = 1
_INTEGRATED = 1
_FLOAT64 = 2
_KIND_GPU = 1
_BYTES_PER_NANOSECOND = 0


def _structure(stype: int, **fields: Any) -> Any:
    """Define a structure type of Level Zero, headed by a type number and an extension pointer."""
    header = (("stype", c_uint32), ("next", c_void_p))
    members = {"_fields_": (*header, *fields.items()), "number": stype}
    return type(f"Structure{stype:x}", (ctypes.Structure,), members)


def _numbers(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), c_uint32)


_Driver = _structure(0x1, uuid=c_uint8 * 16, version=c_uint32)
_Ip = _structure(0x1000F, version=c_uint32)
_Device = _structure(
    0x3,
    **_numbers("kind vendor device flags part clock_mhz"),
    largest_allocation=c_uint64,
    **_numbers("contexts priorities threads_per_engine lanes"),
    **_numbers("engines_per_core cores_per_slice slices"),
    timer=c_uint64,
    **_numbers("timer_bits kernel_timer_bits"),
    uuid=c_uint8 * 16,
    name=c_char * 256,
)
_Compute = _structure(
    0x4,
    group=c_uint32,
    **dict.fromkeys(("group_sizes", "group_counts"), c_uint32 * 3),
    **_numbers("shared_bytes num_sub_group_sizes"),
    sub_group_sizes=c_uint32 * 8,
)
_Module = _structure(
    0x5,
    **_numbers("spirv flags"),
    float_flags=c_uint32 * 3,
    **_numbers("arguments printf"),
    native=c_uint8 * 16,
)
_MemoryKind = _structure(
    0x1000E,
    kind=c_uint32,
    physical_bytes=c_uint64,
    **_numbers("read_bandwidth write_bandwidth unit"),
)
_Memory = _structure(
    0x7, **_numbers("flags clock_mhz bus_bits"), total_bytes=c_uint64, name=c_char * 256
)
_Cache = _structure(0x9, flags=c_uint32, bytes=c_size_t)


def query(loader: DriverLibrary) -> dict[str, Any]:
    """Query Level Zero; return ``{"driver": text, "devices": [...]}``."""
    loader.call("zeInit", _GPU_ONLY)
    versions, devices = [], []
    for driver in _read_handles(loader, "zeDriverGet"):
        properties = loader.read(_new(_Driver), "zeDriverGetProperties", driver, ...)
        devices_of_driver = [
            _device(loader, handle) for handle in _read_handles(loader, "zeDeviceGet", driver)
        ]
        gpus = [device for device in devices_of_driver if device.pop("kind") == _KIND_GPU]
        if gpus:
            versions.append(_version(properties.version))
        devices += gpus
    return {"driver": ", ".join(dict.fromkeys(versions)), "devices": devices}


def error_text(_: ctypes.CDLL, code: int) -> str:
    """Return a text for an error code; Level Zero itself has none before a driver is loaded."""
    return f"error {code:#x}"


def _version(number: int) -> str:
    """Format a driver version such as ``"1.6.33578"``, packed in 8, 8 and 16 bits."""
    return f"{number >> 24}.{number >> 16 & 0xFF}.{number & 0xFFFF}"


def _device(loader: DriverLibrary, handle: c_void_p) -> dict[str, Any]:
    ip = _new(_Ip)
    device = loader.read(_new(_Device, ip), "zeDeviceGetProperties", handle, ...)
    compute = loader.read(_new(_Compute), "zeDeviceGetComputeProperties", handle, ...)
    module = loader.read(_new(_Module), "zeDeviceGetModuleProperties", handle, ...)
    caches = _read_structures(loader, "zeDeviceGetCacheProperties", handle, _Cache)
    memories = _read_structures(
        loader, "zeDeviceGetMemoryProperties", handle, _Memory, extension_type=_MemoryKind
    )
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
        "cache_bytes": max((cache.bytes for cache, _ in caches), default=0),
        "sub_group_sizes": list(compute.sub_group_sizes[: compute.num_sub_group_sizes]),
        "float64": bool(module.flags & _FLOAT64),
    }


def _bandwidth(kind: Any) -> int:
    """Return the read bandwidth in bytes per second; 0 if the driver does not report it."""
    is_known = kind.physical_bytes and kind.unit == _BYTES_PER_NANOSECOND
    return int(kind.read_bandwidth) * 10**9 if is_known else 0


# Level Zero's list functions are called twice: without an array for the count, then with one.
def _read_handles(loader: DriverLibrary, name: str, *driver: c_void_p) -> list[c_void_p]:
    count = loader.read(c_uint32(), name, *driver, ..., None)
    handles = (c_void_p * count.value)()
    loader.call(name, *driver, ctypes.byref(count), handles)
    return [c_void_p(handle) for handle in handles[: count.value]]


def _read_structures(
    loader: DriverLibrary, name: str, handle: c_void_p, kind: Any, *, extension_type: Any = None
) -> list[tuple[Any, Any]]:
    """Read all structures that a Level Zero function lists, each with its extension or None."""
    count = loader.read(c_uint32(), name, handle, ..., None)
    extensions = [extension_type and _new(extension_type) for _ in range(count.value)]
    entries = (kind * count.value)(*(_new(kind, extension) for extension in extensions))
    loader.call(name, handle, ctypes.byref(count), entries)
    return list(zip(entries, extensions, strict=True))


def _new(kind: Any, extension: Any = None) -> Any:
    """Create a structure; with an extension, the driver fills both."""
    return kind(stype=kind.number, next=extension and ctypes.addressof(extension))
