"""Capability of a GPU, from its architecture and the driver's topology files."""

from __future__ import annotations

from interposer import Capability
from interposer_rocm._hardware.architectures import GfxVersion, architecture_of
from interposer_rocm._hardware.topology import GPU

# Bandwidth features by threshold in GB/s; a device has the feature of every threshold that its
# bandwidth reaches.
_BANDWIDTH_CLASSES = {"250g": 250, "500g": 500, "1t": 1000, "2t": 2000, "4t": 4000, "7t": 7000}
_FP8_FEATURES = {"float8_e4m3fn": "fp8_ocp", "float8_e4m3fnuz": "fp8_fnuz"}


def fixed_features(version: GfxVersion) -> frozenset[str]:
    """Return the features that follow from an architecture alone.

    ``fp8_ocp`` and ``fp8_fnuz`` name the 8-bit float format that the hardware multiplies; a kernel
    for one format requires the feature.
    """
    architecture = architecture_of(version)
    fp8_features = {
        feature for name, feature in _FP8_FEATURES.items() if name in architecture.formats
    }
    return architecture.features | fp8_features


def bandwidth_bytes_per_s(gpu: GPU) -> float:
    """Return the peak memory bandwidth; 0 if the memory's clock or type is unknown."""
    clock, transfers = gpu.memory_mhz * 1e6, architecture_of(gpu.version).transfers
    return clock * transfers * gpu.memory_bits / 8


def bandwidth_features(bytes_per_s: float) -> frozenset[str]:
    """Return the bandwidth features that a memory bandwidth reaches."""
    classes = {
        name
        for name, gigabytes_per_s in _BANDWIDTH_CLASSES.items()
        if bytes_per_s >= gigabytes_per_s * 1e9
    }
    return frozenset(f"bandwidth_{name}" for name in classes)


def capability_of(gpu: GPU, visible: frozenset[int] = frozenset()) -> Capability:
    """Return the capability of a GPU; ``visible`` has the nodes of the GPUs that HIP shows.

    The architecture is the one that HIP presents, after HSA_OVERRIDE_GFX_VERSION.
    """
    architecture = architecture_of(gpu.version)
    features = fixed_features(gpu.version) | bandwidth_features(bandwidth_bytes_per_s(gpu))
    reachable = visible & {*gpu.peers}
    is_present_by_feature = {"p2p": bool(reachable), "xgmi": bool(reachable) and gpu.xgmi}
    features |= {feature for feature, is_present in is_present_by_feature.items() if is_present}
    caches = {"l2": gpu.l2_bytes, "lds": gpu.lds_bytes}
    return Capability(
        str(gpu.version),
        features,
        architecture.formats,
        max(gpu.units, 1),
        gpu.memory_bytes,
        {name: size for name, size in caches.items() if size},
    )
