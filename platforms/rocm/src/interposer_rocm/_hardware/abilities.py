"""Capability of a GPU, from its architecture and the driver's topology files."""

from __future__ import annotations

from interposer import Capability
from interposer_ops.devices.architecture import capability
from interposer_rocm._hardware.architectures import architecture_of
from interposer_rocm._hardware.topology import GPU


def bandwidth_bytes_per_s(gpu: GPU) -> float:
    """Return the peak memory bandwidth; 0 if the memory's clock or type is unknown."""
    clock, transfers = gpu.memory_mhz * 1e6, architecture_of(gpu.version).transfers
    return clock * transfers * gpu.memory_bits / 8


def capability_of(gpu: GPU, visible: frozenset[int] = frozenset()) -> Capability:
    """Return the capability of a GPU; ``visible`` has the nodes of the GPUs that HIP shows.

    The architecture is the one that HIP presents, after HSA_OVERRIDE_GFX_VERSION.
    """
    is_connected = bool(visible & {*gpu.peers})
    caches = {"l2": gpu.l2_bytes, "lds": gpu.lds_bytes}
    return capability(
        str(gpu.version),
        architecture_of(gpu.version),
        has_feature={"p2p": is_connected, "xgmi": is_connected and gpu.xgmi},
        bandwidth_bytes_per_s=bandwidth_bytes_per_s(gpu),
        units=gpu.units,
        memory_bytes=gpu.memory_bytes,
        caches_bytes={name: size for name, size in caches.items() if size},
    )
