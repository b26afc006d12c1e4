"""The capability of a device, from its architecture and its driver."""

from __future__ import annotations

from interposer import Capability
from interposer_rocm._hardware.architectures import GfxVersion, architecture_of
from interposer_rocm._hardware.topology import GPU

# Classes of bandwidth, in GB/s; a device has those that it reaches.
_CLASSES = {"250g": 250, "500g": 500, "1t": 1000, "2t": 2000, "4t": 4000, "7t": 7000}
_FP8 = {"float8_e4m3fn": "fp8_ocp", "float8_e4m3fnuz": "fp8_fnuz"}


def fixed_features(version: GfxVersion) -> frozenset[str]:
    """Return the features that an architecture alone decides.

    ``fp8_ocp`` and ``fp8_fnuz`` say which 8-bit floats the hardware multiplies, so that a kernel
    which assumes one of them can require it.
    """
    known = architecture_of(version)
    floats = {feature for name, feature in _FP8.items() if name in known.formats}
    return known.features | floats


def bandwidth_bytes_per_s(gpu: GPU) -> float:
    """Return what the memory can transfer; 0 where its clock or kind is not known."""
    clock, transfers = gpu.memory_mhz * 1e6, architecture_of(gpu.version).transfers
    return clock * transfers * gpu.memory_bits / 8


def bandwidth_features(bytes_per_s: float) -> frozenset[str]:
    """Return the classes that a bandwidth of memory reaches."""
    reached = {name for name, least in _CLASSES.items() if bytes_per_s >= least * 1e9}
    return frozenset(f"bandwidth_{name}" for name in reached)


def capability_of(gpu: GPU, visible: frozenset[int] = frozenset()) -> Capability:
    """Return the capability of a GPU; ``visible`` are the nodes that this process sees.

    Its architecture is the one that the runtime presents.
    """
    known = architecture_of(gpu.version)
    features = fixed_features(gpu.version) | bandwidth_features(bandwidth_bytes_per_s(gpu))
    reached = visible & {*gpu.peers}
    told = {"p2p": bool(reached), "xgmi": bool(reached) and gpu.xgmi}
    features |= {feature for feature, there in told.items() if there}
    caches = {"l2": gpu.l2_bytes, "lds": gpu.lds_bytes}
    return Capability(
        str(gpu.version),
        features,
        known.formats,
        max(gpu.units, 1),
        gpu.memory_bytes,
        {name: size for name, size in caches.items() if size},
    )
