"""GPUs as the operating system shows them, before any library of their vendor is loaded.

Only files are read, so that a machine without such a GPU pays nothing.

Source: NVIDIA's driver README, chapter "device files"; "CUDA on WSL" user guide.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from interposer import Verdict

ROOT = Path("/")
_NODE = re.compile(r"nvidia\d+|nvhost-gpu|nvgpu")
_VERSION = re.compile(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)")
_VENDOR = "0x10de"
_DISPLAY = "0x03"  # classes of PCI: display controllers


@dataclass(frozen=True, slots=True)
class System:
    """GPUs and their driver, as files show them.

    Attributes:
        root: the folder in which ``dev``, ``proc`` and ``sys`` lie.
        nodes: device files of GPUs.
        driver: version of the kernel's module; empty where it is not loaded.
        on_bus: addresses of GPUs on the PCI bus.
        wsl: Linux runs inside Windows.
        container: this process runs in a container.
    """

    root: Path
    nodes: tuple[str, ...] = ()
    driver: str = ""
    on_bus: tuple[str, ...] = ()
    wsl: bool = False
    container: bool = False

    def judge(self) -> Verdict:
        """Accept where the vendor's libraries may find a GPU; say what is missing elsewhere."""
        if self.nodes:
            return Verdict.accept(", ".join(self.nodes))
        if self.wsl:
            return Verdict.refuse(
                "this is WSL without /dev/dxg, through which Windows shares its GPUs. It needs "
                "WSL 2 and NVIDIA's driver for Windows; none is to be installed in Linux"
            )
        if self.driver and self.container:
            return Verdict.refuse(
                f"NVIDIA's driver {self.driver} is loaded, but this container was given no GPU: "
                "/dev/nvidia0 is missing. Start it with --gpus all, or ask Kubernetes for "
                "nvidia.com/gpu"
            )
        if self.driver:
            return Verdict.refuse(
                f"NVIDIA's driver {self.driver} is loaded, but /dev/nvidia0 is missing. Run "
                "nvidia-modprobe -u -c 0 as root, which makes the device files"
            )
        if self.on_bus:
            return Verdict.refuse(
                f"a GPU of NVIDIA is on the PCI bus ({', '.join(self.on_bus)}), but no driver "
                "for it is loaded. Install NVIDIA's driver, then restart"
            )
        return Verdict.refuse("no GPU of NVIDIA: no device file, no driver and none on the bus")

    def libraries(self, name: str) -> tuple[str, ...]:
        """Return what to try to load ``name`` by, in order.

        Inside WSL the driver's libraries are those of Windows: a Linux driver that was installed
        besides finds no GPU.
        """
        own = str(self.root / "usr/lib/wsl/lib" / name)
        return (own, name) if self.wsl else (name,)


def look(root: Path = ROOT) -> System:
    """Return what the files below ``root`` show."""
    if sys.platform != "linux":
        return System(root)
    wsl = "microsoft" in _text(root / "proc/sys/kernel/osrelease").lower()
    found = sorted(path.name for path in _entries(root / "dev") if _NODE.fullmatch(path.name))
    if wsl and (root / "dev/dxg").exists():
        found.append("dxg")
    version = _VERSION.search(_text(root / "proc/driver/nvidia/version"))
    return System(
        root,
        tuple(f"/dev/{name}" for name in found),
        version[1] if version else "",
        tuple(sorted(_on_bus(root))),
        wsl,
        _in_container(root),
    )


def _on_bus(root: Path) -> list[str]:
    return [
        path.name
        for path in _entries(root / "sys/bus/pci/devices")
        if _text(path / "vendor").strip() == _VENDOR and _text(path / "class").startswith(_DISPLAY)
    ]


def _in_container(root: Path) -> bool:
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return True
    return bool(re.search("docker|kubepods|containerd|lxc", _text(root / "proc/1/cgroup")))


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
