"""The GPUs of this machine, read from files of the kernel driver without any library.

amdgpu's part for computing (KFD) shows a graph of nodes, which are processors and GPUs, in the
order in which the vendor's runtime numbers them. A process that may not use a GPU, as in a
container, cannot read its properties.

Source: the kernel's drivers/gpu/drm/amd/amdkfd/kfd_topology.c (names of the properties; heap
types 1 and 2 are memory of the GPU; links of type 11 are xGMI); libdrm's data/amdgpu.ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from interposer_rocm._hardware.architectures import GfxVersion, architecture_of

_NODES = Path("sys/class/kfd/kfd/topology/nodes")
_GPU_HEAPS = {1, 2}
_XGMI = 11


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU, or the part of one that counts as a device of its own.

    Attributes:
        node: its number in the graph.
        version: of the graphics core, as the driver says it.
        unique_id: 16 hexadecimal digits; empty where it has none.
        units: compute units.
        memory_mhz, memory_bits: of its memory, 0 where they are not told.
        l2_bytes: of all its second-level caches.
        lds_bytes: the local memory of one workgroup.
        wave_lanes: lanes of a wave of the hardware.
        engine_mhz: the highest clock.
        render_node: of the device file, such as 128 of ``/dev/dri/renderD128``.
        peers: nodes of the GPUs whose memory it reaches.
        xgmi: links to some of them are xGMI.
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
    """All GPUs that could be read, in the order of their nodes.

    Attributes:
        unreadable: how many nodes this process may not read.
    """

    gpus: tuple[GPU, ...]
    unreadable: int = 0


def read_topology(root: Path) -> Topology:
    """Return the GPUs below ``root``, in which ``sys`` lies."""
    found: list[GPU] = []
    unreadable = 0
    nodes = {int(path.name): path for path in _folders(root / _NODES) if path.name.isdecimal()}
    gpu_nodes: dict[int, Mapping[str, int]] = {}
    for number, folder in sorted(nodes.items()):
        properties = _properties(folder / "properties")
        if properties is None:
            unreadable += 1
        elif properties.get("simd_count") and properties.get("gfx_target_version"):
            gpu_nodes[number] = properties
    for number, properties in gpu_nodes.items():
        with suppress(ValueError):  # a version that means nothing
            found.append(_gpu(root, number, properties, gpu_nodes))
    return Topology(tuple(found), unreadable)


def _gpu(root: Path, number: int, properties: Mapping[str, int], others: Iterable[int]) -> GPU:
    folder = root / _NODES / str(number)
    version = GfxVersion.of_number(properties["gfx_target_version"])
    banks = [bank for bank in _parts(folder / "mem_banks") if bank.get("heap_type") in _GPU_HEAPS]
    caches = _parts(folder / "caches")
    links = [
        link
        for link in [*_parts(folder / "io_links"), *_parts(folder / "p2p_links")]
        if link.get("node_to", number) in {*others} - {number}
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
        lds_bytes=lds or architecture_of(version).lds_bytes,
        wave_lanes=properties.get("wave_front_size", 0),
        engine_mhz=properties.get("max_engine_clk_fcompute", 0),
        render_node=render,
        peers=tuple(sorted({link["node_to"] for link in links})),
        xgmi=any(link.get("type") == _XGMI for link in links),
    )


def _name(root: Path, render: int, device_id: int) -> str:
    """Return what the product is called, from the driver or from libdrm's table; else nothing."""
    device = root / f"sys/class/drm/renderD{render}/device"
    told = _text(device / "product_name").strip()
    if told:
        return told
    revision = _text(device / "revision").strip().removeprefix("0x").upper()
    for line in _text(root / "usr/share/libdrm/amdgpu.ids").splitlines():
        cells = [cell.strip() for cell in line.split(",", 2)]
        if len(cells) == 3 and cells[:2] == [f"{device_id:04X}", revision]:
            return cells[2]
    return ""


def _parts(folder: Path) -> list[Mapping[str, int]]:
    read = [_properties(path / "properties") for path in sorted(_folders(folder))]
    return [properties for properties in read if properties]


def _properties(path: Path) -> Mapping[str, int] | None:
    """Return lines of a name and a whole number each; None where the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        with suppress(ValueError):
            found[name] = int(value, 0)
    return found


def _folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
