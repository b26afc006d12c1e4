"""System folders of a machine with AMD GPUs, written into a temporary folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Machine", "Node"]


@dataclass
class Node:
    """A GPU in the graph of the driver; the defaults are those of an MI300X."""

    gfx: int = 90402
    simds: int = 1216
    simds_per_unit: int = 4
    lds_kib: int = 64
    wave: int = 64
    unique_id: int = 0
    device_id: int = 0x74A1
    memory_bytes: int = 192 * 2**30
    memory_mhz: int = 1300
    memory_bits: int = 8192
    heap: int = 1
    l2_kib: tuple[int, ...] = (4096,) * 8
    links: dict[int, int] = field(default_factory=dict)
    render: int = 0


@dataclass
class Machine:
    """A root folder; node 0 is the processor, GPUs come behind it."""

    root: Path

    def file(self, path: str, text: str = "") -> Machine:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return self

    def driver(self, version: str = "6.12.12") -> Machine:
        return self.file("sys/module/amdgpu/version", f"{version}\n")

    def on_bus(self, address: str = "0000:05:00.0", kind: str = "0x120000") -> Machine:
        folder = f"sys/bus/pci/devices/{address}"
        return self.file(f"{folder}/vendor", "0x1002\n").file(f"{folder}/class", f"{kind}\n")

    def gpus(self, *nodes: Node, render_files: bool = True) -> Machine:
        self.driver().file("dev/kfd")
        self._properties("0", cpu_cores_count=96, simd_count=0, gfx_target_version=0)
        self._properties("0/mem_banks/0", heap_type=0, size_in_bytes=2**40, mem_clk_max=4800)
        for number, node in enumerate(nodes, 1):
            render = node.render or 127 + number
            self._properties(
                str(number),
                cpu_cores_count=0,
                simd_count=node.simds,
                simd_per_cu=node.simds_per_unit,
                lds_size_in_kb=node.lds_kib,
                wave_front_size=node.wave,
                gfx_target_version=node.gfx,
                vendor_id=0x1002,
                device_id=node.device_id,
                unique_id=node.unique_id,
                drm_render_minor=render,
                max_engine_clk_fcompute=2100,
            )
            self._properties(
                f"{number}/mem_banks/0",
                heap_type=node.heap,
                size_in_bytes=node.memory_bytes,
                flags=0,
                width=node.memory_bits,
                mem_clk_max=node.memory_mhz,
            )
            for place, kib in enumerate(node.l2_kib):
                self._properties(f"{number}/caches/{place}", level=2, size=kib)
            self._properties(f"{number}/caches/{len(node.l2_kib)}", level=1, size=32)
            for place, (other, kind) in enumerate(node.links.items()):
                folder = f"{number}/io_links/{place}"
                self._properties(folder, type=kind, node_from=number, node_to=other)
            if render_files:
                self.file(f"dev/dri/renderD{render}")
        return self

    def _properties(self, folder: str, **values: int) -> None:
        path = f"sys/class/kfd/kfd/topology/nodes/{folder}/properties"
        self.file(path, "".join(f"{name} {value}\n" for name, value in values.items()))
