"""Detection of GPUs from system files, before any library of Intel is loaded.

Only files are read, so the check costs almost nothing on a machine without such a GPU.

Source: the Linux kernel's documentation of the PCI bus in sysfs and of DRM render nodes; the
names of the kernel's drivers for Intel graphics, ``i915`` and ``xe``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
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
_DRIVERS = ("i915", "xe")
_VENDOR = "0x8086"
_DISPLAY = "0x03"  # classes of PCI: display controllers
_NODE = re.compile(r"renderD\d+")


@dataclass(frozen=True, slots=True)
class Display:
    """An Intel display controller on the PCI bus.

    Attributes:
        address: such as ``"0000:03:00.0"``.
        driver: kernel driver bound to the controller; empty if none is.
    """

    address: str
    driver: str = ""

    def __str__(self) -> str:
        return f"{self.address}, {self.driver or 'no driver'}"


@dataclass(frozen=True, slots=True)
class System:
    """Intel GPUs and the driver, read from system files.

    Attributes:
        root: folder that contains ``dev``, ``proc`` and ``sys``.
        nodes: device files of Intel GPUs.
        closed: device files among ``nodes`` that this user may not open.
        displays: Intel display controllers on the PCI bus.
        wsl: Linux runs inside Windows.
        container: this process runs in a container.
    """

    root: Path
    nodes: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    displays: tuple[Display, ...] = ()
    wsl: bool = False
    container: bool = False

    def judge(self) -> Verdict:
        """Accept if Intel's libraries may find a GPU; otherwise name the missing part."""
        # One device file that the user may open is enough.
        if self.nodes and set(self.nodes) == set(self.closed):
            return Verdict.refuse(
                f"this user may not open {', '.join(self.closed)}. Join the group that owns it, "
                "usually render: sudo usermod -aG render $USER, then log in anew"
            )
        if self.nodes:
            return Verdict.accept(", ".join(self.nodes))
        if self.wsl:
            return Verdict.refuse(
                "this is WSL without /dev/dxg, through which Windows hands on its GPUs. It needs "
                "WSL 2 and Intel's graphics driver for Windows"
            )
        displays = "; ".join(map(str, self.displays))
        if not self.displays:
            return Verdict.refuse("no GPU of Intel: no device file, and none on the bus")
        driven_displays = [display for display in self.displays if display.driver in _DRIVERS]
        if driven_displays and self.container:
            return Verdict.refuse(
                f"a GPU of Intel is on the PCI bus ({displays}), but this container was given "
                "none: start it with --device /dev/dri, or ask Kubernetes for gpu.intel.com/xe"
            )
        if driven_displays:
            return Verdict.refuse(
                f"a GPU of Intel is on the PCI bus ({displays}), but it has no file "
                "/dev/dri/renderD*: its driver failed to start. Look at: dmesg | grep -E 'xe|i915'"
            )
        return Verdict.refuse(
            f"a GPU of Intel is on the PCI bus ({displays}), but neither i915 nor xe drives it. "
            "Newer GPUs want a newer kernel: Linux 6.12 for Battlemage and Lunar Lake"
        )


def read_system(root: Path = ROOT) -> System:
    """Read the system's GPU files below ``root``."""
    if sys.platform != "linux":
        return System(root)
    wsl = "microsoft" in read_text(root / "proc/sys/kernel/osrelease").lower()
    nodes = sorted(_node_names(root))
    node_paths = [f"/dev/dri/{name}" for name in nodes]
    closed = [f"/dev/dri/{name}" for name in nodes if not _may_open(root / "dev/dri" / name)]
    # Windows hands on all GPUs through one device file, whatever their vendor.
    if wsl and (root / "dev/dxg").exists():
        node_paths.append("/dev/dxg")
    return System(
        root,
        tuple(node_paths),
        tuple(closed),
        tuple(_read_display(path) for path in pci_devices(root, _VENDOR, [_DISPLAY])),
        wsl,
        is_in_container(root),
    )


def _node_names(root: Path) -> Iterator[str]:
    """Yield the names of the render nodes of Intel GPUs."""
    for path in list_folder(root / "dev/dri"):
        vendor = read_text(root / "sys/class/drm" / path.name / "device/vendor").strip()
        if _NODE.fullmatch(path.name) and vendor == _VENDOR:
            yield path.name


def _read_display(folder: Path) -> Display:
    driver = folder / "driver"
    return Display(folder.name, driver.resolve().name if driver.exists() else "")


def _may_open(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)
