"""GPUs of this machine, read from the kernel driver's topology files without any library.

The compute part of amdgpu (KFD) lists CPUs and GPUs as nodes, in the order of ROCr's numbers. The
properties of a GPU that this process may not use, for example in a container, cannot be read.

Source: the kernel's drivers/gpu/drm/amd/amdkfd/kfd_topology.c (names of the properties; heap
types 1 and 2 are memory of the GPU; links of type 11 are xGMI); libdrm's data/amdgpu.ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from interposer import Capability
from interposer_ops.devices.architecture import capability
from interposer_ops.devices.system_files import list_folder, read_text
from interposer_rocm._hardware.architectures import GfxVersion, architecture_of

_NODES = Path("sys/class/kfd/kfd/topology/nodes")
_GPU_HEAPS = {1, 2}
_XGMI = 11


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU, or one partition of a GPU that counts as a device.

    Attributes:
        node: node number in the topology.
        version: graphics core version that the driver reports.
        unique_id: 16 hexadecimal digits; empty if the GPU has none.
        units: number of compute units.
        memory_mhz, memory_bits: memory clock and bus width; 0 if not reported.
        l2_bytes: total size of the second-level caches.
        lds_bytes: local memory (LDS) of one workgroup.
        wave_lanes: wavefront size of the hardware.
        engine_mhz: highest engine clock.
        render_node: number of the device file, such as 128 for ``/dev/dri/renderD128``.
        peers: nodes of the GPUs whose memory this GPU can access.
        xgmi: at least one link to a peer is xGMI.
    """

    node: int
    version: GfxVersion
    name: str
    unique_id: str
    units: int
    memory_bytes: int
    memory_mhz: int
    memory_bits: int
    l2_bytes: int
    lds_bytes: int
    wave_lanes: int
    engine_mhz: int
    render_node: int
    peers: tuple[int, ...]
    xgmi: bool


@dataclass(frozen=True, slots=True)
class Topology:
    """All readable GPUs, sorted by node.

    Attributes:
        unreadable: number of nodes that this process may not read.
    """

    gpus: tuple[GPU, ...]
    unreadable: int = 0


def read_topology(root: Path) -> Topology:
    """Read the GPUs from the kernel driver's files in ``sys`` below ``root``."""
    gpus: list[GPU] = []
    unreadable = 0
    nodes = {int(path.name): path for path in list_folder(root / _NODES) if path.name.isdecimal()}
    gpu_nodes: dict[int, Mapping[str, int]] = {}
    for number, folder in sorted(nodes.items()):
        properties = _read_properties(folder / "properties")
        if properties is None:
            unreadable += 1
        # CPU nodes have no SIMD units.
        elif properties.get("simd_count") and properties.get("gfx_target_version"):
            gpu_nodes[number] = properties
    for number, properties in gpu_nodes.items():
        with suppress(ValueError):  # not a valid graphics core version
            gpus.append(_gpu(root, number, properties, gpu_nodes))
    return Topology(tuple(gpus), unreadable)


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


def _gpu(root: Path, number: int, properties: Mapping[str, int], gpu_nodes: Iterable[int]) -> GPU:
    folder = root / _NODES / str(number)
    version = GfxVersion.of_number(properties["gfx_target_version"])
    banks = [
        bank for bank in _read_parts(folder / "mem_banks") if bank.get("heap_type") in _GPU_HEAPS
    ]
    caches = _read_parts(folder / "caches")
    # Links to CPU nodes and to the GPU's own node say nothing about peer access.
    links = [
        link
        for link in [*_read_parts(folder / "io_links"), *_read_parts(folder / "p2p_links")]
        if link.get("node_to", number) in {*gpu_nodes} - {number}
    ]
    unique, render = properties.get("unique_id", 0), properties.get("drm_render_minor", 0)
    lds = properties.get("lds_size_in_kb", 0) * 1024
    return GPU(
        node=number,
        version=version,
        name=_name(root, render, properties.get("device_id", 0)) or f"AMD {version}",
        unique_id=f"{unique:016x}" if unique else "",
        units=properties["simd_count"] // max(properties.get("simd_per_cu", 1), 1),
        memory_bytes=sum(bank.get("size_in_bytes", 0) for bank in banks),
        memory_mhz=max((bank.get("mem_clk_max", 0) for bank in banks), default=0),
        memory_bits=max((bank.get("width", 0) for bank in banks), default=0),
        l2_bytes=sum(cache.get("size", 0) * 1024 for cache in caches if cache.get("level") == 2),
        # The table is the fallback if the driver does not report the size.
        lds_bytes=lds or architecture_of(version).shared_bytes,
        wave_lanes=properties.get("wave_front_size", 0),
        engine_mhz=properties.get("max_engine_clk_fcompute", 0),
        render_node=render,
        peers=tuple(sorted({link["node_to"] for link in links})),
        xgmi=any(link.get("type") == _XGMI for link in links),
    )


def _name(root: Path, render: int, device_id: int) -> str:
    """Return the product name from the driver or libdrm's table; "" if both lack the GPU."""
    device = root / f"sys/class/drm/renderD{render}/device"
    product_name = read_text(device / "product_name").strip()
    if product_name:
        return product_name
    revision = read_text(device / "revision").strip().removeprefix("0x").upper()
    for line in read_text(root / "usr/share/libdrm/amdgpu.ids").splitlines():
        cells = [cell.strip() for cell in line.split(",", 2)]
        if len(cells) == 3 and cells[:2] == [f"{device_id:04X}", revision]:
            return cells[2]
    return ""


def _read_parts(folder: Path) -> list[Mapping[str, int]]:
    properties_of_parts = [
        _read_properties(path / "properties") for path in sorted(list_folder(folder))
    ]
    return [properties for properties in properties_of_parts if properties]


def _read_properties(path: Path) -> Mapping[str, int] | None:
    """Parse a file of lines "name integer"; None if the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    values = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        with suppress(ValueError):
            values[name] = int(value, 0)
    return values
