"""Detection of Intel's GPUs in system files.

Source: the Linux kernel's documentation of the PCI bus in sysfs and of DRM render nodes; the
names of the kernel's drivers for Intel graphics, ``i915`` and ``xe``.
"""

from __future__ import annotations

from pathlib import Path

from interposer_ops.devices.gpu_files import GPUFiles, GPUVendor, read_gpu_files
from interposer_ops.devices.system_files import pci_devices

_PCI_ID, _PCI_CLASSES = "0x8086", ("0x03",)


def _read_driver(root: Path) -> str:
    """Return the name of Intel's driver that is bound to a GPU on the PCI bus."""
    folders = pci_devices(root, _PCI_ID, _PCI_CLASSES)
    bound_drivers = {(folder / "driver").resolve().name for folder in folders}
    return " and ".join(sorted(bound_drivers & {"i915", "xe"}))


_INTEL = GPUVendor(
    pci_id=_PCI_ID,
    pci_classes=_PCI_CLASSES,
    folder="dev/dri",
    file_names=r"renderD\d+",
    read_driver=_read_driver,
    in_wsl=True,
    refusals={
        ("closed",): "this user may not open {closed}. Join the group that owns it, usually "
        "render: sudo usermod -aG render $USER, then log in anew",
        ("wsl",): "this is WSL without /dev/dxg, through which Windows hands on its GPUs. It needs "
        "WSL 2 and Intel's graphics driver for Windows",
        ("driver", "container"): "a GPU of Intel is on the PCI bus ({displays}), but this "
        "container was given none: start it with --device /dev/dri, or ask Kubernetes for "
        "gpu.intel.com/xe",
        ("driver",): "a GPU of Intel is on the PCI bus ({displays}), but it has no file "
        "/dev/dri/renderD*: its driver failed to start. Look at: dmesg | grep -E 'xe|i915'",
        ("on_bus",): "a GPU of Intel is on the PCI bus ({displays}), but neither i915 nor xe "
        "drives it. Newer GPUs want a newer kernel: Linux 6.12 for Battlemage and Lunar Lake",
        (): "no GPU of Intel: no device file, and none on the bus",
    },
)


def read_system(root: Path = Path("/")) -> GPUFiles:
    """Read the system's GPU files below ``root``."""
    return read_gpu_files(_INTEL, root)
