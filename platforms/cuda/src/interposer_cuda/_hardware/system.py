"""Detection of GPUs from system files, before any library of NVIDIA is loaded.

Only files are read, so the check costs almost nothing on a machine without such a GPU.

Source: NVIDIA's driver README, chapter "device files"; "CUDA on WSL" user guide.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from interposer import Verdict
from interposer_ops.devices.system_files import (
    is_in_container,
    list_folder,
    pci_devices,
    read_text,
)

ROOT = Path("/")
# nvhost-gpu and nvgpu are the integrated GPUs of Jetson boards.
_NODE = re.compile(r"nvidia\d+|nvhost-gpu|nvgpu")
_VERSION = re.compile(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)")
_VENDOR = "0x10de"
_DISPLAY = "0x03"  # classes of PCI: display controllers


@dataclass(frozen=True, slots=True)
class System:
    """NVIDIA GPUs and the driver, read from system files.

    Attributes:
        root: folder that contains ``dev``, ``proc`` and ``sys``.
        nodes: device files of GPUs.
        driver: version of the kernel module; empty if the module is not loaded.
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
        """Accept if NVIDIA's libraries may find a GPU; otherwise name the missing part."""
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
        """Return the names or paths to try, in order, to load the library ``name``.

        In WSL, the libraries of the Windows driver come first: a Linux driver installed inside WSL
        finds no GPU.
        """
        windows_library = str(self.root / "usr/lib/wsl/lib" / name)
        return (windows_library, name) if self.wsl else (name,)


def read_system(root: Path = ROOT) -> System:
    """Read the system's GPU files below ``root``."""
    if sys.platform != "linux":
        return System(root)
    wsl = "microsoft" in read_text(root / "proc/sys/kernel/osrelease").lower()
    node_names = sorted(
        path.name for path in list_folder(root / "dev") if _NODE.fullmatch(path.name)
    )
    if wsl and (root / "dev/dxg").exists():
        node_names.append("dxg")
    version = _VERSION.search(read_text(root / "proc/driver/nvidia/version"))
    return System(
        root,
        tuple(f"/dev/{name}" for name in node_names),
        version[1] if version else "",
        tuple(path.name for path in pci_devices(root, _VENDOR, [_DISPLAY])),
        wsl,
        is_in_container(root),
    )
