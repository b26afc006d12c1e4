"""Detection of AMD GPUs from system files, before any library is loaded.

Source: AMD's ROCm installation guide, chapters "prerequisites" (groups render and video) and
"containers" (``--device=/dev/kfd --device=/dev/dri``).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from interposer import Verdict
from interposer_ops.devices.system_files import list_folder, pci_devices, read_text
from interposer_rocm._hardware.topology import Topology, read_topology

ROOT = Path("/")
_VENDOR = "0x1002"
# Classes of PCI: display controllers, and processing accelerators.
_CLASSES = ("0x03", "0x12")


@dataclass(frozen=True, slots=True)
class System:
    """AMD GPUs and the driver, read from system files.

    Attributes:
        topology: the GPUs that the driver shows to this process.
        device_file: ``/dev/kfd`` exists.
        allowed: this process may open ``/dev/kfd``.
        render_files: numbers of the files ``/dev/dri/renderD*``.
        driver: version of amdgpu, or of the kernel if amdgpu is built in; empty if not loaded.
        on_bus: addresses of GPUs on the PCI bus.
        wsl: Linux runs inside Windows.
    """

    topology: Topology
    device_file: bool = False
    allowed: bool = False
    render_files: frozenset[int] = frozenset()
    driver: str = ""
    on_bus: tuple[str, ...] = ()
    wsl: bool = False

    def judge(self) -> Verdict:
        """Accept if the driver shows a GPU to this process; otherwise name the missing part."""
        if self.device_file:
            return self._judge_files()
        if self.wsl:
            return Verdict.refuse(
                "this is WSL, where /dev/kfd and its list of GPUs do not exist. Run Linux itself"
            )
        if self.driver and self.on_bus:
            return Verdict.refuse(
                f"amdgpu {self.driver} drives a GPU ({', '.join(self.on_bus)}), but /dev/kfd is "
                "missing. In a container: --device=/dev/kfd --device=/dev/dri. Elsewhere this "
                "kernel was built without HSA_AMD"
            )
        if self.on_bus:
            return Verdict.refuse(
                f"a GPU of AMD is on the PCI bus ({', '.join(self.on_bus)}), but no driver for it "
                "is loaded. Load it: modprobe amdgpu"
            )
        return Verdict.refuse("no GPU of AMD: no /dev/kfd and none on the bus")

    def _judge_files(self) -> Verdict:
        if not self.allowed:
            return Verdict.refuse(
                "/dev/kfd exists, but this user may not open it. Add the user to its group: "
                "usermod -a -G render,video USER; then log in again"
            )
        if not self.topology.gpus:
            unreadable = self.topology.unreadable
            note = f"; {unreadable} nodes cannot be read, as of GPUs that a container was not given"
            return Verdict.refuse(
                f"/dev/kfd exists, but the driver shows no GPU{note if unreadable else ''}"
            )
        missing = [g for g in self.topology.gpus if g.render_node not in self.render_files]
        if len(missing) == len(self.topology.gpus):
            names = ", ".join(f"/dev/dri/renderD{gpu.render_node}" for gpu in missing)
            return Verdict.refuse(
                f"/dev/kfd exists, but not {names}, through which GPUs get their memory. In a "
                "container: --device=/dev/dri"
            )
        return Verdict.accept()


def read_system(root: Path = ROOT) -> System:
    """Read the system's GPU files below ``root``."""
    if sys.platform != "linux":
        return System(Topology(()))
    kfd = root / "dev/kfd"
    release = read_text(root / "proc/sys/kernel/osrelease").strip()
    render_numbers = (path.name.removeprefix("renderD") for path in list_folder(root / "dev/dri"))
    return System(
        read_topology(root),
        kfd.exists(),
        os.access(kfd, os.R_OK | os.W_OK),
        frozenset(int(number) for number in render_numbers if number.isdecimal()),
        _driver_version(root, release),
        tuple(path.name for path in pci_devices(root, _VENDOR, _CLASSES)),
        "microsoft" in release.lower(),
    )


def _driver_version(root: Path, release: str) -> str:
    module = root / "sys/module/amdgpu"
    if not module.exists():
        return ""
    return read_text(module / "version").strip() or (f"of Linux {release}" if release else "loaded")
