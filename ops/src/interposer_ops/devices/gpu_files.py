"""GPUs of one vendor, detected from system files before a library of the vendor is loaded.

Only files are read, so the check costs almost nothing on a machine without such a GPU.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from interposer import Verdict
from interposer_ops.devices.system_files import (
    is_in_container,
    list_folder,
    pci_devices,
    read_text,
)

__all__ = ["GPUFiles", "GPUVendor", "read_gpu_files"]


@dataclass(frozen=True, slots=True)
class GPUVendor:
    """System files that show the GPUs of one vendor, and explanations of missing parts.

    Attributes:
        pci_id: such as ``"0x8086"``.
        pci_classes: first digits of the GPUs' PCI classes, such as ``"0x03"`` for display
            controllers.
        folder: folder of the device files, such as ``"dev/dri"``. A file in ``dev/dri`` counts only
            if its device has the vendor's ``pci_id``.
        file_names: regular expression of the device files' names.
        read_driver: reads the version or name of the loaded kernel driver below a root folder, ""
            if none is loaded.
        in_wsl: the vendor's libraries work in WSL, where Windows shares all GPUs by ``/dev/dxg``.
        refusals: texts by names of attributes of ``GPUFiles``. The first text whose attributes are
            all true or not empty explains why there is no GPU; the last one has no attributes.
            Device files that exist are refused by the text for ``closed`` only. A text may contain
            ``{driver}``, ``{closed}``, and ``{addresses}`` or ``{displays}`` for the PCI devices.
    """

    pci_id: str
    pci_classes: Sequence[str]
    folder: str
    file_names: str
    read_driver: Callable[[Path], str]
    in_wsl: bool
    refusals: Mapping[tuple[str, ...], str]


@dataclass(frozen=True, slots=True)
class GPUFiles:
    """GPUs of one vendor and their driver, read from system files.

    Attributes:
        root: folder that contains ``dev``, ``proc`` and ``sys``.
        nodes: device files of GPUs.
        closed: the device files, if this user may open none of them.
        driver: version or name of the kernel driver; empty if none is loaded.
        on_bus: addresses of GPUs on the PCI bus, each with the driver that is bound to it or "".
        wsl: Linux runs inside Windows.
        container: this process runs in a container.
    """

    vendor: GPUVendor
    root: Path
    nodes: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    driver: str = ""
    on_bus: Mapping[str, str] = field(default_factory=dict)
    wsl: bool = False
    container: bool = False

    def judge(self) -> Verdict:
        """Accept the machine if the vendor's libraries may find a GPU, or name the missing part."""
        if sys.platform != "linux":
            wsl_text = ", and in Windows inside WSL;" if self.vendor.in_wsl else ","
            return Verdict.refuse(f"finds GPUs on Linux{wsl_text} this is {sys.platform}")
        for attributes, text in self.vendor.refusals.items():
            # Device files that exist are refused only if the user may open none of them.
            may_apply = not self.nodes or attributes == ("closed",)
            if may_apply and all(getattr(self, attribute) for attribute in attributes):
                return Verdict.refuse(
                    text.format(
                        driver=self.driver,
                        closed=", ".join(self.closed),
                        addresses=", ".join(self.on_bus),
                        displays=self.displays_text,
                    )
                )
        return Verdict.accept(", ".join(self.nodes))

    @property
    def displays_text(self) -> str:
        """The GPUs on the PCI bus, each with the driver that is bound to it."""
        return "; ".join(
            f"{address}, {driver or 'no driver'}" for address, driver in self.on_bus.items()
        )


def read_gpu_files(vendor: GPUVendor, root: Path) -> GPUFiles:
    """Read the system files about the vendor's GPUs below ``root``."""
    if sys.platform != "linux":
        return GPUFiles(vendor, root)
    wsl = "microsoft" in read_text(root / "proc/sys/kernel/osrelease").lower()
    names = sorted(
        path.name
        for path in list_folder(root / vendor.folder)
        if re.fullmatch(vendor.file_names, path.name) and _is_of_vendor(root, path, vendor)
    )
    nodes = [f"/{vendor.folder}/{name}" for name in names]
    closed = [node for node in nodes if not os.access(root / node[1:], os.R_OK | os.W_OK)]
    if wsl and vendor.in_wsl and (root / "dev/dxg").exists():
        nodes.append("/dev/dxg")
    return GPUFiles(
        vendor,
        root,
        tuple(nodes),
        tuple(closed) if closed == nodes else (),
        vendor.read_driver(root),
        {
            device.name: (device / "driver").resolve().name if (device / "driver").exists() else ""
            for device in pci_devices(root, vendor.pci_id, vendor.pci_classes)
        },
        wsl,
        is_in_container(root),
    )


def _is_of_vendor(root: Path, path: Path, vendor: GPUVendor) -> bool:
    if vendor.folder != "dev/dri":
        return True
    return read_text(root / "sys/class/drm" / path.name / "device/vendor").strip() == vendor.pci_id
